from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from chance import FALSE_ALARM, chi_square_p_value

from outrider.verify import block
from outrider.verify.acceptance import choose_by_rejection, residual
from outrider.verify.block import acceptance_chances, prefix_shares, verify_block
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose, uniform

Probs = npt.NDArray[np.float64]
Model = Callable[[Sequence[int]], Probs]  # history -> [vocab_size]

VOCAB_SIZE = 3
NUM_DRAWS = 100_000


def distribution(probs: Probs) -> TokenDistribution:
    token_ids = np.flatnonzero(probs)
    return TokenDistribution(token_ids, probs[token_ids])


def random_model(salt: int, concentration: float = 0.7) -> Model:
    """A model in miniature: every history has its own distribution, some with impossible tokens."""

    def model(history: Sequence[int]) -> Probs:
        random = np.random.default_rng([salt, len(history), *history])
        probs = random.dirichlet(np.full(VOCAB_SIZE, concentration))
        probs[probs < 0.02] = 0.0
        return probs / probs.sum()

    return model


def text_probs(model: Model, length: int) -> Probs:
    """Of every text of ``length`` tokens, ``[VOCAB_SIZE] * length``."""
    probs = np.empty([VOCAB_SIZE] * length)
    for text in np.ndindex(*probs.shape):
        probs[text] = np.prod([model(text[:i])[text[i]] for i in range(length)])
    return probs


def tables(target: Model, drafter: Model, drafted: Sequence[int]) -> tuple[list[TokenDistribution], Probs]:
    prefixes = [drafted[:i] for i in range(len(drafted))]
    return [distribution(target(prefix)) for prefix in prefixes], np.array([drafter(prefix) for prefix in prefixes])


def outcome_probs(targets: Sequence[TokenDistribution], drafted: Sequence[int], draft_probs: Probs) -> Probs:
    """``[num_draft_tokens + 1]``: how likely verification keeps so many tokens of this draft."""
    chances = np.array(acceptance_chances(targets, draft_probs, prefix_shares(targets, drafted, draft_probs)))
    none_longer = np.cumprod(np.append(1 - chances[:0:-1], 1.0))  # of the full draft, one less, ...
    probs = np.append(1.0, none_longer[:-1])[::-1] * chances
    probs[0] = none_longer[len(drafted) - 1]
    return probs


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("salts", [(0, 1), (2, 3), (4, 5), (6, 6)], ids=str)
def test_every_text_comes_out_as_often_as_the_target_says_it(num_draft_tokens: int, salts: tuple[int, int]) -> None:
    # No draws: all drafts, weighed with their probabilities, and all outcomes of each.
    target, drafter = random_model(salts[0]), random_model(salts[1])
    texts = np.zeros([VOCAB_SIZE] * num_draft_tokens)
    for drafted in itertools.product(range(VOCAB_SIZE), repeat=num_draft_tokens):
        drawn = np.prod([drafter(drafted[:i])[token_id] for i, token_id in enumerate(drafted)])
        if drawn == 0:
            continue
        targets, draft_probs = tables(target, drafter, drafted)
        shares = prefix_shares(targets, drafted, draft_probs)
        for num_kept, chance in enumerate(outcome_probs(targets, drafted, draft_probs)):
            if num_kept == num_draft_tokens:
                texts[drafted] += drawn * chance
                continue
            recovered = residual(targets[num_kept], draft_probs[num_kept], shares[num_kept])
            for token_id, prob in zip(recovered.token_ids.tolist(), recovered.probs, strict=True):
                start = (*drafted[:num_kept], token_id)
                rest = text_probs(
                    lambda history, start=start: target((*start, *history)), num_draft_tokens - len(start)
                )
                texts[start] += drawn * chance * prob * rest
    np.testing.assert_allclose(texts, text_probs(target, num_draft_tokens), atol=1e-12)


