"""A drafter without a model: what followed the last time the sequence looked like this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest, SequenceFacts
from outrider.draft.history import AnswerHistory, HistoryMatch, TenantHistories
from outrider.draft.suffix_index import SuffixIndex

_NUM_RECENT = 64  # tokens of a sequence's end that are compared with earlier answers


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


class _Followed:
    """A sequence: its own index, and, where its tenant's earlier answers are kept, where it stands in them."""

    def __init__(self, index: SuffixIndex, token_ids: Sequence[int]) -> None:
        self.index = index
        self.beginning = list(token_ids)  # until it is known which of them belong to the answer
        self.history: AnswerHistory | None = None
        self.answer: list[int] = []
        self.recent: list[int] = []
        self.match: HistoryMatch | None = None
        self.is_searched = False


class SuffixDrafter:
    """Guesses what followed the longest earlier occurrence of the sequence's end, in its own prompt and output.

    ``histories``: where they are given, also in earlier answers of the same tenant, if the match there is longer.
    """

    def __init__(self, config: SuffixDrafterConfig | None = None, histories: TenantHistories | None = None) -> None:
        self._config = config or SuffixDrafterConfig()
        self._histories = histories
        self._followed: dict[int, _Followed] = {}

    @property
    def name(self) -> str:
        return "suffix"

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Start to follow a sequence.

        Raises:
            ValueError: it is followed already.
        """
        if sequence_id in self._followed:
            raise ValueError(f"sequence {sequence_id} is followed already; release it before it begins again")
        config = self._config
        index = SuffixIndex(config.min_match_tokens, config.max_tokens_indexed, config.max_search_steps)
        index.extend(prompt_token_ids)
        self._followed[sequence_id] = _Followed(index, prompt_token_ids if self._histories is not None else ())

    def inform(self, sequence_id: int, facts: SequenceFacts) -> None:
        """Say whose the sequence is; only then are earlier answers looked at, and this one kept.

        Raises:
            LookupError: the sequence is not followed.
        """
        followed = self._get(sequence_id)
        if self._histories is not None:
            followed.history = self._histories.of(facts.tenant)
            followed.answer = followed.beginning[facts.num_prompt_tokens :]
            followed.recent = followed.beginning[-_NUM_RECENT:]
        followed.beginning = []

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Append verified tokens.

        Raises:
            LookupError: the sequence is not followed.
        """
        followed = self._get(sequence_id)
        followed.index.extend(token_ids)
        if self._histories is None or followed.history is None:
            return
        followed.recent = [*followed.recent, *token_ids][-_NUM_RECENT:]
        if len(followed.answer) < self._histories.max_tokens_per_answer:
            followed.answer += token_ids
        for token_id in token_ids:
            if followed.match is None or not followed.match.follows(token_id):
                followed.match, followed.is_searched = None, False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order; empty where nothing long enough occurred before.

        Raises:
            LookupError: a sequence is not followed.
        """
        return [self._propose(self._get(request.sequence_id), request.max_draft_tokens) for request in requests]

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; its answer is kept for its tenant, where that is wished.

        Raises:
            LookupError: it is not followed.
        """
        followed = self._get(sequence_id)
        del self._followed[sequence_id]
        if followed.history is not None:
            followed.history.add(followed.answer)

    def _get(self, sequence_id: int) -> _Followed:
        try:
            return self._followed[sequence_id]
        except KeyError:
            raise LookupError(f"sequence {sequence_id} is not followed; it must begin first") from None

    def _propose(self, followed: _Followed, max_draft_tokens: int) -> Draft:
        if max_draft_tokens < 1:
            return NO_DRAFT
        match = followed.index.longest_match()
        num_matched = 0 if match is None else match.num_tokens
        earlier = self._earlier(followed)
        if earlier is not None and earlier.num_tokens > num_matched:
            token_ids = earlier.continuation(min(max_draft_tokens, self._length(earlier.num_tokens)))
            if token_ids:
                return _draft(token_ids, earlier.num_tokens, 0, 0)
        if match is None or (length := min(max_draft_tokens, self._length(match.num_tokens))) < 1:
            return NO_DRAFT
        agree, differ = followed.index.agreement(match.end)
        return _draft(followed.index.continuation(match.end, length), match.num_tokens, agree, differ)

    def _length(self, num_matched: int) -> int:
        return int(num_matched * self._config.draft_per_match)

    def _earlier(self, followed: _Followed) -> HistoryMatch | None:
        if followed.history is not None and not followed.is_searched:
            followed.match = followed.history.search(followed.recent, self._config.max_search_steps)
            followed.is_searched = True
        return followed.match


def _draft(token_ids: tuple[int, ...], num_matched: int, agree: int, differ: int) -> Draft:
    """``agree``, ``differ``: how many further occurrences of a shorter end went on the same way, or another.

    One guess in six is right after a match of one token, four in five after eight, and with every guess that comes
    true the match is one longer. The controller learns the rest.
    """
    said = (1 + agree) / (1 + differ)
    confidences = []
    for index in range(len(token_ids)):
        odds = 0.22 * (num_matched + index) ** 1.3 * (said**0.5 if index == 0 else 1.0)
        confidences.append(odds / (1 + odds))
    return Draft(token_ids, None, tuple(confidences), "suffix")
