"""The prediction drafter: follows what the client expects, and finds its way back after a difference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.base import DraftRequest, SequenceFacts
from outrider.draft.prediction import PredictionDrafter, PredictionDrafterConfig

PREDICTION = tuple(range(100, 160))


def follow(
    prediction: Sequence[int], answer: Sequence[int], config: PredictionDrafterConfig | None = None
) -> PredictionDrafter:
    drafter = PredictionDrafter(config)
    drafter.begin(1, [1, 2, 3])
    drafter.inform(1, SequenceFacts(num_prompt_tokens=3, prediction_token_ids=prediction))
    drafter.extend(1, answer)
    return drafter


def guess(drafter: PredictionDrafter, max_draft_tokens: int = 4) -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(1, max_draft_tokens)])
    assert len(draft.confidences) == len(draft.token_ids)
    assert not draft.token_ids or draft.source == "prediction"
    return draft.token_ids


def num_steps(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Steps that the answer takes with drafts of 8."""
    drafter, position, steps = follow(prediction, ()), 0, 0
    while position < len(answer):
        drafted = guess(drafter, 8)
        right = 0
        while right < len(drafted) and position + right < len(answer) and drafted[right] == answer[position + right]:
            right += 1
        emitted = answer[position : position + right + 1]
        drafter.extend(1, emitted)
        position += len(emitted)
        steps += 1
    return steps


def test_it_is_followed_from_the_first_token_to_the_last() -> None:
    drafter = follow(PREDICTION, ())
    for position in range(len(PREDICTION)):
        assert guess(drafter) == PREDICTION[position : position + 4]
        drafter.extend(1, [PREDICTION[position]])
    assert guess(drafter) == ()


def test_tokens_of_the_answer_that_came_before_it_was_known_count() -> None:
    drafter = PredictionDrafter()
    drafter.begin(1, [1, 2, 3, PREDICTION[0], PREDICTION[1]])
    drafter.inform(1, SequenceFacts(num_prompt_tokens=3, prediction_token_ids=PREDICTION))
    assert guess(drafter) == PREDICTION[2:6]


EDITS = {
    "a token replaced": [*PREDICTION[:20], 7, *PREDICTION[21:]],
    "tokens put in": [*PREDICTION[:20], 7, 8, 9, *PREDICTION[20:]],
    "tokens left out": [*PREDICTION[:20], *PREDICTION[25:]],
    "a part replaced by a longer one": [*PREDICTION[:20], *range(1000, 1015), *PREDICTION[30:]],
    "another beginning": [7, 8, 9, *PREDICTION[3:]],
    "a part moved forward": [*PREDICTION[:10], *PREDICTION[40:50], *PREDICTION[10:40], *PREDICTION[50:]],
}


@pytest.mark.parametrize("answer", EDITS.values(), ids=EDITS.keys())
def test_it_is_found_again_after_an_edit(answer: Sequence[int]) -> None:
    drafter = follow(PREDICTION, answer[:-5])
    assert guess(drafter, 5) == tuple(answer[-5:])


@pytest.mark.parametrize("answer", EDITS.values(), ids=EDITS.keys())
def test_an_edit_costs_a_few_steps_alone(answer: Sequence[int]) -> None:
    num_new = sum(token_id not in PREDICTION for token_id in answer)
    # Nine tokens a step without an edit; after a difference, or a jump, two to be sure of the place.
    assert num_steps(PREDICTION, answer) <= len(answer) / 9 + num_new + 10
    assert num_steps(PREDICTION, PREDICTION) == -(-len(PREDICTION) // 9)


def test_of_two_places_alike_the_nearer_one_ahead_is_taken() -> None:
    prediction = [1, 2, 50, 3, 4, 5, 60, 6, 7, 8, 3, 4, 5, 70]
    assert guess(follow(prediction, [1, 2, 9, 3, 4, 5]), 1) == (60,)
    assert guess(follow(prediction, [1, 2, 50, 3, 4, 5, 60, 6, 9, 3, 4, 5]), 1) == (70,)


def test_an_answer_of_its_own_gets_no_drafts() -> None:
    assert guess(follow(PREDICTION, range(5, 40))) == ()


def test_a_guess_is_surer_the_more_came_true() -> None:
    def first_confidence(answer: Sequence[int]) -> float:
        return follow(PREDICTION, answer).propose([DraftRequest(1, 4)])[0].confidences[0]

    assert first_confidence(PREDICTION[:2]) < first_confidence(PREDICTION[:20])
    assert first_confidence([*PREDICTION[:20], 7, *PREDICTION[21:23]]) < first_confidence(PREDICTION[:20])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 5))
def test_drafts_are_always_a_part_of_the_prediction(
    prediction: list[int], answer: list[int], max_draft_tokens: int
) -> None:
    drafter = follow(prediction, ())
    for token_id in answer:
        drafter.extend(1, [token_id])
        drafted = list(guess(drafter, max_draft_tokens))
        assert len(drafted) <= max_draft_tokens
        starts = range(len(prediction) - len(drafted) + 1)
        assert not drafted or any(prediction[start : start + len(drafted)] == drafted for start in starts)


class CountedToken(int):
    """A token id that counts how often it is compared."""

    num_uses = 0

    def __eq__(self, other: object) -> bool:
        CountedToken.num_uses += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        CountedToken.num_uses += 1
        return int(self) != other

    __hash__ = int.__hash__


def test_finding_the_place_compares_no_more_than_it_says() -> None:
    rng = random.Random(0)
    prediction = [rng.randrange(2) for _ in range(5000)]
    drafter = follow(prediction, (), PredictionDrafterConfig(max_candidates=10))
    CountedToken.num_uses = 0
    for _ in range(300):
        drafter.extend(1, [CountedToken(rng.randrange(2))])
    # Candidates stand two tokens apart, and 16 tokens of each are compared.
    assert CountedToken.num_uses <= 300 * 10 * (16 + 10)


def test_sequences_have_predictions_of_their_own_or_none() -> None:
    drafter = follow(PREDICTION, ())
    drafter.begin(2, [1])
    drafter.inform(2, SequenceFacts(num_prompt_tokens=1, prediction_token_ids=(5, 6)))
    drafter.begin(3, [1])
    drafts = drafter.propose([DraftRequest(3, 2), DraftRequest(2, 2), DraftRequest(1, 2)])
    assert [draft.token_ids for draft in drafts] == [(), (5, 6), PREDICTION[:2]]


def test_what_is_not_followed_is_refused() -> None:
    drafter = follow(PREDICTION, ())
    with pytest.raises(ValueError, match="sequence 1 is followed already"):
        drafter.begin(1, [])
    drafter.release(1)
    for call in (
        lambda: drafter.extend(1, [1]),
        lambda: drafter.propose([DraftRequest(1, 4)]),
        lambda: drafter.inform(1, SequenceFacts()),
        lambda: drafter.release(1),
    ):
        with pytest.raises(LookupError, match="sequence 1 is not followed"):
            call()


def test_a_prediction_is_read_up_to_its_bound() -> None:
    drafter = follow(PREDICTION, PREDICTION[:8], PredictionDrafterConfig(max_prediction_tokens=10))
    assert guess(drafter) == PREDICTION[8:10]


@pytest.mark.parametrize("name", ["max_prediction_tokens", "max_candidates"])
def test_impossible_configurations_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        PredictionDrafterConfig(**{name: 0})
