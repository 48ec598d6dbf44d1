from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from chance import FALSE_ALARM, chi_square_p_value

from outrider.kernels.operations import MAX_TREE_ROWS
from outrider.verify import acceptance
from outrider.verify.acceptance import choose_by_rejection, residual
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose, uniform
from outrider.verify.tree import children, depths, is_tree, row_masks

Probs = npt.NDArray[np.float64]

NUM_DRAWS = 100_000
# Token 0 is a little rarer in drafts: what its first rejection leaves of it is less than drafts give.
TARGET_PROBS = np.array([0.45, 0.25, 0.20, 0.0, 0.0, 0.10])
DRAFT_PROBS = np.array([0.40, 0.05, 0.45, 0.05, 0.05, 0.0])


def distribution(probs: Probs) -> TokenDistribution:
    token_ids = np.flatnonzero(probs)
    return TokenDistribution(token_ids, probs[token_ids])


def siblings(numbers: Sequence[float], replace: bool) -> tuple[list[int], Probs]:
    """Candidates as a drafter draws them with ``numbers``, and of each what it was drawn from: ``[n, vocab_size]``."""
    token_ids, rows, probs = list[int](), [], DRAFT_PROBS
    for number in numbers:
        token_ids.append(int(probs.cumsum()[:-1].searchsorted(number, "right")))
        rows.append(probs)
        if not replace:
            probs = np.where(np.arange(len(probs)) == token_ids[-1], 0.0, probs)
            probs = probs / probs.sum()
    return token_ids, np.array(rows)


def outcomes(num_draws: int, num_siblings: int, replace: bool) -> tuple[npt.NDArray[np.int64], float]:
    """The tokens chosen with seeds 0, 1, ..., and how many of them were drafted, in parts of 1."""
    target = distribution(TARGET_PROBS)
    numbers = np.random.default_rng(0).random((num_draws, num_siblings))
    choices = [choose_by_rejection(target, *siblings(row, replace), seed, 0) for seed, row in enumerate(numbers)]
    accepted = sum(choice.accepted for choice in choices) / num_draws
    return np.array([choice.token_id for choice in choices]), accepted


@pytest.mark.parametrize("replace", [True, False], ids=["with replacement", "without replacement"])
def test_tokens_chosen_among_siblings_follow_the_target_and_more_siblings_are_kept_more_often(replace: bool) -> None:
    kept = []
    for num_siblings, num_draws in ((1, 10_000), (2, NUM_DRAWS), (3, 10_000)):
        token_ids, accepted = outcomes(num_draws, num_siblings, replace)
        assert chi_square_p_value(token_ids, TARGET_PROBS) > FALSE_ALARM
        kept.append(accepted)
    assert kept[0] == pytest.approx(np.minimum(TARGET_PROBS, DRAFT_PROBS).sum(), abs=0.03)
    assert kept[1] > kept[0] + 0.03
    assert kept[2] > kept[0] + 0.03


def test_the_chi_square_test_sees_siblings_that_are_judged_with_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "uniform", lambda seed, position, purpose, trial: uniform(seed, position, purpose))
    assert chi_square_p_value(outcomes(5_000, 2, replace=True)[0], TARGET_PROBS) < FALSE_ALARM


@pytest.mark.parametrize(
    "wrong",
    [
        lambda target, draft_probs: target,
        lambda target, draft_probs: residual(target, np.where(draft_probs > 0.42, draft_probs, 0.0)),
    ],
    ids=["nothing taken away", "too little taken away"],
)
def test_the_chi_square_test_sees_a_wrong_residual(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    monkeypatch.setattr(acceptance, "residual", wrong)
    assert chi_square_p_value(outcomes(5_000, 2, replace=True)[0], TARGET_PROBS) < FALSE_ALARM


def test_the_chi_square_test_sees_siblings_without_replacement_that_claim_to_be_with() -> None:
    target = distribution(TARGET_PROBS)
    token_ids = []
    for seed, numbers in enumerate(np.random.default_rng(0).random((10_000, 2))):
        candidates, rows = siblings(numbers, replace=False)
        token_ids.append(choose_by_rejection(target, candidates, rows[[0, 0]], seed, 0).token_id)
    assert chi_square_p_value(token_ids, TARGET_PROBS) < FALSE_ALARM


def test_siblings_that_could_not_have_been_drawn_are_matched() -> None:
    target = distribution(TARGET_PROBS)
    for seed in range(200):
        choice = choose_by_rejection(target, [1, 5], np.array([DRAFT_PROBS, DRAFT_PROBS]), seed, 0)
        assert choice.token_id == acceptance.sample(target, seed, 0, Purpose.TARGET)
        assert choice.accepted == (choice.token_id in (1, 5))


def random_parents(random: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(random.integers(-1, index)) for index in range(count))


def path_to(parents: Sequence[int], index: int) -> list[int]:
    return [*path_to(parents, parents[index]), index] if index >= 0 else []


def test_rows_know_their_paths_their_depths_and_their_children() -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 5, 20, MAX_TREE_ROWS - 1):
        parents = random_parents(random, count)
        masks, row_depths = row_masks(parents), depths(parents)
        for index in range(-1, count):
            path = path_to(parents, index)
            assert {bit for bit in range(64) if int(masks[index + 1]) >> bit & 1} == {0, *(i + 1 for i in path)}
            assert row_depths[index + 1] == len(path)
            if parents:
                assert list(children(parents, count, index + 1)) == [i for i in range(count) if parents[i] == index]


def test_a_chain_is_a_tree_in_which_each_follows_the_one_before() -> None:
    as_tree = tuple(range(-1, 4))
    for row in range(6):
        assert list(children((), 5, row)) == list(children(as_tree, 5, row)) == ([row] if row < 5 else [])


@pytest.mark.parametrize(
    "parents",
    [(0,), (-1, 1), (-2,), (-1, 0, 2), (-1, 5), (-1,) * 3, (-1,)],
    ids=["itself", "itself later", "before the root", "second itself", "unknown", "too many", "too few"],
)
def test_what_is_no_tree_is_seen(parents: tuple[int, ...]) -> None:
    num_draft_tokens = len(parents) if parents not in ((-1,) * 3, (-1,)) else 2
    assert not is_tree(parents, num_draft_tokens)
    assert is_tree((-1, -1, 0), 3)


def test_a_tree_has_as_many_rows_as_a_mask_has_bits() -> None:
    assert is_tree((-1,) * (MAX_TREE_ROWS - 1), MAX_TREE_ROWS - 1)
    assert not is_tree((-1,) * MAX_TREE_ROWS, MAX_TREE_ROWS)
