"""Quantising floats in groups of 32, into the blocks that GGUF files hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """``blocks`` ``[num_groups, bytes_per_group]``, and what they lose: the sum of the squared differences."""

    blocks: _Bytes
    squared_error: float


Quantizer = Callable[[_Floats], QuantizedGroups]
"""Takes whole groups end to end: ``[num_groups, 32]``, all finite. What f16 cannot hold shows in the error."""

_overflow_shows = np.errstate(over="ignore", invalid="ignore")


@_overflow_shows
def quantize_q8_0(groups: _Floats) -> QuantizedGroups:
    """To int8 with a scale: no value is off by more than half a step of its group's largest magnitude / 127.

    Rounds by the scale as f16 holds it, which for weights below 0.008 is no longer precise to 8 bits.
    """
    values = _lanes(groups)
    largest = np.maximum(values.max(axis=0), -values.min(axis=0))
    scales = (largest / 127).astype(np.float16)
    too_small = scales.astype(np.float32) * 127.5 < largest
    scales = np.where(too_small, np.nextafter(scales, np.float16(np.inf)), scales)
    steps = scales.astype(np.float32)
    quants = values * _inverse(steps)
    np.clip(np.rint(quants, out=quants), -127, 127, out=quants)
    blocks = np.empty((len(groups), 2 + GROUP_SIZE), dtype=np.uint8)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    blocks[:, 2:] = quants.astype(np.int8).view(np.uint8).T
    return QuantizedGroups(blocks, _squared_error(values, quants, steps, 0))


def quantize_q8_channels(rows: _Floats) -> tuple[npt.NDArray[np.int8], _Floats]:
    """To int8 with one scale a row: ``[num_rows, n]`` to ``[num_rows, n]`` and scales ``[num_rows]``."""
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    return np.rint(rows * _inverse(scales)[:, None]).astype(np.int8), scales


_SEARCH_STARTS = (-0.5, 1.0, 2.5)
_SEARCH_ROUNDS = 4
"""How much ``quantize_q4_1`` looks for, and why not more.

Its squared error, as a part of what smallest and largest value as the ends of the range leave, on normal values and
(heavy-tailed) Student's t with 3 degrees of freedom: one start and round 0.92 and 0.86, these starts with 2 rounds
about 0.85 and 0.76, with 4 rounds 0.82 and 0.74, 24 starts with 5 rounds 0.80 and 0.73 at seven times the time.
"""


@_overflow_shows
def quantize_q4_1(groups: _Floats) -> QuantizedGroups:
    """To 0..15 with a scale and a minimum, chosen for a small squared error.

    From several ranges, all but the first narrower than the values' own: round to the nearest of 16 steps, fit scale
    and minimum to these by least squares, and again (Lloyd 1982, with steps that stay even).
    """
    values = _lanes(groups)
    lowest = values.min(axis=0)
    scales, offsets = _search(values - lowest)  # squares of small numbers, where values differ by little
    stored_scales, stored_minima = scales.astype(np.float16), (offsets + lowest).astype(np.float16)
    steps, minima = stored_scales.astype(np.float32), stored_minima.astype(np.float32)
    quants = _round_to_steps(values, steps, minima, np.empty_like(values))
    nibbles = quants.astype(np.uint8)
    blocks = np.empty((len(groups), 4 + GROUP_SIZE // 2), dtype=np.uint8)
    blocks[:, :2] = stored_scales[:, None].view(np.uint8)
    blocks[:, 2:4] = stored_minima[:, None].view(np.uint8)
    blocks[:, 4:] = (nibbles[: GROUP_SIZE // 2] | nibbles[GROUP_SIZE // 2 :] << 4).T
    return QuantizedGroups(blocks, _squared_error(values, quants, steps, minima))


def _search(values: _Floats) -> tuple[_Floats, _Floats]:
    """The best scales and minima found, each ``[num_groups]``, for ``values`` ``[32, num_groups]`` from 0 upward."""
    num_groups = values.shape[1]
    sums = values.sum(axis=0)
    ranges = values.max(axis=0)
    best_error = np.full(num_groups, np.inf, dtype=np.float32)
    best_scales, best_minima = np.zeros_like(ranges), np.zeros_like(ranges)
    quants, products = np.empty_like(values), np.empty_like(values)
    for start in _SEARCH_STARTS:
        scales = ranges / np.float32(15 + start)
        minima = scales * np.float32(start / 2)
        for _ in range(_SEARCH_ROUNDS):
            _round_to_steps(values, scales, minima, quants)
            quant_sums = quants.sum(axis=0)
            square_sums = np.multiply(quants, quants, out=products).sum(axis=0)
            product_sums = np.multiply(quants, values, out=products).sum(axis=0)
            spread = GROUP_SIZE * square_sums - quant_sums * quant_sums
            scales = (GROUP_SIZE * product_sums - quant_sums * sums) / np.maximum(spread, 1)  # whole numbers: 0 or >= 1
            minima = (sums - scales * quant_sums) / GROUP_SIZE
        error = -(scales * product_sums + minima * sums)  # without the sum of squares, the same for all
        better = error < best_error
        for best, found in ((best_error, error), (best_scales, scales), (best_minima, minima)):
            np.copyto(best, found, where=better)
    return best_scales, best_minima


def _round_to_steps(values: _Floats, scales: _Floats, minima: _Floats, to: _Floats) -> _Floats:
    inverse = _inverse(scales)
    np.multiply(values, inverse, out=to)
    to -= minima * inverse
    return np.clip(np.rint(to, out=to), 0, 15, out=to)


def _squared_error(values: _Floats, quants: _Floats, scales: _Floats, minima: _Floats | int) -> float:
    difference = quants * scales
    difference += minima
    difference -= values
    return float(np.einsum("ij,ij->", difference, difference, dtype=np.float64))


def _lanes(groups: _Floats) -> _Floats:
    """``[32, num_groups]``, a copy: what is done to each group runs along memory."""
    return np.array(groups.T, order="C")


def _inverse(scales: _Floats) -> _Floats:
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
