"""The drafter as the engine uses it: whatever it does, the step goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from outrider.draft.base import NO_DRAFT, Draft, Drafter, DraftRequest
from outrider.server.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class GuardedDrafter:
    """Keeps a drafter's failures away from the requests it drafts for.

    A drafter that raises loses the sequences concerned: they go on without drafts. A draft with an id the
    model does not have ends before that id; one that is too long is cut.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    @property
    def name(self) -> str:
        return self._drafter.name if self._drafter is not None else "none"

    def begin(self, sequence: Sequence) -> None:
        """Follow a sequence from here on."""
        if self._drafter is None:
            return
        drafter, token_ids = self._drafter, sequence.token_ids(0, sequence.num_tokens)
        sequence.is_drafted = True
        self._guard([sequence], lambda: drafter.begin(sequence.sequence_id, token_ids))

    def extend(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """Tell of verified tokens."""
        if sequence.is_drafted and self._drafter is not None:
            drafter = self._drafter
            self._guard([sequence], lambda: drafter.extend(sequence.sequence_id, token_ids))

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; harmless where it was not followed."""
        if sequence.is_drafted and self._drafter is not None:
            drafter = self._drafter
            sequence.is_drafted = False
            self._guard([], lambda: drafter.release(sequence.sequence_id))

    def propose(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[Draft]:
        """A draft of at most its limit for each sequence, empty where there is none."""
        drafts = [NO_DRAFT] * len(sequences)
        asked = [i for i, sequence in enumerate(sequences) if sequence.is_drafted and limits[i] > 0]
        if not asked or self._drafter is None:
            return drafts
        drafter = self._drafter
        requests = [DraftRequest(sequences[i].sequence_id, limits[i]) for i in asked]
        proposed: list[Draft] = []
        self._guard([sequences[i] for i in asked], lambda: proposed.extend(drafter.propose(requests)))
        for index, draft in zip(asked, proposed, strict=False):
            drafts[index] = self._usable(draft, limits[index])
        return drafts

    def _usable(self, draft: Draft, limit: int) -> Draft:
        token_ids = draft.token_ids[:limit]
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                token_ids = token_ids[:index]
                break
        if len(token_ids) == len(draft.token_ids):
            return draft
        return Draft(token_ids, None if draft.draft_probs is None else draft.draft_probs[: len(token_ids)])

    def _guard(self, sequences: SequenceOf[Sequence], call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("The drafter failed; %d sequences go on without drafts.", len(sequences))
            for sequence in sequences:
                self.release(sequence)
