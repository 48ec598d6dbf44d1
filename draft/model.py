"""Drafting with a model whose layers lie in the target's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest, VerifiedRows
from outrider.draft.model_rows import FollowedSequence, PendingRow, ragged_batch
from outrider.kernels.draft_model import ChainLimits, PackedDraft
from outrider.kernels.operations import Operations, RaggedBatch
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.verify.random_numbers import Purpose, draw
from outrider.verify.rope import RotaryTable

SOURCE = "model"
MAX_PENDING_ROWS = 64  # of a sequence: their features are kept, 7 kB each for the default model


class DraftNetwork(Protocol):
    """The model itself: what an independent model and a head conditioned on the target have in common."""

    @property
    def name(self) -> str:
        """What it is called: most often the folder it lies in."""

    @property
    def fingerprint(self) -> str:
        """Identifies its weights for caches."""

    @property
    def kv_layers(self) -> LayerGroup: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """As ``PagedDrafter.taps``; empty where it reads tokens alone."""

    @property
    def vocab_size(self) -> int:
        """Ids below it can be read."""

    @property
    def feature_size(self) -> int:
        """Of one position, ``len(taps) * target's hidden_size``."""

    @property
    def packed(self) -> PackedDraft: ...

    def residual(self, token_ids: Tensor, features: Tensor | None, batch: RaggedBatch, storage: KVStorage) -> Tensor:
        """Compute rows and write their keys and values; what the layers left ``[num_tokens, hidden_size]``.

        ``token_ids``: int64 ``[num_tokens]``. ``features``: ``[num_tokens, len(taps) * target's hidden_size]``, each
        of the position before its row's, zeros where it is not known; None where none is.
        """

    @property
    def rotary(self) -> RotaryTable:
        """The angles of its positions."""


@dataclass(slots=True)
class DraftCounts:
    """Rows of the draft, apart from the target's."""

    num_settled: int = 0  # of verified tokens
    num_chained: int = 0  # of guesses; written over when their tokens are verified


