from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.verify.random_numbers import Purpose, exponentials, uniform
from outrider.verify.sampling_params import MAX_SEED

WORD = 2**64 - 1


def philox_4x64_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, section 3.3, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & WORD, (product0 >> 64) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c0, c1, c2, c3


def splitmix64(state: int, num_steps: int) -> int:
    """The output after ``num_steps`` steps (Steele et al. 2014, figure 12), in plain integers."""
    z = (state + num_steps * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def draw(seed: int, position: int, purpose: Purpose) -> int:
    # numpy counts up before it computes, so its first block is number 1.
    return philox_4x64_10((1, 0, position, purpose), (seed, 0))[0]


def uniformity_p_value(values: npt.NDArray[np.float64], num_bins: int = 64) -> float:
    """Chi-square test of ``values`` in [0, 1] against the uniform distribution."""
    counts = np.bincount(np.minimum((values * num_bins).astype(np.int64), num_bins - 1), minlength=num_bins)
    expected = len(values) / num_bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(num_bins - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def test_the_oracles_here_give_the_published_answers() -> None:
    # Random123's kat_vectors and the reference C program of SplitMix64.
    assert [hex(word) for word in philox_4x64_10((0, 0, 0, 0), (0, 0))] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]
    assert [splitmix64(1234567, step) for step in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345, MAX_SEED])
@pytest.mark.parametrize("position", [0, 7, 2**40])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_philox_spread_by_splitmix64(seed: int, position: int, purpose: Purpose) -> None:
    bits = draw(seed, position, purpose)
    assert uniform(seed, position, purpose) == (bits >> 11) / 2**53
    token_ids = [0, 1, 2, 49151, 10**6]
    expected = [-np.log(((splitmix64(bits, token_id) >> 11) + 1) / 2**53) for token_id in token_ids]
    np.testing.assert_allclose(exponentials(seed, position, purpose, np.array(token_ids)), expected, rtol=1e-12)


def test_a_token_has_its_number_whoever_else_is_asked_for() -> None:
    everyone = exponentials(5, 6, Purpose.TARGET, np.arange(50_000))
    for some in ([17], [49_999, 3], list(range(1, 50_000, 7))):
        np.testing.assert_array_equal(exponentials(5, 6, Purpose.TARGET, np.array(some)), everyone[some])


def test_a_number_is_the_same_at_every_call() -> None:
    assert uniform(3, 4, Purpose.ACCEPT) == uniform(3, 4, Purpose.ACCEPT)


def test_numbers_stay_in_their_range() -> None:
    numbers = np.concatenate([exponentials(seed, 0, Purpose.TARGET, np.arange(10_000)) for seed in range(50)])
    assert np.isfinite(numbers).all()
    assert (numbers >= 0).all()
    assert all(0 <= uniform(seed, 0, Purpose.ACCEPT) < 1 for seed in range(1000))


def test_not_even_64_zero_bits_make_an_infinite_number() -> None:
    # SplitMix64 gives 0 from the state 0 alone; this is the id that leads there.
    token_id = -draw(1, 2, Purpose.TARGET) * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
    assert splitmix64(draw(1, 2, Purpose.TARGET), token_id) == 0
    [number] = exponentials(1, 2, Purpose.TARGET, np.array([token_id], dtype=np.uint64).view(np.int64))
    assert number == pytest.approx(53 * np.log(2))


@pytest.mark.parametrize("over", ["seeds", "positions", "token ids"])
def test_numbers_are_uniform(over: str) -> None:
    if over == "token ids":
        values = np.exp(-exponentials(1, 2, Purpose.TARGET, np.arange(40_000)))
    else:
        places = [(i, 2) if over == "seeds" else (1, i) for i in range(20_000)]
        values = np.array([uniform(*place, Purpose.ACCEPT) for place in places])
        first_token = np.array([exponentials(*place, Purpose.ACCEPT, np.array([0]))[0] for place in places])
        assert uniformity_p_value(np.exp(-first_token)) > 1e-6
    assert uniformity_p_value(values) > 1e-6


@pytest.mark.parametrize(
    ("other_seed", "other_position", "other_purpose"),
    [(2, 2, Purpose.TARGET), (1, 3, Purpose.TARGET), *((1, 2, purpose) for purpose in Purpose if purpose)],
)
def test_seed_position_and_purpose_each_make_independent_numbers(
    other_seed: int, other_position: int, other_purpose: Purpose
) -> None:
    token_ids = np.arange(40_000)
    ours = np.exp(-exponentials(1, 2, Purpose.TARGET, token_ids))
    others = np.exp(-exponentials(other_seed, other_position, other_purpose, token_ids))
    # Of independent uniform numbers, the difference modulo 1 is uniform.
    assert uniformity_p_value((ours - others) % 1.0) > 1e-6
    assert abs(np.corrcoef(ours, others)[0, 1]) < 5 / np.sqrt(len(token_ids))


def test_accept_and_recover_numbers_of_one_place_are_independent() -> None:
    accept = np.array([uniform(seed, 9, Purpose.ACCEPT) for seed in range(20_000)])
    recover = np.array([exponentials(seed, 9, Purpose.RECOVER, np.array([0]))[0] for seed in range(20_000)])
    assert uniformity_p_value((accept - np.exp(-recover)) % 1.0) > 1e-6
