from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.verify.distribution import TokenDistribution, largest, target_distribution
from outrider.verify.sampling_params import SamplingParams


def dense(distribution: TokenDistribution, vocab_size: int) -> npt.NDArray[np.float64]:
    probs = np.zeros(vocab_size)
    probs[distribution.token_ids] = distribution.probs
    return probs


def hf_probs(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.int64), torch.from_numpy(logits)[None])
    return scores.softmax(-1)[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1000, 49152])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.5, "top_k": 5, "min_p": 0.3},
        {"temperature": 1.2, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)
def test_the_distribution_is_transformers(vocab_size: int, scale: float, options: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=1, **options)  # type: ignore[arg-type]
    logits = np.random.default_rng(vocab_size).normal(scale=scale, size=vocab_size)
    got = target_distribution(logits, params)
    oracle = hf_probs(logits, params)
    np.testing.assert_array_equal(got.token_ids, np.flatnonzero(oracle))
    np.testing.assert_allclose(dense(got, vocab_size), oracle, rtol=1e-9, atol=1e-15)


def test_temperature_zero_leaves_the_likeliest_token_the_lowest_of_equals() -> None:
    got = target_distribution(np.array([0.0, 3.0, 3.0, 1.0]), SamplingParams(max_tokens=1, temperature=0.0))
    assert got.token_ids.tolist() == [1]
    assert got.probs.tolist() == [1.0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, math.ulp(0.0)])
def test_a_tiny_temperature_neither_overflows_nor_divides_by_zero(temperature: float) -> None:
    logits = np.array([-np.inf, 1e4, -1e4, 1e4, 1e4 - 1.0])
    got = target_distribution(logits, SamplingParams(max_tokens=1, temperature=temperature))
    assert got.token_ids.tolist() == [1, 3]
    assert got.probs.tolist() == [0.5, 0.5]


def test_extreme_logits_give_finite_probabilities() -> None:
    logits = np.array([3e38, -3e38, 0.0, -np.inf])
    got = target_distribution(logits, SamplingParams(max_tokens=1))
    assert got.token_ids.tolist() == [0]
    assert got.probs.tolist() == [1.0]


def test_banned_tokens_are_never_candidates() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0])
    for options in ({}, {"top_k": 4}, {"top_p": 0.9999999}, {"min_p": 0.0}):
        got = target_distribution(logits, SamplingParams(max_tokens=1, **options))  # type: ignore[arg-type]
        assert got.token_ids.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.1}, [1]),
        ({"top_p": 0.2499}, [1]),
        ({"top_p": 0.251}, [0, 1]),
        ({"top_p": 0.4999}, [0, 1, 2]),
        ({"top_p": 0.501}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.7499}, [0, 1]),  # of the half that top_k left
        ({"top_p": 0.4999, "min_p": 0.4999}, [0, 1, 2]),
        ({"min_p": 0.4999}, [0, 1, 2, 3, 4, 5, 6]),
        ({"min_p": 0.501}, [1]),
    ],
    ids=str,
)
def test_exactly_enough_tokens_stay_and_of_equals_those_with_the_lowest_ids(
    options: dict[str, float], kept: list[int]
) -> None:
    weights = np.array([1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # in eighths of the sum
    got = target_distribution(np.log(weights), SamplingParams(max_tokens=1, **options))  # type: ignore[arg-type]
    assert got.token_ids.tolist() == kept
    np.testing.assert_allclose(got.probs, weights[kept] / weights[kept].sum(), rtol=1e-12)


def by_full_sort(logits: npt.NDArray[np.float64], params: SamplingParams) -> TokenDistribution:
    """The same distribution, every token sorted: what may be left out for speed must not change a bit."""
    token_ids = np.arange(len(logits))
    if params.top_k:
        token_ids = np.sort(np.argsort(-logits, kind="stable")[: params.top_k])
    weights = np.exp((logits[token_ids] - logits.max()) / params.temperature)
    kept = np.arange(len(weights))
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(weights[order]), params.top_p * weights.sum())) + 1
        kept = np.sort(order[:num_kept])
    kept = kept[weights[kept] >= params.min_p]
    return TokenDistribution(token_ids[kept], weights[kept] / weights[kept].sum())


@pytest.mark.parametrize("vocab_size", [300, 49152])
@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("digits", [None, 1], ids=["all different", "many alike"])
def test_no_bit_depends_on_how_much_is_sorted(vocab_size: int, scale: float, digits: int | None) -> None:
    logits = np.random.default_rng(vocab_size).normal(scale=scale, size=vocab_size)
    logits[vocab_size // 3] += scale  # two that are likelier than chance would have it
    logits[7] += 2 * scale
    logits = logits if digits is None else logits.round(digits)
    for temperature in (0.3, 0.7, 1.5):
        for options in (
            *({"top_p": top_p} for top_p in (1e-9, 0.3, 0.8, 0.95, 0.999, 1 - 1e-12)),
            *({"top_k": top_k} for top_k in (1, 2, 20, 100, 5000)),
            *({"min_p": min_p} for min_p in (1e-5, 0.05)),
            {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        ):
            params = SamplingParams(max_tokens=1, temperature=temperature, **options)  # type: ignore[arg-type]
            got, expected = target_distribution(logits, params), by_full_sort(logits, params)
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_array_equal(got.probs, expected.probs)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_the_nucleus_is_the_smallest_set_that_holds_top_p(top_p: float) -> None:
    for seed in range(50):
        probs = np.random.default_rng(seed).dirichlet(np.full(30, 0.3))
        got = target_distribution(np.log(probs), SamplingParams(max_tokens=1, top_p=top_p))
        kept = np.sort(probs[got.token_ids])
        assert kept.sum() >= top_p - 1e-12
        assert kept[1:].sum() < top_p
        assert kept[0] >= np.delete(probs, got.token_ids).max(initial=0.0)


def test_probabilities_of_a_distribution_can_be_looked_up() -> None:
    got = target_distribution(np.log([0.5, 0.25, 0.125, 0.125]), SamplingParams(max_tokens=1, top_k=2))
    assert [round(got.prob(token_id), 12) for token_id in range(4)] == [round(2 / 3, 12), round(1 / 3, 12), 0.0, 0.0]
    assert got.prob(99) == 0.0
    assert got.prob(-1) == 0.0


def test_largest_agrees_with_a_stable_sort() -> None:
    for seed in range(100):
        values = np.random.default_rng(seed).integers(0, 5, size=20).astype(np.float64)
        for count in (1, 2, 10, 19, 20, 21):
            expected = np.sort(np.argsort(-values, kind="stable")[:count])
            np.testing.assert_array_equal(largest(values, count), expected)
        many = np.random.default_rng(seed).integers(0, 40, size=1000 + seed).astype(np.float64)
        many[seed:500] = -np.inf
        for count in (1, 2, 10, 30):
            np.testing.assert_array_equal(largest(many, count), np.sort(np.argsort(-many, kind="stable")[:count]))
