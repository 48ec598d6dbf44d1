"""The native implementation of ``Operations``: torch tensors in, memory shared with C++, torch tensors out."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.availability import selected_instruction_set, usable_cpus
from outrider.kernels.cpu.native_layer import NativeLayer
from outrider.kernels.cpu.weight_formats import packed_form
from outrider.kernels.draft_model import ChainLimits, DraftedTokens, DraftModel, PackedDraft
from outrider.kernels.operations import (
    AttentionPlan,
    DecoderLayer,
    DecoderPass,
    DecoderShape,
    PackedDecoder,
    PackedEmbedding,
    PackedLinear,
    RaggedBatch,
    Weight,
)

_KV_DTYPES = {"f32": torch.float32, "f16": torch.float16, "int8": torch.int8}
_SCALE_BYTES = 4


class CpuOperations:
    """Float32 activations, weights in their own form, keys and values in ``kv_cache_dtype``.

    Activations are quantised to int8 (per row and group of 32) where they meet quantised weights. All
    instruction sets give the same bits, and so do all numbers of threads.

    Args:
        num_threads: 0: one for every processor this process may keep busy.
        quantize: what weights stored as floats become: ``none``, ``int8`` or ``int4``. Embedding and head keep 8 bits
            in any case: 4 bits there alone cost the default model a KL divergence of 0.07, int8 activations 0.003.
        kv_cache_dtype: ``f32``, ``f16`` or ``int8``; ``auto`` is ``f16``.
        instruction_set: one of ``_native.instruction_sets()``; None: the best, or what OUTRIDER_CPU_ISA names.
    """

    name = "cpu"

    def __init__(
        self,
        num_threads: int = 0,
        quantize: str = "none",
        kv_cache_dtype: str = "auto",
        instruction_set: str | None = None,
    ) -> None:
        self.machine = _native.Machine(num_threads or usable_cpus(), instruction_set or selected_instruction_set())
        self._quantize = quantize
        self._quantize_vocabulary = "int8" if quantize == "int4" else quantize  # embedding and head
        self._kv_format = "f16" if kv_cache_dtype == "auto" else kv_cache_dtype

    def quantized(self, quantize: str) -> CpuOperations:
        other = copy.copy(self)  # the same machine
        other._quantize = quantize
        other._quantize_vocabulary = "int8" if quantize == "int4" else quantize
        return other

    def pack_linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> _native.PackedLinear:
        return _pack(weights, self._quantize, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, _native.PackedLinear)
        result = torch.empty(len(x), packed.out_features)
        self.machine.linear(_array(x), packed, result.numpy())
        return result

    def pack_embedding(self, weight: Weight) -> _native.PackedLinear:
        return _pack([weight], self._quantize_vocabulary)

    def tied_head(self, table: PackedEmbedding) -> _native.PackedLinear:
        assert isinstance(table, _native.PackedLinear)
        return table

    def pack_head(self, weight: Weight) -> _native.PackedLinear:
        return _pack([weight], self._quantize_vocabulary)

    def embedding(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        assert isinstance(table, _native.PackedLinear)
        result = torch.empty(len(token_ids), table.in_features)
        table.unpack_rows(token_ids.numpy(), result.numpy())
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        result = torch.empty(x.shape)
        n = x.shape[-1]
        self.machine.rms_norm(
            _array(x).reshape(-1, n), _array(weight).reshape(-1, n), eps, result.numpy().reshape(-1, n)
        )
        return result

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        self.machine.rotary(result.numpy(), _array(cos), _array(sin))
        return result

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        result = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        self.machine.silu_mul(_array(gate_up), result.numpy())
        return result

    def kv_layout(self, head_dim: int) -> tuple[torch.dtype, int]:
        return _KV_DTYPES[self._kv_format], head_dim + (_SCALE_BYTES if self._kv_format == "int8" else 0)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, _native.PassPlan)
        self.machine.write_kv(_array(key), _array(value), _bytes(key_cache), _bytes(value_cache), plan)

    def plan_attention(
        self,
        batch: RaggedBatch,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_window: int | None,
    ) -> _native.PassPlan:
        return self.machine.plan_pass(
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.page_tables,
            batch.slot_mapping,
            page_size,
            num_heads,
            num_kv_heads,
            head_dim,
            sliding_window or 0,
            self._kv_format,
            batch.tree_masks,
        )

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, _native.PassPlan)
        result = torch.empty(query.shape)
        self.machine.attention(_array(query), _bytes(key_cache), _bytes(value_cache), scale, plan, result.numpy())
        return result

    def pack_decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> _native.Decoder:
        return _native.Decoder(
            self.machine,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.rms_norm_eps,
            shape.attention_scale,
            [NativeLayer.of(layer) for layer in layers],
        )

    def decode(
        self,
        residual: Tensor,
        decoder: PackedDecoder,
        cache: Tensor,
        decoder_pass: DecoderPass,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> Tensor:
        assert isinstance(decoder, _native.Decoder)
        full, window = decoder_pass.full_plan, decoder_pass.window_plan
        assert full is None or isinstance(full, _native.PassPlan)
        assert window is None or isinstance(window, _native.PassPlan)
        result = residual.contiguous()
        decoder.run(
            result.numpy(),
            _array(decoder_pass.cos),
            _array(decoder_pass.sin),
            _bytes(cache),
            full,
            window,
            first_layer,
            len(cache) if last_layer is None else last_layer,
            None if decoder_pass.embeddings is None else _array(decoder_pass.embeddings),
            decoder_pass.taps,
            None if decoder_pass.tapped is None else decoder_pass.tapped.numpy(),
        )
        return result

    def argmax(self, logits: Tensor) -> Tensor:
        result = torch.empty(len(logits), dtype=torch.int64)
        self.machine.argmax(_array(logits), result.numpy())
        return result

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        values, ids = torch.empty(len(logits), k), torch.empty(len(logits), k, dtype=torch.int32)
        self.machine.top_k(_array(logits), values.numpy(), ids.numpy())
        return ids.long()

    def race_candidates(self, logits: Tensor, temperature: float, draw: int, token_map: Tensor | None = None) -> Tensor:
        ids = torch.empty(len(logits), dtype=torch.int32)
        count = self.machine.race_candidates(
            _array(logits), temperature, draw, ids.numpy(), None if token_map is None else token_map.numpy()
        )
        return ids[:count].long()

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1)

    def probabilities(self, logits: Tensor, indices: Tensor, temperatures: Tensor) -> Tensor:
        result = torch.empty(len(logits))
        self.machine.probabilities(_array(logits), indices.numpy(), _array(temperatures), result.numpy())
        return result

    def pack_draft(self, model: DraftModel) -> _native.DraftChain:
        assert isinstance(model.decoder, _native.Decoder)
        assert isinstance(model.embedding, _native.PackedLinear)
        assert isinstance(model.head, _native.PackedLinear)
        return _native.DraftChain(
            self.machine,
            model.decoder,
            model.sliding_window or 0,
            model.embedding,
            _array(model.norm),
            model.head,
            None if model.token_map is None else model.token_map.numpy(),
            model.conditioned,
        )

    def draft_chain(
        self,
        draft: PackedDraft,
        hidden: Tensor,
        batch: RaggedBatch,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        limits: ChainLimits,
    ) -> DraftedTokens:
        assert isinstance(draft, _native.DraftChain)
        shape = limits.draws.shape  # [num_seqs, max_steps]
        drafted = DraftedTokens(
            np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32), np.zeros(shape[0], dtype=np.int64)
        )
        draft.run(
            _array(hidden),
            batch.positions,
            batch.page_tables,
            _array(cos),
            _array(sin),
            _bytes(cache),
            self._kv_format,
            limits.limits,
            limits.min_survival,
            limits.temperatures,
            limits.draws,
            drafted.token_ids,
            drafted.confidences,
            drafted.counts,
        )
        return drafted

    def copy_kv(self, cache: Tensor, source_slots: Sequence[int], destination_slots: Sequence[int]) -> None:
        sources, destinations = np.array(source_slots, dtype=np.int64), np.array(destination_slots, dtype=np.int64)
        self.machine.copy_kv(_bytes(cache), self._kv_format, sources, destinations)


def _pack(weights: Sequence[Weight], quantize: str, bias: Tensor | None = None) -> _native.PackedLinear:
    form = packed_form(weights, quantize)
    biases = None if bias is None else _array(bias)
    return _native.pack_linear(form.format, weights[0].shape[1], form.blocks, form.channel_scales, biases)


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The tensor's own memory as C++ reads it; a copy only if it is not contiguous."""
    array: npt.NDArray[np.float32] = tensor.contiguous().numpy()
    return array


def _bytes(cache: Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a cache, axes kept but for the last."""
    array: npt.NDArray[np.uint8] = cache.numpy().view(np.uint8)
    return array
