"""The reference implementation of ``Operations``: short, plain and exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from outrider.kernels.composed_decoder import ComposedDecoder
from outrider.kernels.draft_chain import ComposedDraft
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
from outrider.kernels.reference import attention
from outrider.kernels.reference.attention import ReferenceAttentionPlan
from outrider.kernels.reference.linear import TiledLinear


@dataclass(frozen=True, slots=True)
class DenseTable:
    """An embedding table, ``rows`` ``[vocab_size, hidden_size]``."""

    weight: Weight
    rows: Tensor


class ReferenceOperations:
    """Float32 on the CPU. Its results are the truth; see the folder's docstring for how rows keep their bits."""

    name = "reference"

    def quantized(self, quantize: str) -> ReferenceOperations:
        return self

    def pack_linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> TiledLinear:
        return TiledLinear(weights, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, TiledLinear)
        return packed(x)

    def pack_embedding(self, weight: Weight) -> DenseTable:
        return DenseTable(weight, weight.dense())

    def tied_head(self, table: PackedEmbedding) -> TiledLinear:
        assert isinstance(table, DenseTable)
        return TiledLinear([table.weight], None)

    def pack_head(self, weight: Weight) -> TiledLinear:
        return TiledLinear([weight], None)

    def embedding(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        assert isinstance(table, DenseTable)
        return table.rows.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            return rms_norm(x, weight.shape, weight, eps)
        return rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None, :], sin[:, None, :]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (gate / gate.neg().exp_().add_(1.0)).mul_(up)

    def kv_layout(self, head_dim: int) -> tuple[torch.dtype, int]:
        return torch.float32, head_dim

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, ReferenceAttentionPlan)
        key_cache.view(-1, *key.shape[1:]).index_copy_(0, plan.slot_mapping, key)
        value_cache.view(-1, *value.shape[1:]).index_copy_(0, plan.slot_mapping, value)

    def plan_attention(
        self,
        batch: RaggedBatch,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_window: int | None,
    ) -> ReferenceAttentionPlan:
        return attention.plan_attention(batch, page_size, num_heads, num_kv_heads, head_dim, sliding_window)

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, ReferenceAttentionPlan)
        return attention.paged_attention(query, key_cache, value_cache, scale, plan)

    def pack_decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> ComposedDecoder:
        return ComposedDecoder(layers, shape)

    def decode(
        self,
        residual: Tensor,
        decoder: PackedDecoder,
        cache: Tensor,
        decoder_pass: DecoderPass,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> Tensor:
        assert isinstance(decoder, ComposedDecoder)
        return decoder.run(self, residual, cache, decoder_pass, first_layer, last_layer)

    def argmax(self, logits: Tensor) -> Tensor:
        usable = torch.isfinite(logits.amax(dim=-1))  # amax hands on NaN
        return torch.where(usable, logits.argmax(dim=-1), -1)

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        falling = torch.where(logits.isnan(), -torch.inf, logits).argsort(dim=-1, descending=True, stable=True)
        return falling[:, :k]

    def race_candidates(self, logits: Tensor, temperature: float, draw: int, token_map: Tensor | None = None) -> Tensor:
        if int(self.argmax(logits[None])[0]) < 0:
            return torch.empty(0, dtype=torch.int64)
        return torch.arange(len(logits))

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1)

    def probabilities(self, logits: Tensor, indices: Tensor, temperatures: Tensor) -> Tensor:
        heat = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        weights = ((logits - logits.amax(dim=-1, keepdim=True)) / heat).exp_()
        return weights.gather(1, indices[:, None])[:, 0] / weights.sum(dim=-1)

    def pack_draft(self, model: DraftModel) -> ComposedDraft:
        return ComposedDraft(model)

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
        assert isinstance(draft, ComposedDraft)
        return draft.chain(self, hidden, batch, cos, sin, cache, limits)

    def copy_kv(self, cache: Tensor, source_slots: Sequence[int], destination_slots: Sequence[int]) -> None:
        tokens = cache.flatten(2, 3)  # [num_layers, 2, num_pages * page_size, num_kv_heads, width]
        tokens[:, :, list(destination_slots)] = tokens[:, :, list(source_slots)]
