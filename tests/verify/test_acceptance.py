from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.verify import acceptance
from outrider.verify.acceptance import choose_by_match, choose_by_rejection, sample
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose, uniform

NUM_DRAWS = 100_000
FALSE_ALARM = 1e-6

Probs = npt.NDArray[np.float64]

TARGET_PROBS = np.array([0.30, 0.24, 0.20, 0.0, 0.16, 0.10])
DRAFT_PROBS = np.array([0.10, 0.40, 0.10, 0.05, 0.35, 0.0])


def distribution(probs: Probs) -> TokenDistribution:
    token_ids = np.flatnonzero(probs)
    return TokenDistribution(token_ids, probs[token_ids])


def chi_square_p_value(outcomes: Sequence[int], probs: Probs) -> float:
    """The probability of a fit as bad as this, if ``outcomes`` were drawn from ``probs``."""
    counts = np.bincount(outcomes, minlength=len(probs))
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = probs[possible] * len(outcomes)
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    half = torch.tensor([(possible.sum() - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def drafts(probs: Probs, count: int) -> list[int]:
    """Drafted tokens as a drafter draws them: from ``probs``, with numbers of its own purpose."""
    drafter = distribution(probs)
    return [sample(drafter, seed, 0, Purpose.DRAFT) for seed in range(count)]


def rejection_outcomes(target: Probs, draft: Probs, count: int) -> list[int]:
    return [
        choose_by_rejection(distribution(target), [draft_id], draft[None], seed, 0).token_id
        for seed, draft_id in enumerate(drafts(draft, count))
    ]


@pytest.mark.parametrize(
    "place", [lambda i: (i, 0), lambda i: (7, i)], ids=["a seed for each draw", "one seed over positions"]
)
def test_samples_follow_the_distribution(place: Callable[[int], tuple[int, int]]) -> None:
    target = distribution(TARGET_PROBS)
    outcomes = [sample(target, *place(i), Purpose.TARGET) for i in range(NUM_DRAWS)]
    assert chi_square_p_value(outcomes, TARGET_PROBS) > FALSE_ALARM
    # Neighbours too: what one draw gives must not tell what the next will.
    pairs = np.array(outcomes).reshape(-1, 2) @ [len(TARGET_PROBS), 1]
    assert chi_square_p_value(pairs, np.outer(TARGET_PROBS, TARGET_PROBS).ravel()) > FALSE_ALARM


def test_rare_tokens_of_a_large_vocabulary_get_their_share() -> None:
    vocab_size, num_draws = 50_000, 1_000
    probs = np.full(vocab_size, 0.5 / (vocab_size - 1))
    probs[123] = 0.5
    target = distribution(probs)
    outcomes = np.array([sample(target, seed, 3, Purpose.TARGET) for seed in range(num_draws)])
    quarters = np.where(outcomes == 123, 4, outcomes * 4 // vocab_size)
    assert chi_square_p_value(quarters, np.array([0.125, 0.125, 0.125, 0.125, 0.5])) > FALSE_ALARM


def test_truncation_does_not_change_who_wins_among_those_left() -> None:
    truncated = np.where(TARGET_PROBS >= 0.2, TARGET_PROBS, 0.0)
    truncated /= truncated.sum()
    for seed in range(2_000):
        winner = sample(distribution(TARGET_PROBS), seed, 0, Purpose.TARGET)
        if truncated[winner]:
            assert sample(distribution(truncated), seed, 0, Purpose.TARGET) == winner


def test_a_matched_token_never_depends_on_the_draft() -> None:
    target = distribution(TARGET_PROBS)
    for seed in range(300):
        undrafted = choose_by_match(target, None, seed, 4)
        assert not undrafted.accepted
        for draft_id in (*range(len(TARGET_PROBS)), -1, 10**9):
            choice = choose_by_match(target, draft_id, seed, 4)
            assert choice.token_id == undrafted.token_id
            assert choice.accepted == (draft_id == choice.token_id)


def test_a_certain_draft_is_matched_as_often_as_rejection_sampling_accepts_it() -> None:
    target = distribution(TARGET_PROBS)
    accepted = [choose_by_match(target, 2, seed, 0).accepted for seed in range(20_000)]
    assert chi_square_p_value(accepted, np.array([1 - TARGET_PROBS[2], TARGET_PROBS[2]])) > FALSE_ALARM


def test_rejection_sampling_gives_the_targets_distribution_and_accepts_their_overlap() -> None:
    draft_ids = drafts(DRAFT_PROBS, NUM_DRAWS)
    assert chi_square_p_value(draft_ids, DRAFT_PROBS) > FALSE_ALARM
    target = distribution(TARGET_PROBS)
    choices = [choose_by_rejection(target, [draft_id], DRAFT_PROBS[None], i, 0) for i, draft_id in enumerate(draft_ids)]
    assert chi_square_p_value([choice.token_id for choice in choices], TARGET_PROBS) > FALSE_ALARM
    overlap = np.minimum(TARGET_PROBS, DRAFT_PROBS).sum()
    accepted = [choice.accepted for choice in choices]
    assert chi_square_p_value(accepted, np.array([1 - overlap, overlap])) > FALSE_ALARM
    recovered = [choice.token_id for choice in choices if not choice.accepted]
    residual = np.maximum(TARGET_PROBS - DRAFT_PROBS, 0)
    assert chi_square_p_value(recovered, residual / residual.sum()) > FALSE_ALARM
    assert all(choice.token_id == draft_ids[i] for i, choice in enumerate(choices) if choice.accepted)


def test_the_chi_square_test_sees_one_number_used_to_accept_and_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample_with_the_accept_number(target: TokenDistribution, seed: int, position: int, purpose: Purpose) -> int:
        if purpose is not Purpose.RECOVER:
            return sample(target, seed, position, purpose)
        index = np.searchsorted(np.cumsum(target.probs), uniform(seed, position, Purpose.ACCEPT))
        return int(target.token_ids[min(index, len(target.token_ids) - 1)])

    assert chi_square_p_value(rejection_outcomes(TARGET_PROBS, DRAFT_PROBS, 10_000), TARGET_PROBS) > FALSE_ALARM
    monkeypatch.setattr(acceptance, "sample", sample_with_the_accept_number)
    assert chi_square_p_value(rejection_outcomes(TARGET_PROBS, DRAFT_PROBS, 10_000), TARGET_PROBS) < FALSE_ALARM


def test_the_chi_square_test_sees_recovery_from_the_target_instead_of_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "residual", lambda target, draft_probs: target)
    assert chi_square_p_value(rejection_outcomes(TARGET_PROBS, DRAFT_PROBS, 10_000), TARGET_PROBS) < FALSE_ALARM


def test_drafts_from_the_target_itself_are_always_accepted() -> None:
    probs = np.random.default_rng(0).dirichlet(np.full(50, 0.2))
    target = distribution(probs)
    for seed, draft_id in enumerate(drafts(probs, 2_000)):
        assert choose_by_rejection(target, [draft_id], probs[None], seed, 0).accepted


def test_a_token_the_target_rules_out_is_never_kept() -> None:
    target = distribution(np.array([0.5, 0.5, 0.0, 0.0]))
    draft_probs = np.array([0.0, 0.0, 0.5, 0.5])
    outcomes = [choose_by_rejection(target, [2], draft_probs[None], seed, 0) for seed in range(500)]
    assert not any(choice.accepted for choice in outcomes)
    assert {choice.token_id for choice in outcomes} == {0, 1}


@pytest.mark.parametrize(
    ("draft_id", "draft_probs"),
    [
        (5, DRAFT_PROBS),  # has probability 0: cannot have been drawn
        (-2, DRAFT_PROBS),
        (6, DRAFT_PROBS),
        (0, DRAFT_PROBS * 3),
        (0, np.zeros(6)),
        (0, np.where(np.arange(6) == 2, np.nan, DRAFT_PROBS)),
        (0, np.where(np.arange(6) == 2, np.inf, DRAFT_PROBS)),
        (0, DRAFT_PROBS + np.array([0.5, -0.5, 0, 0, 0, 0])),
    ],
    ids=["impossible", "negative id", "id too large", "sum 3", "zeros", "nan", "inf", "negative"],
)
def test_impossible_draft_probabilities_are_ignored(draft_id: int, draft_probs: Probs) -> None:
    target = distribution(TARGET_PROBS)
    for seed in range(200):
        expected = choose_by_match(target, draft_id, seed, 0)
        assert choose_by_rejection(target, [draft_id], draft_probs[None], seed, 0) == expected