@dataclass(slots=True)
class ModelDrafter:
    """A ``PagedDrafter`` over a ``DraftNetwork``.

    0            frontier          frontier + len(pending)
    ├── computed ──┼── known, to compute ──┤ (chains of a step)

    A row waits in ``pending`` until the sequence is drafted for, or ``settle``; and longer where its slot is not
    reserved yet, which can only happen to the last. So a draft begins with the head on the last row's hidden state,
    whoever guessed the tokens before it, and a full acceptance leaves no hole: the rows that a chain computed are
    computed again from what was verified.
    """

    network: DraftNetwork
    operations: Operations
    counts: DraftCounts = field(default_factory=DraftCounts)
    _storage: KVStorage | None = None
    _followed: dict[int, FollowedSequence] = field(default_factory=dict)
    _ended: list[FollowedSequence] = field(default_factory=list)  # with rows that are in published pages, maybe

    @property
    def name(self) -> str:
        return SOURCE

    @property
    def kv_layers(self) -> LayerGroup:
        return self.network.kv_layers

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps

    def attach(self, storage: KVStorage) -> None:
        self._storage = storage

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Nothing: what there is to know of a sequence, ``observe`` has told."""

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Nothing, as in ``begin``."""

    def observe(self, rows: Sequence[VerifiedRows]) -> None:
        """Note the rows that these tokens give: one for each token after the first, one for the token after them."""
        for verified in rows:
            followed = self._followed.get(verified.sequence_id)
            if followed is None or followed.pages is not verified.pages:  # new, or back from a preemption
                followed = self._followed[verified.sequence_id] = FollowedSequence(verified.pages)
            if followed.num_tokens != verified.start + 1:  # the first pass, after the prefix that was found
                followed.restart(verified.start, PendingRow(verified.token_ids[0], None))
            # A copy: the features of a whole pass must not be kept for as long as these rows wait.
            features = verified.features.clone() if self.taps and verified.features is not None else None
            for index, token_id in enumerate([*verified.token_ids[1:], verified.next_token_id]):
                if token_id is not None:
                    followed.add(PendingRow(token_id, None if features is None else features[index]))

    @property
    def must_settle(self) -> bool:
        """Rows of a sequence that is not drafted for may wait: many cost little more than one."""
        return bool(self._ended) or any(len(f.pending) > MAX_PENDING_ROWS for f in self._followed.values())

    def settle(self) -> None:
        """Compute every row that waits and has a slot, in one pass."""
        ended, self._ended = self._ended, []  # whatever happens now, not again
        self._compute([*ended, *self._followed.values()])

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; the rows of its verified tokens are computed yet, for who finds its pages."""
        followed = self._followed.pop(sequence_id, None)
        if followed is not None and followed.pending:
            followed.freeze()
            self._ended.append(followed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Chains of the likeliest tokens or, at a temperature, of the winners of the target's own races."""
        known = [self._followed.get(request.sequence_id) for request in requests]
        self._compute([followed for followed in known if followed is not None])  # whose slots are reserved by now
        chains: list[tuple[int, FollowedSequence, int]] = []
        for index, (request, followed) in enumerate(zip(requests, known, strict=True)):
            if followed is None or followed.hidden is None:
                continue
            limit = min(request.max_draft_tokens, self._room(followed))
            if limit > 0:
                chains.append((index, followed, limit))
        drafts = [NO_DRAFT] * len(requests)
        if chains:
            guesses = self._chain([requests[i] for i, *_ in chains], [f for _, f, _ in chains], [n for *_, n in chains])
            for (index, *_), draft in zip(chains, guesses, strict=True):
                drafts[index] = draft
        return drafts

    def _room(self, followed: FollowedSequence) -> int:
        """How long a chain may be: its last token's row is not computed, all others need a slot."""
        return followed.num_slots(self._pages.page_size) - followed.frontier + 1

    @property
    def _pages(self) -> KVStorage:
        assert self._storage is not None, "a drafter is attached before it is used"
        return self._storage

    def _compute(self, sequences: Sequence[FollowedSequence]) -> None:
        """Compute the rows of these that wait and have a slot."""
        page_size = self._pages.page_size
        parts = [(followed, followed.num_computable(page_size)) for followed in sequences]
        parts = [(followed, count) for followed, count in parts if count > 0]
        if not parts:
            return
        rows = [row for followed, count in parts for row in followed.pending[:count]]
        batch = ragged_batch([(f.page_table, f.frontier, f.frontier + count) for f, count in parts], page_size)
        token_ids = torch.from_numpy(np.array([self._readable(row.token_id) for row in rows], dtype=np.int64))
        hidden = self.network.residual(token_ids, self._features(rows), batch, self._pages)
        self.counts.num_settled += len(rows)
        for (followed, count), stop in zip(parts, batch.cu_seqlens_q[1:].tolist(), strict=True):
            followed.computed(count, hidden[stop - 1])

    def _readable(self, token_id: int) -> int:
        # A target may have ids that no text gives and the draft does not know; what it guesses then is of no account.
        return token_id if token_id < self.network.vocab_size else 0

    def _features(self, rows: Sequence[PendingRow]) -> Tensor | None:
        """``[len(rows), len(taps) * hidden_size]``; None without taps."""
        if not self.taps:
            return None
        known = next((row.feature for row in rows if row.feature is not None), None)
        if known is None:
            return None
        unknown = torch.zeros_like(known)
        return torch.stack([unknown if row.feature is None else row.feature for row in rows])

    def _chain(
        self, requests: Sequence[DraftRequest], sequences: Sequence[FollowedSequence], lengths: Sequence[int]
    ) -> list[Draft]:
        max_steps = max(lengths)
        limits = ChainLimits(
            limits=np.array(lengths, dtype=np.int64),
            min_survival=np.array([request.min_survival for request in requests], dtype=np.float64),
            temperatures=np.array([request.temperature for request in requests], dtype=np.float64),
            draws=_draws(requests, [f.frontier for f in sequences], lengths),
        )
        # One row a sequence, though a chain of one token computes none and may have no slot for it.
        tables = [(f.page_table, f.frontier, f.frontier + 1) for f in sequences]
        batch = ragged_batch(tables, self._pages.page_size)
        cos, sin = self._angles([f.frontier for f in sequences], lengths)
        hidden = torch.stack([f.hidden for f in sequences if f.hidden is not None])
        cache = self._pages.layers(self.kv_layers.name)
        shape = (len(sequences), max_steps, -1)
        drafted = self.operations.draft_chain(
            self.network.packed, hidden, batch, cos.view(shape), sin.view(shape), cache, limits
        )
        self.counts.num_chained += int(np.maximum(drafted.counts - 1, 0).sum())
        return [
            Draft(
                token_ids=tuple(token_ids[:count].tolist()),
                confidences=tuple(confidences[:count].tolist()),
                source=SOURCE,
            )
            if count > 0
            else NO_DRAFT
            for token_ids, confidences, count in zip(
                drafted.token_ids, drafted.confidences, drafted.counts, strict=True
            )
        ]

    def _angles(self, positions: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each chain's positions, each ``[num_seqs * max_steps, head_dim // 2]``; shorter ones repeat their last."""
        if len(positions) == 1:
            return self.network.rotary.span(positions[0], positions[0] + lengths[0])
        last = np.array(lengths, dtype=np.int64)[:, None] - 1
        steps = np.minimum(np.arange(max(lengths), dtype=np.int64), last)
        return self.network.rotary.at(torch.from_numpy((np.array(positions)[:, None] + steps).reshape(-1)))


def _draws(
    requests: Sequence[DraftRequest], positions: Sequence[int], lengths: Sequence[int]
) -> npt.NDArray[np.uint64]:
    """The numbers with which the target will choose at these positions and after: ``[num_seqs, max_steps]``."""
    draws = np.zeros((len(requests), max(lengths)), dtype=np.uint64)
    for index, (request, position, length) in enumerate(zip(requests, positions, lengths, strict=True)):
        if request.temperature > 0:
            draws[index, :length] = [draw(request.seed, position + step, Purpose.TARGET) for step in range(length)]
    return draws
