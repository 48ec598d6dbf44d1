"""The contract of the kernels: every operation the transformer is written over.

Three implementations share these signatures: ``reference`` (plain torch, the truth), ``cpu`` (native
SIMD) and ``triton`` (GPUs). The transformer, the page pool and the engine know only this module.

The layers of a decoder are one operation, ``decode``: what lies between two matrix products is so little that
an implementation must be free to fuse it. ``composed_decoder.py`` spells it in the small operations, and says
with that what every fusion must compute.

What every implementation must keep, beyond computing the right thing:

*Row invariance.* A row of any result is bitwise the same whoever shares the pass: one row or five
hundred, first or last, prefilled in chunks of 16 or 512, decoded or verified. So each row is reduced in
an order that depends on nothing but the row's own length. Speculation is lossless because of this rule.

*Null page.* Page 0 of every cache holds zeros for ever. Page tables are padded with it, and positions
past a sequence's end are read from it, so nothing stale (or NaN) of a former owner is ever multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.cpu.availability import native_problem, usable_cpus

if TYPE_CHECKING:
    from outrider.kernels.draft_model import ChainLimits, DraftedTokens, DraftModel, PackedDraft

NULL_PAGE = 0
"""The page that is never allocated and holds zeros."""

MAX_TREE_ROWS = 64
"""Rows of one sequence that may form a token tree: a mask has so many bits."""


class Weight(Protocol):
    """One matrix or vector of a checkpoint, still in its stored form.

    ``quantization`` names the stored form in GGUF's words (``F32``, ``BF16``, ``Q4_1``, ...).
    ``blocks`` are the stored bytes, ``[out_features, bytes_per_row]``, rows in the order the transformer
    wants them. ``dense()`` is the same weight as float32 ``[out_features, in_features]`` (or ``[n]``).
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def quantization(self) -> str: ...

    @property
    def blocks(self) -> npt.NDArray[np.uint8]: ...

    def dense(self) -> Tensor: ...


class PackedLinear(Protocol):
    """A linear layer in the form one implementation computes it in; opaque to everyone else."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class PackedEmbedding(Protocol):
    """An embedding table in the form one implementation reads it in; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers of a decoder have in common."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer, packed by the kernels that will read them."""

    input_norm: Tensor  # [hidden_size]
    qkv: PackedLinear
    query_key_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], a weight for each head of q, then of k
    attention_output: PackedLinear
    mlp_norm: Tensor  # [hidden_size]
    gate_up: PackedLinear
    down: PackedLinear
    has_window: bool
    embedding_norm: Tensor | None = None
    """``[hidden_size]``. With it the layer is *wide*: its qkv has ``2 * hidden_size`` inputs and reads
    ``concat(rms_norm(embeddings, embedding_norm), rms_norm(residual, input_norm))`` (EAGLE-3, Li et al. 2025)."""
    norm_before_residual: bool = False
    """Of a wide layer: its residual stream goes on from ``rms_norm(residual, input_norm)``, not ``residual``."""


class PackedDecoder(Protocol):
    """The layers of a decoder in the form one implementation runs them in; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which rows one pass computes: for each sequence a run of consecutive positions, laid end to end.

    The rows of sequence ``i`` are ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` and stand at the *last*
    positions of its ``seq_lens[i]`` tokens; each row attends to every position up to its own.
    All on the host: implementations move what they need.

    ``tree_masks`` makes the rows of a sequence a token tree: bit ``j`` of a row says that the sequence's ``j``-th row
    in this pass is an ancestor of it, or the row itself, which is always set; an ancestor comes before its descendants.
    A row stands at the position of its depth, ``num_cached + number of bits - 1`` with ``num_cached = seq_lens[i] -
    num_rows``; its KV goes to the slot that ``slot_mapping`` names, which must be its own. It attends to all cached
    tokens, then to its ancestors from the root down: the very order, and so the very bits, of the same path computed
    as a run. At most ``MAX_TREE_ROWS`` rows a sequence; a sequence whose rows are all 0 is a run, of any length.
    """

    cu_seqlens_q: npt.NDArray[np.int32]  # [num_seqs + 1]
    seq_lens: npt.NDArray[np.int32]  # [num_seqs], tokens after this pass, its rows included
    page_tables: npt.NDArray[np.int32]  # [num_seqs, max_pages], padded with NULL_PAGE
    positions: npt.NDArray[np.int64]  # [num_tokens]
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens], page * page_size + offset: where a row's KV goes
    tree_masks: npt.NDArray[np.uint64] | None = None  # [num_tokens], None: every sequence is a run

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class AttentionPlan(Protocol):
    """What an implementation derives once a pass from a ``RaggedBatch`` and reuses in every layer."""


