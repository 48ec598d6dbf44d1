"""A draft's chain of tokens, composed of the small operations: what every fused ``draft_chain`` must compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.draft_model import ChainLimits, DraftedTokens, DraftModel
from outrider.kernels.operations import NULL_PAGE, AttentionPlan, DecoderPass, Operations, RaggedBatch
from outrider.kernels.race import exponentials


@dataclass(frozen=True, slots=True)
class ComposedDraft:
    """A ``PackedDraft`` for implementations that fuse nothing."""

    model: DraftModel

    def chain(
        self,
        ops: Operations,
        hidden: Tensor,
        batch: RaggedBatch,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        limits: ChainLimits,
    ) -> DraftedTokens:
        """``Operations.draft_chain``, operation by operation."""
        num_seqs, max_steps = limits.draws.shape
        check_chains(batch, cache.shape[3], limits)
        token_ids = np.full((num_seqs, max_steps), -1, dtype=np.int64)
        confidences = np.zeros((num_seqs, max_steps), dtype=np.float32)
        counts = np.zeros(num_seqs, dtype=np.int64)
        survival = np.ones(num_seqs)
        alive = np.flatnonzero(limits.limits > 0)  # the sequences whose chains go on; `hidden` has a row for each
        hidden = hidden[torch.from_numpy(alive)]
        for step in range(max_steps):
            if len(alive) == 0:
                break
            tokens, confidence = self._choose(ops, hidden, alive, step, limits)
            survival[alive] *= confidence
            worth = (limits.min_survival[alive] <= 0) | (survival[alive] >= limits.min_survival[alive])
            chosen = (tokens >= 0) & worth
            token_ids[alive[chosen], step], confidences[alive[chosen], step] = tokens[chosen], confidence[chosen]
            counts[alive[chosen]] += 1
            goes_on = chosen & (limits.limits[alive] > step + 1)
            alive, tokens, hidden = alive[goes_on], tokens[goes_on], hidden[torch.from_numpy(goes_on)]
            if len(alive) > 0:
                rows = _rows_at(batch, alive, step, cache.shape[3])
                index = torch.from_numpy(alive)
                hidden = self._next(ops, hidden, tokens, rows, cos[index, step], sin[index, step], cache)
        return DraftedTokens(token_ids, confidences, counts)

    def _choose(
        self, ops: Operations, hidden: Tensor, alive: npt.NDArray[np.int64], step: int, limits: ChainLimits
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The token that follows each row, as the target numbers it, and its probability; -1 where there is none."""
        model = self.model
        logits = ops.linear(ops.rms_norm(hidden, model.norm, model.shape.rms_norm_eps), model.head)
        chosen = ops.argmax(logits)
        for row, sequence in enumerate(alive):
            temperature = float(limits.temperatures[sequence])
            if temperature > 0 and chosen[row] >= 0:
                draw = int(limits.draws[sequence, step])
                chosen[row] = _race(ops, logits[row], temperature, draw, model.token_map)
        temperatures = torch.from_numpy(limits.temperatures[alive].astype(np.float32))
        confidence = ops.probabilities(logits, chosen.clamp(min=0), temperatures)
        token_ids = chosen if model.token_map is None else model.token_map[chosen.clamp(min=0)]
        return torch.where(chosen < 0, -1, token_ids).numpy(), torch.where(chosen < 0, 0.0, confidence).numpy()

    def _next(
        self,
        ops: Operations,
        hidden: Tensor,
        tokens: npt.NDArray[np.int64],
        rows: RaggedBatch,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """Put one token more of each chain through the decoder."""
        model, shape = self.model, self.model.shape

        def plan(window: int | None) -> AttentionPlan:
            return ops.plan_attention(rows, cache.shape[3], shape.num_heads, shape.num_kv_heads, shape.head_dim, window)

        embeddings = ops.embedding(torch.from_numpy(tokens), model.embedding)
        window_plan = None if model.sliding_window is None else plan(model.sliding_window)
        decoder_pass = DecoderPass(cos, sin, plan(None), window_plan, embeddings if model.conditioned else None)
        return ops.decode(hidden if model.conditioned else embeddings, model.decoder, cache, decoder_pass)


def check_chains(batch: RaggedBatch, page_size: int, limits: ChainLimits) -> None:
    """Raise ValueError where chains and page tables do not fit each other."""
    num_seqs, max_steps = limits.draws.shape
    if batch.num_seqs != num_seqs or batch.num_tokens != num_seqs:
        raise ValueError(
            f"a chain starts from one row a sequence; got {batch.num_tokens} rows of {batch.num_seqs} sequences for "
            f"{num_seqs} chains"
        )
    longest = int(limits.limits.max(initial=0))
    if longest > max_steps:
        raise ValueError(f"a chain may have {longest} tokens, and there is room for {max_steps}")
    num_computed = batch.seq_lens + limits.limits - 2  # the last token's row is not computed
    room = batch.page_tables.shape[1] * page_size
    if (num_computed > room).any():
        raise ValueError(f"a chain needs {int(num_computed.max())} positions, and its page table has {room}")
    last_pages = batch.page_tables[np.arange(num_seqs), np.maximum(num_computed - 1, 0) // page_size]
    if ((last_pages == NULL_PAGE) & (limits.limits > 1)).any():
        raise ValueError("a chain would write into the null page: reserve its pages first")


def _rows_at(batch: RaggedBatch, alive: npt.NDArray[np.int64], step: int, page_size: int) -> RaggedBatch:
    """One row for each of these sequences, ``step`` positions on."""
    positions = batch.positions[alive] + step
    page_tables = batch.page_tables[alive]
    pages = page_tables[np.arange(len(alive)), positions // page_size].astype(np.int64)
    return RaggedBatch(
        cu_seqlens_q=np.arange(len(alive) + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        page_tables=page_tables,
        positions=positions,
        slot_mapping=pages * page_size + positions % page_size,
    )


def _race(ops: Operations, logits: Tensor, temperature: float, draw: int, token_map: Tensor | None) -> int:
    """The index that wins the race over a row ``[vocab_size]``."""
    candidates = ops.race_candidates(logits, temperature, draw, token_map)
    token_ids = candidates if token_map is None else token_map[candidates]
    chances = logits[candidates].numpy().astype(np.float64) / temperature
    with np.errstate(divide="ignore"):  # what underflows never finishes
        times = exponentials(draw, token_ids.numpy()) / np.exp(chances - chances.max())
    return int(candidates[times.argmin()])