def mean_kept(target: Model, drafter: Model, num_draft_tokens: int) -> tuple[float, float]:
    """How many drafted tokens block verification and token-by-token verification keep, over all drafts."""
    by_block, by_token = 0.0, 0.0
    for drafted in itertools.product(range(VOCAB_SIZE), repeat=num_draft_tokens):
        drawn = np.prod([drafter(drafted[:i])[token_id] for i, token_id in enumerate(drafted)])
        if drawn > 0:
            targets, draft_probs = tables(target, drafter, drafted)
            kept = outcome_probs(targets, drafted, draft_probs)
            ratios = [targets[i].prob(token_id) / draft_probs[i, token_id] for i, token_id in enumerate(drafted)]
            by_block += drawn * float(kept @ np.arange(num_draft_tokens + 1))
            by_token += drawn * float(np.cumprod(np.minimum(ratios, 1.0)).sum())
    return by_block, by_token


def test_the_papers_example_keeps_as_many_tokens_as_the_paper_says() -> None:
    # Sun et al., section 2: one distribution each for every position, over two tokens, and two drafted tokens.
    target, drafter = np.array([1 / 3, 2 / 3, 0.0]), np.array([2 / 3, 1 / 3, 0.0])
    by_block, by_token = mean_kept(lambda history: target, lambda history: drafter, 2)
    assert by_token == pytest.approx(10 / 9)
    assert by_block == pytest.approx(11 / 9)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_it_never_keeps_fewer_tokens_than_one_by_one(num_draft_tokens: int) -> None:
    gains = []
    for salt in range(15):
        by_block, by_token = mean_kept(random_model(salt), random_model(salt + 100), num_draft_tokens)
        assert by_block >= by_token - 1e-12
        gains.append(by_block - by_token)
    assert (max(gains) > 0.01) == (num_draft_tokens > 1), "one token is verified alike, more are not"


def test_outcomes_are_as_likely_as_the_algorithm_says() -> None:
    drafted, position = (0, 2, 1), 5
    targets = [distribution(np.array(row)) for row in ([0.2, 0.4, 0.4], [0.25, 0.4, 0.35], [0.3, 0.3, 0.4])]
    draft_probs = np.array([[0.5, 0.2, 0.3], [0.6, 0.1, 0.3], [0.1, 0.6, 0.3]])
    # By hand: p = min(p * target / draft, 1) from left to right, h = S / (S + 1 - p), the last h is p.
    p1, p2, p3 = 0.4, 0.4 * 0.35 / 0.3, (0.4 * 0.35 / 0.3) * 0.3 / 0.6
    s1 = np.maximum(p1 * targets[1].probs - draft_probs[1], 0).sum()
    s2 = np.maximum(p2 * targets[2].probs - draft_probs[2], 0).sum()
    h1, h2, h3 = s1 / (s1 + 1 - p1), s2 / (s2 + 1 - p2), p3
    kept_probs = np.array([(1 - h3) * (1 - h2) * (1 - h1), (1 - h3) * (1 - h2) * h1, (1 - h3) * h2, h3])
    outcomes = [verify_block(targets, drafted, draft_probs, seed, position) for seed in range(40_000)]
    assert chi_square_p_value([num_kept for num_kept, _ in outcomes], kept_probs) > FALSE_ALARM
    for num_kept, share in enumerate((1.0, p1, p2)):
        missing = np.maximum(share * targets[num_kept].probs - draft_probs[num_kept], 0)
        recovered = [token_id for kept, token_id in outcomes if kept == num_kept and token_id is not None]
        assert chi_square_p_value(recovered, missing / missing.sum()) > FALSE_ALARM
    assert all((token_id is None) == (num_kept == 3) for num_kept, token_id in outcomes)


# One distribution each for target and drafter whatever the history, far enough apart that a block is often cut.
PAIR_TARGET, PAIR_DRAFTER = np.array([0.6, 0.15, 0.25]), np.array([0.2, 0.35, 0.45])


