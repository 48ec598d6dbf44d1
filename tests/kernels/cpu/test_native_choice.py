"""Choosing from a row of logits: the largest, the k largest, and who can win a random race."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations
from outrider.kernels.operations import load_operations
from outrider.verify.acceptance import race, sample
from outrider.verify.distribution import target_distribution
from outrider.verify.random_numbers import Purpose, draw, exponentials
from outrider.verify.sampling_params import SamplingParams

REFERENCE = load_operations("reference")


@pytest.fixture(params=_native.instruction_sets())
def ops(request: pytest.FixtureRequest) -> CpuOperations:
    return CpuOperations(1, instruction_set=request.param)


def rows_with_ties(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, (num_rows, vocab_size), generator=generator).float() / 4


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 63, 1000])
def test_top_k_is_sorted_and_takes_the_lowest_of_equal_ids(ops: CpuOperations, vocab_size: int) -> None:
    logits = rows_with_ties(5, vocab_size, seed=vocab_size)
    logits[1, vocab_size // 2] = torch.nan
    logits[2, 0] = -torch.inf
    for k in {1, min(7, vocab_size), vocab_size}:
        values = np.nan_to_num(logits.numpy(), nan=-np.inf, neginf=-np.inf)
        expected = np.argsort(-values, axis=1, kind="stable")[:, :k]
        assert ops.top_k(logits, k).tolist() == expected.tolist()
        assert REFERENCE.top_k(logits, k).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [0, 11])
def test_top_k_of_more_than_there_are_is_refused(ops: CpuOperations, k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be from 1 to 10, not {k}"):
        ops.top_k(torch.zeros(1, 10), k)


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_winner_of_a_race_is_among_its_candidates(ops: CpuOperations, temperature: float, spread: float) -> None:
    logits = torch.randn(1003, generator=torch.Generator().manual_seed(3)) * spread
    scaled = logits.numpy().astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    everyone = np.arange(len(logits))
    for seed in range(200):
        with np.errstate(divide="ignore"):
            times = exponentials(seed, 9, Purpose.TARGET, everyone) / weights
        candidates = ops.race_candidates(logits, temperature, draw(seed, 9, Purpose.TARGET)).tolist()
        assert int(times.argmin()) in candidates
        assert candidates == sorted(set(candidates))


def test_few_run_a_race(ops: CpuOperations) -> None:
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(5)) * 3
    counts = [len(ops.race_candidates(logits, 1.0, draw(seed, 0, Purpose.TARGET))) for seed in range(20)]
    assert max(counts) < 5_000


@pytest.mark.parametrize("vocab_size", [1, 15, 17, 1003])
def test_the_race_of_a_reduced_vocabulary_takes_the_numbers_of_its_ids(ops: CpuOperations, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(vocab_size, generator=generator) * 2
    token_map = torch.randperm(49_152, generator=generator)[:vocab_size]
    weights = np.exp(logits.numpy().astype(np.float64))
    for seed in range(200):
        times = exponentials(seed, 9, Purpose.TARGET, token_map.numpy()) / weights
        candidates = ops.race_candidates(logits, 1.0, draw(seed, 9, Purpose.TARGET), token_map).tolist()
        assert int(times.argmin()) in candidates
        assert candidates == sorted(set(candidates))
        assert len(candidates) < vocab_size or vocab_size < 20


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 63, 64, 65, 1000, 8192])
def test_a_probability_is_the_softmaxs_and_the_same_in_any_company(ops: CpuOperations, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * 5
    logits[3, : vocab_size - 1] = -torch.inf
    indices = torch.randint(0, vocab_size, (9,), generator=generator)
    temperatures = torch.tensor([0.0, 1.0, 0.3, 0.7, 2.0, 0.0, 1e-3, 50.0, 1.0])
    heat = torch.where(temperatures > 0, temperatures, 1.0).double()[:, None]
    expected = (logits.double() / heat).softmax(-1).gather(1, indices[:, None])[:, 0]
    for operations in (ops, REFERENCE):
        together = operations.probabilities(logits, indices, temperatures)
        assert together.dtype == torch.float32
        assert torch.allclose(together.double(), expected, rtol=1e-4, atol=1e-30)
        for row in range(9):
            alone = operations.probabilities(logits[row : row + 1], indices[row : row + 1], temperatures[row : row + 1])
            assert torch.equal(alone, together[row : row + 1])
    best = CpuOperations(2).probabilities(logits, indices, temperatures)
    assert torch.equal(best, ops.probabilities(logits, indices, temperatures)), "instruction sets differ"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nobody_runs_where_no_choice_can_be_made(ops: CpuOperations, bad: float) -> None:
    logits = torch.zeros(100)
    logits[37] = bad
    assert ops.race_candidates(logits, 1.0, 1).tolist() == []
    assert ops.race_candidates(torch.full((100,), -torch.inf), 1.0, 1).tolist() == []
    assert race(ops, logits, 1.0, 1, 1, Purpose.TARGET) is None


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_race_among_the_candidates_draws_what_the_whole_vocabulary_would(name: str) -> None:
    operations = load_operations(name)
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(8)) * 2
    params = SamplingParams(max_tokens=1, temperature=0.8)
    whole = target_distribution(logits.numpy().astype(np.float64), params)
    drawn = {race(operations, logits, 0.8, seed, 5, Purpose.TARGET) for seed in range(300)}
    assert len(drawn) > 50
    for seed in range(300):
        assert race(operations, logits, 0.8, seed, 5, Purpose.TARGET) == sample(whole, seed, 5, Purpose.TARGET)
