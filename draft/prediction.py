"""A drafter that follows the answer its client expects (OpenAI's predicted outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest, SequenceFacts

_NUM_RECENT = 16  # tokens of the answer that are compared when its place is looked for
_NEAR = 16  # tokens ahead of the last place within which a single equal token is a place


@dataclass(frozen=True, slots=True)
class PredictionDrafterConfig:
    """``max_prediction_tokens``: of a prediction, its first; eight bytes each.
    ``max_candidates``: places in the prediction that are compared after a divergence, a microsecond each.
    """

    max_prediction_tokens: int = 16_384
    max_candidates: int = 64

    def __post_init__(self) -> None:
        if self.max_prediction_tokens < 1:
            raise ValueError(f"max_prediction_tokens is {self.max_prediction_tokens}; it must be at least 1")
        if self.max_candidates < 1:
            raise ValueError(f"max_candidates is {self.max_candidates}; it must be at least 1")


class _Place:
    """Where an answer stands in its prediction.

    While the answer follows it, the place moves on. When a token differs, the answer may have left a part out, put
    something in, or both; so the place is where the answer's last tokens stand in the prediction: the longest match,
    and of equal ones the nearest after the last place, then the first before it. Equal to a single token it must be
    near. *Time*: at most ``max_candidates`` comparisons of 16 tokens for each token that differs.
    """

    def __init__(self, prediction: Sequence[int], max_candidates: int) -> None:
        self._prediction = list(prediction)
        self._max_candidates = max_candidates
        self._recent: list[int] = []
        self._next = 0  # of the prediction, what is expected next, or was last
        self.num_matched = 0  # tokens that came as expected, up to the place; from the start it is where it should be
        self.is_known = True

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._recent = [*self._recent[1 - _NUM_RECENT :], token_id]
            if self.is_known and self._next < len(self._prediction) and self._prediction[self._next] == token_id:
                self._next += 1
                self.num_matched += 1
            else:
                self._find()

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._prediction[self._next : self._next + num_tokens]) if self.is_known else ()

    def _find(self) -> None:
        prediction, recent = self._prediction, self._recent
        best, best_end = 0, -1
        candidates = self._max_candidates
        for start, stop in ((self._next, len(prediction)), (0, self._next)):
            while candidates > 0:
                try:
                    end = prediction.index(recent[-1], start, stop)
                except ValueError:
                    break
                candidates -= 1
                start = end + 1
                num_equal = 1
                while num_equal < len(recent) and num_equal <= end:
                    if prediction[end - num_equal] != recent[-1 - num_equal]:
                        break
                    num_equal += 1
                near = 0 <= end - self._next < _NEAR
                if num_equal > best and (num_equal > 1 or near):
                    best, best_end = num_equal, end
        self.is_known = best > 0
        if self.is_known:
            self._next = best_end + 1
            self.num_matched = best


class PredictionDrafter:
    """Guesses that the answer goes on as its prediction does; nothing for sequences without one."""

    def __init__(self, config: PredictionDrafterConfig | None = None) -> None:
        self._config = config or PredictionDrafterConfig()
        self._beginnings: dict[int, list[int]] = {}  # of sequences of which no more is known
        self._places: dict[int, _Place | None] = {}

    @property
    def name(self) -> str:
        return "prediction"

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        """Start to follow a sequence.

        Raises:
            ValueError: it is followed already.
        """
        if sequence_id in self._places:
            raise ValueError(f"sequence {sequence_id} is followed already; release it before it begins again")
        self._places[sequence_id] = None
        self._beginnings[sequence_id] = list(prompt_token_ids)

    def inform(self, sequence_id: int, facts: SequenceFacts) -> None:
        """Take the prediction.

        Raises:
            LookupError: the sequence is not followed.
        """
        self._get(sequence_id)
        beginning = self._beginnings.pop(sequence_id, [])
        if facts.prediction_token_ids:
            prediction = facts.prediction_token_ids[: self._config.max_prediction_tokens]
            place = self._places[sequence_id] = _Place(prediction, self._config.max_candidates)
            place.extend(beginning[facts.num_prompt_tokens :])

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Append verified tokens.

        Raises:
            LookupError: the sequence is not followed.
        """
        self._beginnings.pop(sequence_id, None)
        if (place := self._get(sequence_id)) is not None:
            place.extend(token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order; empty where the answer has left its prediction.

        Raises:
            LookupError: a sequence is not followed.
        """
        return [self._propose(self._get(request.sequence_id), request.max_draft_tokens) for request in requests]

    def release(self, sequence_id: int) -> None:
        """Forget a sequence.

        Raises:
            LookupError: it is not followed.
        """
        self._get(sequence_id)
        del self._places[sequence_id]
        self._beginnings.pop(sequence_id, None)

    def _get(self, sequence_id: int) -> _Place | None:
        try:
            return self._places[sequence_id]
        except KeyError:
            raise LookupError(f"sequence {sequence_id} is not followed; it must begin first") from None

    def _propose(self, place: _Place | None, max_draft_tokens: int) -> Draft:
        if place is None or max_draft_tokens < 1:
            return NO_DRAFT
        token_ids = place.continuation(max_draft_tokens)
        # Sure of itself from the start, since a client that predicts has a reason; less so after a divergence.
        confidences = [1 - 0.5 / (1 + 0.5 * (place.num_matched + index)) for index in range(len(token_ids))]
        return Draft(token_ids, None, tuple(confidences), "prediction") if token_ids else NO_DRAFT
