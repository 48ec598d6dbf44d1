"""What a pass verified of a sequence, as its drafter is told."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.draft.base import VerifiedRows
from outrider.server.engine.batcher import ScheduledRows
from outrider.server.engine.request import StepOutput


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's part of a step, its pages committed."""

    rows: ScheduledRows
    accepted: tuple[int, ...]  # of the draft's tokens, by index
    output: StepOutput | None

    @property
    def has_ended(self) -> bool:
        return self.output is not None and self.output.finish_reason is not None

    def verified_rows(self, features: Tensor | None) -> VerifiedRows:
        """``features``: of this part's rows, ``[num_rows, len(taps) * hidden_size]``; None if none are wanted."""
        sequence, num_tokens = self.rows.sequence, self.rows.num_tokens
        stop = sequence.pages.num_cached_tokens
        start = stop - num_tokens - len(self.accepted)
        known = sequence.token_ids(start, stop + 1)
        if features is not None:
            is_run = self.accepted == tuple(range(len(self.accepted)))
            taken = [*range(num_tokens), *(num_tokens + index for index in self.accepted)]
            features = features[: stop - start] if is_run else features[taken]
        return VerifiedRows(
            sequence.sequence_id,
            sequence.pages,
            start,
            known[: stop - start],
            next_token_id=None if self.has_ended or len(known) <= stop - start else known[-1],
            features=features,
        )


def moved_slots(rows: ScheduledRows, accepted: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """From which slots to which the accepted tokens of a tree must move, to be a run."""
    first = rows.start + rows.num_tokens
    slots = rows.sequence.pages.slots(first, first + len(rows.draft.token_ids))
    moved = [(slots[index], slots[place]) for place, index in enumerate(accepted) if index != place]
    return [source for source, _ in moved], [destination for _, destination in moved]