@dataclass(frozen=True, slots=True)
class DecoderPass:
    """What the layers of one pass share."""

    cos: Tensor  # [num_tokens, head_dim // 2], the rows' rotary angles
    sin: Tensor
    full_plan: AttentionPlan | None  # for layers that see everything; None if there are none
    window_plan: AttentionPlan | None  # for layers with a sliding window
    embeddings: Tensor | None = None  # [num_tokens, hidden_size], what wide layers read; None if there are none
    taps: tuple[int, ...] = ()
    """Layers before which the residual stream is wanted; the number of layers: what the last one left."""
    tapped: Tensor | None = None
    """``[num_tokens, len(taps) * hidden_size]``, contiguous: ``decode`` fills it in, tap by tap along a row."""


class Operations(Protocol):
    """The operations themselves. Tensors are float32 unless an implementation documents otherwise."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu`` or ``triton``."""

    def quantized(self, quantize: str) -> Operations:
        """These operations, on the same threads, with weights stored as floats packed as ``quantize`` says.

        ``none``, ``int8`` or ``int4``, as for ``load_operations``. What either packs, both can run: a draft is
        quantised as suits it, beside a target that is not. The reference kernels quantise nothing and give themselves.
        """

    def pack_linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> PackedLinear:
        """Stack ``weights`` (same in_features) row on row into one linear layer, with an optional bias.

        ``bias``: ``[sum of out_features]``.
        """

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """``x @ W.T + bias``: ``[num_rows, in_features]`` to ``[num_rows, out_features]``."""

    def pack_embedding(self, weight: Weight) -> PackedEmbedding:
        """Prepare a table of ``[vocab_size, hidden_size]`` for lookups."""

    def tied_head(self, table: PackedEmbedding) -> PackedLinear:
        """The table as the linear layer of a head that shares its weights; one memory for both where that can be."""

    def pack_head(self, weight: Weight) -> PackedLinear:
        """A head with weights of its own, ``[vocab_size, hidden_size]``.

        Apart from ``pack_linear``, since an implementation that quantises may keep more of it: what a head loses is
        in the logits, undiluted.
        """

    def embedding(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        """Rows of the table: int64 ``[num_tokens]`` to ``[num_tokens, hidden_size]``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich 2019, eq. 4).

        ``weight``: ``[n]`` for rows ``[..., n]``, or ``[num_heads, n]`` for ``[num_tokens, num_heads, n]``.
        """

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the two halves of each head (Su et al. 2021, in GPT-NeoX's half-split layout).

        ``x``: ``[num_tokens, num_heads, head_dim]``; ``cos``, ``sin``: ``[num_tokens, head_dim // 2]``.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * intermediate_size]``, gate first."""

    def kv_layout(self, head_dim: int) -> tuple[torch.dtype, int]:
        """What a cache is made of: its dtype, and its ``width``, the elements of one token and KV head.

        Only the size is agreed upon. How an implementation orders what is inside a page is its own business;
        pages are copied and moved whole.
        """

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        """Store the rows' keys and values in their slots.

        ``key``, ``value``: ``[num_tokens, num_kv_heads, head_dim]``;
        caches: ``[num_pages, page_size, num_kv_heads, width]``, see ``kv_layout``.
        """

    def plan_attention(
        self,
        batch: RaggedBatch,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_window: int | None,
    ) -> AttentionPlan:
        """Prepare ``paged_attention`` for one pass. With a window, a row at p sees positions > p - window."""

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, plan: AttentionPlan
    ) -> Tensor:
        """Causal softmax attention of ragged rows over paged keys and values (MHA, GQA and MQA).

        ``query``: ``[num_tokens, num_heads, head_dim]``; the result has its shape. Query head ``h`` reads
        KV head ``h // (num_heads // num_kv_heads)``. The rows' own KV must have been written before.
        """

    def pack_decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> PackedDecoder:
        """Prepare layers for ``decode``. Their linear layers must come from ``pack_linear``."""

    def decode(
        self,
        residual: Tensor,
        decoder: PackedDecoder,
        cache: Tensor,
        decoder_pass: DecoderPass,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> Tensor:
        """Run the layers ``first_layer`` to ``last_layer`` (exclusive; None: all) and write their keys and values.

        ``residual``: ``[num_tokens, hidden_size]``, what the layer before left; it may be changed in place. Taps at
        these layers are filled in, that of the end by the call that runs the last layer.
        ``cache``: ``[num_layers, 2, num_pages, page_size, num_kv_heads, width]``, keys before values.
        Returns the residual stream after the last of them, not normalised.
        """

    def argmax(self, logits: Tensor) -> Tensor:
        """The lowest id among the largest of each row: ``[num_rows, vocab_size]`` to int64 ``[num_rows]``.

        -1 for a row that cannot be chosen from: it holds NaN or +infinity, or nothing finite.
        """

    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """Ids of each row's ``k`` largest, falling, of equal ones the lowest first: int64 ``[num_rows, k]``.

        NaN counts as -infinity. ``1 <= k <= vocab_size``.
        """

    def race_candidates(self, logits: Tensor, temperature: float, draw: int, token_map: Tensor | None = None) -> Tensor:
        """Tokens that can win a race over a row ``[vocab_size]``: ascending int64 indices, the winner among them.

        In the race token ``i`` finishes at ``E_i / w_i``, where ``w_i = exp((logits[i] - max) / temperature)`` and
        ``E_i = -log(u_i)``, ``u_i`` in (0, 1] from ``draw`` (64 bits): with ``bits`` the SplitMix64 output of
        ``i * 0x9E3779B97F4A7C15 + draw``, ``u_i = ((bits >> 11) + 1) / 2**53``. The first to finish is a sample of
        the softmax; to know it, only a few must be computed exactly. Empty for a row that ``argmax`` calls unusable.

        ``token_map``: int64 ``[vocab_size]``, the ids whose numbers count in ``u_i`` where they are not ``i`` itself.
        """

    def probabilities(self, logits: Tensor, indices: Tensor, temperatures: Tensor) -> Tensor:
        """Of each row, the softmax at one index: float32 ``[num_rows]``.

        ``logits``: ``[num_rows, vocab_size]``, usable rows as ``argmax`` has it; ``indices``: int64 ``[num_rows]``;
        ``temperatures``: float32 ``[num_rows]``, what logits are divided by, 0 counts as 1.
        """

    def pack_draft(self, model: DraftModel) -> PackedDraft:
        """Prepare a draft for ``draft_chain``. Its parts must be packed by these operations."""

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
        """Guess a chain of tokens for each sequence, one token a step, all sequences together.

        Args:
            hidden: ``[num_seqs, hidden_size]``, what the layers left of each sequence's last row, not normalised; it
                may be changed.
            batch: one row a sequence, the first of its chain: position ``q = num_tokens``, ``seq_lens = q + 1``.
                Page tables must reach to position ``q + limit - 2``; what chains compute is written there.
            cos: ``[num_seqs, max_steps, head_dim // 2]``, the rotary angles of positions ``q``, ``q + 1``, ...
            sin: the same.
            cache: of the draft's layers, as for ``decode``.
            limits: where chains end.

        In each step ``logits = linear(rms_norm(hidden, norm), head)``. The token is their ``argmax``, or at a
        temperature the winner of the race over them with the numbers of the ids that ``token_map`` names: the target
        runs the same race, so both tend to choose the same. Its confidence is its ``probabilities``; survival is the
        product of confidences so far, in float64. A chain ends before a token that brings it under ``min_survival``,
        before a row that cannot be chosen from, and after ``limits`` tokens. Otherwise the token's row goes through
        the decoder and gives the next ``hidden``. A sequence's chain is bitwise the same alone and in company.
        """

    def copy_kv(self, cache: Tensor, source_slots: Sequence[int], destination_slots: Sequence[int]) -> None:
        """Copy tokens' keys and values in all layers, as if all were read before any is written.

        ``cache``: as for ``decode``. Moves the accepted rows of a token tree to where they belong.
        """

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Row-wise, ``[num_rows, vocab_size]``."""


def load_operations(
    name: str, *, num_threads: int = 0, quantize: str = "none", kv_cache_dtype: str = "auto"
) -> Operations:
    """The implementation called ``name``.

    Args:
        name: ``cpu`` or ``reference``.
        num_threads: of the native kernels; 0: one for every processor this process may keep busy.
        quantize: what weights stored as floats become: ``none``, ``int8`` or ``int4``. Native kernels only.
        kv_cache_dtype: ``f32``, ``f16``, ``int8``, or ``auto``: what suits the implementation.

    Raises:
        ValueError: there is none of that name, it is not built, or it cannot do what is asked.
    """
    if name == "cpu":
        if (problem := native_problem()) is not None:
            raise ValueError(problem)
        from outrider.kernels.cpu.operations import CpuOperations

        return CpuOperations(num_threads=num_threads or usable_cpus(), quantize=quantize, kv_cache_dtype=kv_cache_dtype)
    if name == "reference":
        from outrider.kernels.reference.operations import ReferenceOperations

        if quantize != "none" or kv_cache_dtype not in ("auto", "f32"):
            raise ValueError(
                f"the reference kernels quantise nothing and keep keys and values as f32; they cannot do "
                f"quantize={quantize!r} with kv_cache_dtype={kv_cache_dtype!r}"
            )
        return ReferenceOperations()
    raise ValueError(f"no kernels called {name!r}; there are: reference, cpu")