def draw_pairs(count: int, draft_trial: Callable[[int], int] = lambda start: start) -> npt.NDArray[np.int64]:
    """The first two tokens of texts with seeds 0, 1, ..., each drafted two tokens at a time from where it stands.

    A drafter draws as a drafter should: with numbers of (seed, position) that belong to this draft's start.
    """
    target, edges = distribution(PAIR_TARGET), np.cumsum(PAIR_DRAFTER)[:-1]
    pairs = []
    for seed in range(count):
        text: list[int] = []
        while len(text) < 2:
            start = len(text) + 1
            trial = draft_trial(start)
            drafted = [
                int(np.searchsorted(edges, uniform(seed, start + i, Purpose.DRAFT, trial), "right")) for i in range(2)
            ]
            num_kept, recovered_id = verify_block([target] * 2, drafted, np.array([PAIR_DRAFTER] * 2), seed, start)
            text += [*drafted[:num_kept], *([] if recovered_id is None else [recovered_id])]
        pairs.append(text[0] * VOCAB_SIZE + text[1])
    return np.array(pairs)


PAIR_PROBS = np.outer(PAIR_TARGET, PAIR_TARGET).ravel()


def test_texts_over_several_blocks_follow_the_target() -> None:
    assert chi_square_p_value(draw_pairs(NUM_DRAWS), PAIR_PROBS) > FALSE_ALARM


def test_the_chi_square_test_sees_numbers_of_an_earlier_block_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # What was rejected behind the last kept token has used the numbers of its position, the drafter's and ours.
    assert chi_square_p_value(draw_pairs(10_000, draft_trial=lambda start: 0), PAIR_PROBS) < FALSE_ALARM
    monkeypatch.setattr(block, "uniform", lambda seed, position, purpose, trial: uniform(seed, position, purpose))
    assert chi_square_p_value(draw_pairs(20_000), PAIR_PROBS) < FALSE_ALARM


def test_the_chi_square_test_sees_recovery_from_the_whole_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "residual", lambda target, draft_probs, share: target)
    assert chi_square_p_value(draw_pairs(5_000), PAIR_PROBS) < FALSE_ALARM


def test_drafts_from_the_target_itself_are_always_kept() -> None:
    random = np.random.default_rng(0)
    for seed in range(500):
        probs = random.dirichlet(np.full(40, 0.2), size=4)
        drafted = [int(random.choice(40, p=row)) for row in probs]
        targets = [distribution(row) for row in probs]
        single = probs.astype(np.float32).astype(np.float64)  # as a drafter hands them over
        assert verify_block(targets, drafted, probs, seed, 1) == (4, None)
        assert verify_block(targets, drafted, single, seed, 1) == (4, None)


def test_a_token_the_target_rules_out_is_never_kept() -> None:
    targets = [distribution(np.array([0.5, 0.5, 0.0]))] * 3
    draft_probs = np.array([[0.0, 0.0, 1.0]] * 3)
    outcomes = [verify_block(targets, (2, 2, 2), draft_probs, seed, 1) for seed in range(300)]
    assert Counter(num_kept for num_kept, _ in outcomes) == {0: 300}
    assert {token_id for _, token_id in outcomes} == {0, 1}


def test_one_drafted_token_is_verified_as_often_as_by_rejection() -> None:
    target, draft_probs = distribution(PAIR_TARGET), PAIR_DRAFTER[None]
    for drafted in range(VOCAB_SIZE):
        by_block = [verify_block([target], [drafted], draft_probs, seed, 1)[0] for seed in range(5_000)]
        by_token = [choose_by_rejection(target, [drafted], draft_probs, seed, 1).accepted for seed in range(5_000)]
        passing = min(1.0, PAIR_TARGET[drafted] / PAIR_DRAFTER[drafted])
        for outcomes in (by_block, by_token):
            assert chi_square_p_value([int(kept) for kept in outcomes], np.array([1 - passing, passing])) > FALSE_ALARM
