"""The drafter as the engine uses it: whatever it does, the step goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from outrider.draft.base import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRequest,
    InformedDrafter,
    PagedDrafter,
    SequenceFacts,
    VerifiedRows,
)
from outrider.kvcache.storage import KVStorage
from outrider.server.engine.sequence import Sequence
from outrider.verify.tree import is_tree

logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Keeps a drafter's failures away from the requests it drafts for, and the time it takes in mind.

    A drafter that raises loses the sequences concerned: they go on without drafts. A draft with an id the
    model does not have ends before that id; one that is too long is cut.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int, samples: bool = True) -> None:
        """``samples``: whether drafts may be drawn at the request's temperature; else they are the likeliest."""
        self._drafter = drafter
        self._paged = cast("PagedDrafter", drafter) if hasattr(drafter, "kv_layers") else None
        self._vocab_size = vocab_size
        self._samples = samples
        self._followed: dict[int, Sequence] = {}  # by sequence id; what a paged drafter has seen rows of
        self._spent_s = 0.0

    @property
    def taps(self) -> tuple[int, ...]:
        """Where it wants to see the target's residual stream."""
        return () if self._paged is None else self._paged.taps

    def attach(self, storage: KVStorage) -> None:
        if self._paged is not None:
            self._paged.attach(storage)

    def take_spent_ms(self) -> float:
        """What it has taken since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s * 1000

    def begin(self, sequence: Sequence) -> None:
        """Follow a sequence from here on."""
        if self._drafter is None or sequence.is_lost:
            return
        drafter, token_ids = self._drafter, sequence.token_ids(0, sequence.num_tokens)
        sequence.is_drafted = True

        def begin() -> None:
            drafter.begin(sequence.sequence_id, token_ids)
            if isinstance(drafter, InformedDrafter):
                drafter.inform(sequence.sequence_id, _facts(sequence))

        self._guard([sequence], begin)

    def extend(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """Tell of verified tokens."""
        if sequence.is_drafted and self._drafter is not None:
            drafter = self._drafter
            self._guard([sequence], lambda: drafter.extend(sequence.sequence_id, token_ids))

    @property
    def is_paged(self) -> bool:
        """Whether it needs slots for its drafts."""
        return self._paged is not None

    def observe(self, verified: SequenceOf[tuple[Sequence, VerifiedRows]]) -> None:
        """Tell of what a pass verified, before any of these sequences is released."""
        if self._paged is None:
            return
        paged, seen = self._paged, [(s, rows) for s, rows in verified if not s.is_lost and rows.token_ids]
        self._followed.update((sequence.sequence_id, sequence) for sequence, _ in seen)
        if seen:
            self._guard([sequence for sequence, _ in seen], lambda: paged.observe([rows for _, rows in seen]))

    @property
    def must_settle(self) -> bool:
        """Whether a paged drafter has rows to compute before the next plan, whoever is in it."""
        return self._paged is not None and self._paged.must_settle

    def settle(self) -> None:
        """Let it compute what it still has to, of everything that was verified."""
        if self._paged is not None:
            self._guard(list(self._followed.values()), self._paged.settle)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; harmless where it was not followed."""
        observed = self._followed.pop(sequence.sequence_id, None) is not None
        if (sequence.is_drafted or observed) and self._drafter is not None:
            drafter = self._drafter
            sequence.is_drafted = False
            self._guard([], lambda: drafter.release(sequence.sequence_id))

    def propose(
        self, sequences: SequenceOf[Sequence], limits: SequenceOf[int], min_survivals: SequenceOf[float] | None = None
    ) -> list[Draft]:
        """A draft of at most its limit for each sequence, empty where there is none."""
        drafts = [NO_DRAFT] * len(sequences)
        asked = [i for i, sequence in enumerate(sequences) if sequence.is_drafted and limits[i] > 0]
        if not asked or self._drafter is None:
            return drafts
        drafter = self._drafter
        requests = [
            self._request(sequences[i], limits[i], 0.0 if min_survivals is None else min_survivals[i]) for i in asked
        ]
        proposed: list[Draft] = []
        self._guard([sequences[i] for i in asked], lambda: proposed.extend(drafter.propose(requests)))
        for index, draft in zip(asked, proposed, strict=False):
            drafts[index] = usable(draft, limits[index], self._vocab_size)
        return drafts

    def _request(self, sequence: Sequence, limit: int, min_survival: float) -> DraftRequest:
        params = sequence.request.params
        temperature = params.temperature if self._samples else 0.0
        return DraftRequest(sequence.sequence_id, limit, min_survival, temperature, params.seed)

    def _guard(self, sequences: SequenceOf[Sequence], call: Callable[[], None]) -> None:
        try:
            with self._timed():
                call()
        except Exception:
            logger.exception("The drafter failed; %d sequences go on without drafts.", len(sequences))
            for sequence in sequences:
                sequence.is_lost = True
                self.release(sequence)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - started


def _facts(sequence: Sequence) -> SequenceFacts:
    request = sequence.request
    return SequenceFacts(
        tenant=request.tenant,
        num_prompt_tokens=sequence.num_prompt_tokens,
        prediction_token_ids=request.prediction_token_ids,
        sampled=not request.params.is_greedy,
    )


def usable(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """``draft``, up to ``limit`` tokens and the first id that the model does not have; nothing of what is no tree."""
    if draft.parents and not is_tree(draft.parents, len(draft.token_ids)):
        return NO_DRAFT
    token_ids = draft.token_ids[:limit]
    bad = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size), len(token_ids))
    if draft.draft_probs is not None:  # to cut a drawn draft by what was drawn would favour what is left
        draft = replace(draft, confidences=())
    return shortened(draft, bad)


def shortened(draft: Draft, length: int) -> Draft:
    """The first ``length`` tokens of a draft, with all that is known of them."""
    if length >= len(draft.token_ids):
        return draft
    if length <= 0:
        return NO_DRAFT
    return Draft(
        draft.token_ids[:length],
        None if draft.draft_probs is None else draft.draft_probs[:length],
        draft.confidences[:length],
        draft.source,
        draft.parents[:length],
    )
