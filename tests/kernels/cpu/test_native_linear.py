"""Native linear layers: float64's product in every form, and each row's own bits whoever shares the pass."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from stored_weights import (
    FORMATS,
    GROUP_FORMATS,
    QUANTIZED,
    FormedWeight,
    as_int8,
    pack,
    random_weight,
    same_bits,
)

from outrider.kernels.cpu import _native

INSTRUCTION_SETS = _native.instruction_sets()
MACHINES = {isa: _native.Machine(2, isa) for isa in INSTRUCTION_SETS}
BEST = MACHINES[INSTRUCTION_SETS[0]]

# in_features, then the out_features of the weights stacked into one layer
SHAPES = [
    (1, [1]),
    (16, [16, 1]),
    (17, [63]),
    (31, [5, 5]),
    (63, [100]),
    (100, [17, 3, 64]),
    (576, [33]),
    (1000, [16]),
]
GROUP_SHAPES = [(32, [1]), (64, [16, 1]), (96, [17, 3, 63]), (576, [100]), (1024, [33]), (1536, [20])]


def shapes(format: str) -> list[tuple[int, list[int]]]:
    return GROUP_SHAPES if format in GROUP_FORMATS else SHAPES


def random_rows(num_rows: int, in_features: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Normal values, whole rows and single inputs of them very large or very small."""
    random = np.random.default_rng([seed, num_rows, in_features])
    sizes = 10.0 ** random.integers(-3, 3, (num_rows, 1))
    rows = random.standard_normal((num_rows, in_features)) * sizes
    rows[random.random(rows.shape) < 0.01] *= 100
    rows[random.random(rows.shape) < 0.1] = 0
    return rows.astype(np.float32)


def multiply(
    machine: _native.Machine, x: npt.NDArray[np.float32], packed: _native.PackedLinear
) -> npt.NDArray[np.float32]:
    result = np.full((len(x), packed.out_features), np.nan, dtype=np.float32)
    machine.linear(x, packed, result)
    return result


def random_layer(
    format: str, in_features: int, stacked: list[int]
) -> tuple[list[FormedWeight], npt.NDArray[np.float32]]:
    weights = [random_weight(format, n, in_features, seed=index) for index, n in enumerate(stacked)]
    return weights, np.random.default_rng(7).standard_normal(sum(stacked)).astype(np.float32)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_linear_is_the_product(format: str, isa: str) -> None:
    for in_features, stacked in shapes(format):
        weights, bias = random_layer(format, in_features, stacked)
        matrix = np.concatenate([weight.values for weight in weights])  # [out_features, in_features]
        for num_rows in (1, 5, 9):
            x = random_rows(num_rows, in_features)
            read = as_int8(x) if format in QUANTIZED else x.astype(np.float64)
            size = np.abs(read) @ np.abs(matrix).T  # what rounding errors are in proportion to
            for given in (None, bias):
                expected = read @ matrix.T + (0 if given is None else given.astype(np.float64))
                result = multiply(MACHINES[isa], x, pack(weights, given))
                allowed = 1e-6 * (size + np.abs(expected)) + 1e-30
                assert (np.abs(result - expected) <= allowed).all(), (in_features, stacked, num_rows)


