"""What became of drafts: how many, how long, how much of each was accepted, in vLLM's shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

NO_SOURCE = "unknown"  # of a draft whose drafter does not say who guessed


class DraftCounts:
    """Counts over steps that verified at least one draft token.

    The histogram of accepted tokens sums to their number, and weighted to the accepted tokens; position by position
    drafted and accepted tokens sum to all of them.
    """

    def __init__(self) -> None:
        self.num_draft_tokens = 0
        self.num_accepted = 0
        self._by_length: defaultdict[int, Counter[int]] = defaultdict(Counter)  # draft length: accepted: steps

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        self._by_length[num_draft_tokens][num_accepted] += 1

    @property
    def num_steps(self) -> int:
        return self._accepted.total()

    @property
    def longest(self) -> int:
        return max(self._by_length, default=0)

    def block(self) -> dict[str, Any]:
        """vLLM's names; rates are None without a step."""
        num_steps = self.num_steps
        return {
            "num_spec_steps": num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": round(1 + self.num_accepted / num_steps, 4) if num_steps else None,
            "draft_acceptance_rate": round(self.num_accepted / self.num_draft_tokens, 4) if num_steps else None,
            "num_draft_tokens_per_pos": self._per_position(Counter(_totals(self._by_length))),
            "num_accepted_tokens_per_pos": self._per_position(self._accepted),
        }

    def histogram(self, highest: int) -> list[int]:
        """[i]: steps that accepted i tokens, up to ``highest`` or the longest draft."""
        return _dense(self._accepted, max(highest, self.longest))

    def histograms_by_length(self) -> dict[str, list[int]]:
        return {str(length): _dense(self._by_length[length], length) for length in sorted(self._by_length)}

    @property
    def _accepted(self) -> Counter[int]:
        return sum(self._by_length.values(), Counter())

    def _per_position(self, lengths: Counter[int]) -> list[int]:
        """[i]: how many of these lengths reach beyond i."""
        return [sum(n for length, n in lengths.items() if length > position) for position in range(self.longest)]


NO_DRAFTS = DraftCounts()


class DraftsBySource:
    """The counts of all drafts, and of each source's own."""

    def __init__(self) -> None:
        self.total = DraftCounts()
        self._by_source: dict[str, DraftCounts] = {}

    def add(self, source: str, num_draft_tokens: int, num_accepted: int) -> None:
        self.total.add(num_draft_tokens, num_accepted)
        self._by_source.setdefault(source or NO_SOURCE, DraftCounts()).add(num_draft_tokens, num_accepted)

    def of_source(self, source: str) -> DraftCounts:
        return self._by_source.get(source, NO_DRAFTS)

    def block_by_source(self) -> dict[str, Any]:
        return {source: self._by_source[source].block() for source in sorted(self._by_source)}


def _dense(counts: Counter[int], highest: int) -> list[int]:
    return [counts[number] for number in range(highest + 1)]


def _totals(counters: dict[int, Counter[int]]) -> dict[int, int]:
    return {key: counter.total() for key, counter in counters.items()}
