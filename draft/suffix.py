"""A drafter without a model: what followed the last time the sequence looked like this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest
from outrider.draft.suffix_index import SuffixIndex


@dataclass(frozen=True, slots=True)
class SuffixDrafterConfig:
    """When the suffix drafter guesses, and how far ahead.

    ``min_match_tokens``: the shortest match that is worth a guess. After a single token one guess in six comes true
    (Spec-Bench, greedy answers of the default model), and a second row costs a pass next to nothing.
    ``draft_per_match``: tokens guessed for each token matched; longer matches go on for longer
    (SuffixDecoding, Oliaro et al. 2024, section 4).
    ``max_tokens_indexed``: a sequence's most recent tokens that are remembered, at least half and at most
    all of this number; about 150 bytes each.
    ``max_search_steps``: comparisons a search may take, about 0.1 µs each.
    """

    min_match_tokens: int = 1
    draft_per_match: float = 1.0
    max_tokens_indexed: int = 16_384
    max_search_steps: int = 512

    def __post_init__(self) -> None:
        if self.min_match_tokens < 1:
            raise ValueError(f"min_match_tokens is {self.min_match_tokens}; it must be at least 1")
        if not self.draft_per_match > 0:
            raise ValueError(f"draft_per_match is {self.draft_per_match}; it must be more than 0")
        if self.max_tokens_indexed < 2 * self.min_match_tokens:
            raise ValueError(
                f"max_tokens_indexed is {self.max_tokens_indexed}; "
                f"it must be at least twice min_match_tokens ({self.min_match_tokens})"
            )
        if self.max_search_steps < 1:
            raise ValueError(f"max_search_steps is {self.max_search_steps}; it must be at least 1")


class SuffixDrafter:
    """Guesses what followed the longest earlier occurrence of the sequence's end, in its own prompt and output."""

    def __init__(self, config: SuffixDrafterConfig | None = None) -> None:
        self._config = config or SuffixDrafterConfig()
        self._indexes: dict[int, SuffixIndex] = {}

    @property
    def name(self) -> str:
        return "suffix"

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Start to follow a sequence.

        Raises:
            ValueError: it is followed already.
        """
        if sequence_id in self._indexes:
            raise ValueError(f"sequence {sequence_id} is followed already; release it before it begins again")
        config = self._config
        index = SuffixIndex(config.min_match_tokens, config.max_tokens_indexed, config.max_search_steps)
        index.extend(prompt_token_ids)
        self._indexes[sequence_id] = index

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Append verified tokens.

        Raises:
            LookupError: the sequence is not followed.
        """
        self._index(sequence_id).extend(token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order; empty where nothing long enough occurred before.

        Raises:
            LookupError: a sequence is not followed.
        """
        return [self._propose(self._index(request.sequence_id), request.max_draft_tokens) for request in requests]

    def release(self, sequence_id: int) -> None:
        """Forget a sequence.

        Raises:
            LookupError: it is not followed.
        """
        self._index(sequence_id)
        del self._indexes[sequence_id]

    def _index(self, sequence_id: int) -> SuffixIndex:
        try:
            return self._indexes[sequence_id]
        except KeyError:
            raise LookupError(f"sequence {sequence_id} is not followed; it must begin first") from None

    def _propose(self, index: SuffixIndex, max_draft_tokens: int) -> Draft:
        if max_draft_tokens < 1 or (match := index.longest_match()) is None:
            return NO_DRAFT
        num_draft_tokens = min(max_draft_tokens, int(match.num_tokens * self._config.draft_per_match))
        return (
            Draft(index.continuation(match.end, num_draft_tokens), source=self.name)
            if num_draft_tokens > 0
            else NO_DRAFT
        )