@pytest.mark.parametrize("format", QUANTIZED)
def test_quantised_activations_are_near_what_they_stand_for(format: str) -> None:
    weight = random_weight(format, 100, 576, seed=1)
    x = np.random.default_rng(2).standard_normal((8, 576)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.values.T
    result = multiply(BEST, x, pack([weight]))
    # A step is 1/127 of a group's largest value, some 2.3 of these; an error is uniform in half a step.
    deviation = np.sqrt(((result - expected) ** 2).mean() / (expected**2).mean())
    assert 1e-4 < deviation < 0.01


@pytest.mark.parametrize("format", GROUP_FORMATS)
def test_rows_unpack_to_ggufs_values_bit_for_bit(format: str) -> None:
    kind = gguf.GGMLQuantizationType[format]
    for in_features, out_features in [(32, 1), (96, 17), (576, 63)]:
        weight = random_weight(format, out_features, in_features, seed=3)
        channels = np.random.default_rng(4).integers(0, out_features, 40)
        rows = np.full((40, in_features), np.nan, dtype=np.float32)
        pack([weight]).unpack_rows(channels, rows)
        assert same_bits(rows, gguf.dequantize(weight.blocks, kind)[channels])


@pytest.mark.parametrize("format", ["Q8_CHANNEL", "BF16", "F32"])
def test_rows_of_other_forms_unpack_to_their_values(format: str) -> None:
    weight = random_weight(format, 33, 100, seed=5)
    rows = np.full((33, 100), np.nan, dtype=np.float32)
    pack([weight]).unpack_rows(np.arange(33), rows)
    assert same_bits(rows, weight.values.astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_instruction_sets_and_threads_give_the_same_bits(format: str) -> None:
    for in_features, stacked in shapes(format):
        packed = pack(*random_layer(format, in_features, stacked))
        for num_rows in (1, 3, 8, 11):
            x = random_rows(num_rows, in_features, seed=1)
            expected = multiply(BEST, x, packed)
            for machine in MACHINES.values():
                assert same_bits(multiply(machine, x, packed), expected), (in_features, stacked, num_rows)
    packed = pack([random_weight(format, 1000, 576 if format in GROUP_FORMATS else 570, seed=6)])
    x = random_rows(150, packed.in_features)
    expected = multiply(BEST, x, packed)
    for num_threads in (1, 2, 3):
        for isa in INSTRUCTION_SETS[:2]:
            assert same_bits(multiply(_native.Machine(num_threads, isa), x, packed), expected), (isa, num_threads)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_keeps_its_bits_in_any_company(format: str, isa: str) -> None:
    machine = MACHINES[isa]
    in_features = 96 if isa == "scalar" else 576
    packed = pack([random_weight(format, n, in_features, seed=8) for n in (100, 33)])
    x = random_rows(150, in_features, seed=2)
    alone = np.concatenate([multiply(machine, x[row : row + 1], packed) for row in range(len(x))])
    for num_rows in [*range(2, 21), 31, 64, 65, 150]:
        for first in {0, 5, len(x) - num_rows}:
            together = multiply(machine, x[first : first + num_rows], packed)
            assert same_bits(together, alone[first : first + num_rows]), (num_rows, first)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_own_row_alone(poison: float, format: str, isa: str) -> None:
    packed = pack([random_weight(format, 40, 96, seed=9)])
    x = random_rows(7, 96)
    expected = multiply(MACHINES[isa], x, packed)
    for place in (0, 17, 32, 95):
        poisoned = x.copy()
        poisoned[3, place] = poison
        result = multiply(MACHINES[isa], poisoned, packed)
        assert not np.isfinite(result[3]).any()
        others = [0, 1, 2, 4, 5, 6]
        assert same_bits(result[others], expected[others])


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-36, 1e-30, 1e-20, 1e20, 1e30])
def test_very_small_and_large_activations_are_the_same_everywhere(size: float, format: str) -> None:
    weight = random_weight(format, 20, 64, seed=10)
    x = (np.random.default_rng(11).standard_normal((3, 64)) * size).astype(np.float32)
    x[:, 32:] = np.abs(x[:, 32:])  # signs that agree, and sums that grow
    results = [multiply(machine, x, pack([weight])) for machine in MACHINES.values()]
    for result in results:
        assert same_bits(result, results[0])
        expected = x.astype(np.float64) @ weight.values.T
        assert (np.abs(result - expected) <= 0.03 * size + 1e-29).all()


def test_a_layer_without_rows_or_columns_is_empty() -> None:
    packed = pack([random_weight("Q4_0", 5, 32, seed=1)])
    assert multiply(BEST, random_rows(0, 32), packed).shape == (0, 5)
    empty = _native.pack_linear("F32", 8, [np.empty((0, 32), dtype=np.uint8)])
    assert multiply(BEST, random_rows(3, 8), empty).shape == (3, 0)
