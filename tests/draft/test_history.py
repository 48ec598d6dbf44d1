"""Earlier answers: found again, by their own tenant alone, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest

from outrider.draft.base import DraftRequest, SequenceFacts
from outrider.draft.history import AnswerHistory, HistoryConfig, TenantHistories
from outrider.draft.suffix import SuffixDrafter

ANSWER = tuple(range(100, 140))


def answer(drafter: SuffixDrafter, tenant: str, prompt: Sequence[int], tokens: Sequence[int], sequence_id: int) -> None:
    """A whole answer, as the engine tells of it."""
    drafter.begin(sequence_id, [*prompt, tokens[0]])
    drafter.inform(sequence_id, SequenceFacts(tenant, len(prompt)))
    for token_id in tokens[1:]:
        drafter.extend(sequence_id, [token_id])
    drafter.release(sequence_id)


def guess(drafter: SuffixDrafter, tenant: str, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    drafter.begin(99, [*prompt, tokens[0]])
    drafter.inform(99, SequenceFacts(tenant, len(prompt)))
    drafter.extend(99, tokens[1:])
    (draft,) = drafter.propose([DraftRequest(99, 8)])
    assert not draft.token_ids or draft.source == "suffix"
    drafter.release(99)
    return draft.token_ids


def test_an_earlier_answer_of_the_tenant_is_carried_on() -> None:
    drafter = SuffixDrafter(histories=TenantHistories())
    answer(drafter, "a", [1, 2], ANSWER, 1)
    assert guess(drafter, "a", [3], ANSWER[:8]) == ANSWER[8:16]


def test_it_is_followed_token_by_token_and_left_where_it_differs() -> None:
    drafter = SuffixDrafter(histories=TenantHistories())
    answer(drafter, "a", [1, 2], ANSWER, 1)
    drafter.begin(2, [3, *ANSWER[:3]])
    drafter.inform(2, SequenceFacts("a", 1))
    for position in range(3, 20):
        (draft,) = drafter.propose([DraftRequest(2, 2)])
        assert draft.token_ids == ANSWER[position : position + 2]
        drafter.extend(2, [ANSWER[position]])
    drafter.extend(2, [7])
    (draft,) = drafter.propose([DraftRequest(2, 2)])
    assert draft.token_ids == ()
    drafter.extend(2, ANSWER[30:34])
    (draft,) = drafter.propose([DraftRequest(2, 2)])
    assert draft.token_ids == ANSWER[34:36]


def test_no_tenant_sees_another_or_anything_without_being_told_whose_it_is() -> None:
    drafter = SuffixDrafter(histories=TenantHistories())
    answer(drafter, "a", [1, 2], ANSWER, 1)
    assert guess(drafter, "b", [3], ANSWER[:8]) == ()
    assert guess(drafter, "", [3], ANSWER[:8]) == ()
    drafter.begin(5, [3, *ANSWER[:8]])
    assert drafter.propose([DraftRequest(5, 8)])[0].token_ids == ()


def test_prompts_and_answers_of_drafters_without_histories_are_not_kept() -> None:
    drafter = SuffixDrafter(histories=TenantHistories())
    answer(drafter, "a", ANSWER, [1, 2, 3, 4, 5, 6], 1)
    assert guess(drafter, "a", [3], ANSWER[:8]) == ()
    without = SuffixDrafter()
    answer(without, "a", [1, 2], ANSWER, 1)
    assert guess(without, "a", [3], ANSWER[:8]) == ()


def test_nothing_is_guessed_across_the_end_of_an_answer() -> None:
    drafter = SuffixDrafter(histories=TenantHistories())
    answer(drafter, "a", [1], ANSWER, 1)
    answer(drafter, "a", [1], range(200, 220), 2)
    assert guess(drafter, "a", [3], ANSWER[-5:]) == ()
    assert guess(drafter, "a", [3], ANSWER[-6:-1]) == ANSWER[-1:]


@pytest.mark.parametrize("seed", range(20))
def test_the_match_is_the_longest_in_the_answers_kept(seed: int) -> None:
    rng = random.Random(seed)
    answers = [[rng.randrange(3) for _ in range(rng.randrange(4, 60))] for _ in range(8)]
    text = [rng.randrange(3) for _ in range(20)]
    history = AnswerHistory(HistoryConfig(max_tokens_per_tenant=8 * 200))
    for tokens in answers:
        history.add(tokens)
    longest = 0
    for tokens in answers:
        for end in range(len(tokens)):
            num_equal = 0
            while num_equal <= min(end, len(text) - 1) and tokens[end - num_equal] == text[-1 - num_equal]:
                num_equal += 1
            longest = max(longest, num_equal)
    match = history.search(text, 10_000)
    assert (match.num_tokens if match else 0) == (longest if longest >= 3 else 0)


def test_a_tenants_newest_answers_are_kept_and_its_oldest_dropped() -> None:
    config = HistoryConfig(max_tokens_per_tenant=800)
    history = AnswerHistory(config)
    for start in range(0, 10_000, 50):
        history.add(range(start, start + 50))
        assert history.num_tokens <= 800
    assert history.num_tokens >= 600
    assert history.search([9_900, 9_901, 9_902], 100) is not None
    assert history.search([100, 101, 102], 100) is None


def test_the_tenant_that_asked_least_recently_is_forgotten() -> None:
    histories = TenantHistories(HistoryConfig(max_tenants=2))
    drafter = SuffixDrafter(histories=histories)
    for number, tenant in enumerate(["a", "b", "a", "c"]):
        answer(drafter, tenant, [1], ANSWER, number)
    assert len(histories) == 2
    assert guess(drafter, "a", [3], ANSWER[:8]) == ANSWER[8:16]
    assert guess(drafter, "b", [3], ANSWER[:8]) == ()


def test_memory_is_bounded() -> None:
    histories = TenantHistories(HistoryConfig(max_tokens_per_tenant=1000, max_tenants=4))
    rng = random.Random(0)

    def fill() -> None:
        for number in range(400):
            tokens = [rng.randrange(50_000) for _ in range(100)]
            histories.of(f"tenant {number % 8}").add(tokens)

    tracemalloc.start()
    try:
        fill()
        before, _ = tracemalloc.get_traced_memory()
        fill()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before < 4 * 1000 * 400
    assert after <= 1.2 * before


@pytest.mark.parametrize("name", ["max_tokens_per_tenant", "max_tenants", "max_tokens_per_answer"])
def test_impossible_configurations_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        HistoryConfig(**{name: 0})
