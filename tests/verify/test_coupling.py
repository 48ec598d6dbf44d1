"""Drafts drawn in the target's own race, with the numbers the target will use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from chance import FALSE_ALARM, chi_square_p_value

from outrider.verify import acceptance
from outrider.verify.acceptance import choose_by_match, choose_by_rejection, sample
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose

Probs = npt.NDArray[np.float64]

NUM_TEXTS = 50_000  # of two tokens, so 100,000 draws
VOCAB_SIZE = 4


def distribution(probs: Probs) -> TokenDistribution:
    return TokenDistribution(np.arange(len(probs)), probs)


def table(salt: int) -> Probs:
    """``[1 + VOCAB_SIZE, VOCAB_SIZE]``: what follows nothing, and what follows each token."""
    return np.random.default_rng(salt).dirichlet(np.full(VOCAB_SIZE, 1.5), size=1 + VOCAB_SIZE)


TARGET, DRAFTER = table(1), table(2)
PAIR_PROBS = (TARGET[0][:, None] * TARGET[1:]).ravel()


def draft(seed: int, length: int, history: Sequence[int] = (), table: Probs = DRAFTER) -> list[int]:
    """A chain from a drafter that sees the target's numbers of each position."""
    text = list(history)
    while len(text) < len(history) + length:
        row = table[text[-1] + 1 if text else 0]
        text.append(sample(distribution(row), seed, len(text), Purpose.TARGET))
    return text[len(history) :]


def answer(seed: int, drafted: Sequence[int]) -> tuple[list[int], int]:
    """Two tokens, the first of which may have been drafted, and the second if the first was right; how many were."""
    text, num_accepted = list[int](), 0
    for index in range(2):
        row = distribution(TARGET[text[-1] + 1 if text else 0])
        guess = drafted[index] if index < len(drafted) and num_accepted == index else None
        choice = choose_by_match(row, guess, seed, index)
        text.append(choice.token_id)
        num_accepted += choice.accepted
    return text, num_accepted


def test_the_text_is_the_one_without_drafts_and_has_the_targets_distribution() -> None:
    texts = np.array([answer(seed, draft(seed, 2))[0] for seed in range(NUM_TEXTS)])
    assert chi_square_p_value(texts @ [VOCAB_SIZE, 1], PAIR_PROBS) > FALSE_ALARM
    for index, probs in enumerate((TARGET[0], TARGET[0] @ TARGET[1:])):
        assert chi_square_p_value(texts[:, index], probs) > FALSE_ALARM
    for seed in range(0, NUM_TEXTS, 50):
        for drafted in ((), (3,), (0, 1), tuple(draft(seed + 1, 2))):
            assert answer(seed, drafted)[0] == texts[seed].tolist()


@pytest.mark.parametrize("salt", range(4))
def test_a_coupled_guess_is_right_as_often_as_the_theorem_says(salt: int) -> None:
    random = np.random.default_rng(salt)
    target, drafter = random.dirichlet(np.full(20, 0.5), size=2)
    count = 4_000
    agreeing = sum(
        sample(distribution(target), seed, 0, Purpose.TARGET) == sample(distribution(drafter), seed, 0, Purpose.TARGET)
        for seed in range(count)
    )
    # Daliri et al., section 3: token x wins both races with probability 1 / sum_y max(p_y / p_x, q_y / q_x).
    exact = sum(1 / np.maximum(target / target[token_id], drafter / drafter[token_id]).sum() for token_id in range(20))
    assert chi_square_p_value([0] * (count - agreeing) + [1] * agreeing, np.array([1 - exact, exact])) > FALSE_ALARM
    distance = np.abs(target - drafter).sum() / 2
    assert (1 - distance) / (1 + distance) <= exact <= 1 - distance
    assert exact > float(target @ drafter), "better than numbers of its own and matching"


def test_a_drafter_with_the_targets_own_logits_is_always_right() -> None:
    for seed in range(500):
        assert answer(seed, draft(seed, 2, table=TARGET))[1] == 2


def test_the_chi_square_test_sees_coupled_drafts_that_are_recovered_with_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejection sampling must not look at the race that drew the guess a second time."""

    def recovered_tokens() -> list[int]:
        row, drafter = distribution(TARGET[0]), DRAFTER[0]
        return [choose_by_rejection(row, draft(seed, 1), drafter[None], seed, 0).token_id for seed in range(20_000)]

    assert chi_square_p_value(recovered_tokens(), TARGET[0]) > FALSE_ALARM
    monkeypatch.setattr(
        acceptance, "sample", lambda target, seed, position, purpose: sample(target, seed, position, Purpose.TARGET)
    )
    assert chi_square_p_value(recovered_tokens(), TARGET[0]) < FALSE_ALARM
