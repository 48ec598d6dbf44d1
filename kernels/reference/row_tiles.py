"""Which row counts of a matrix product give every row the same bits on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

CANONICAL_ROWS = 16
"""The row count whose bits all others must reproduce. One tile of this size is always right."""

CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 24, 32, 48, 64, 96, 128)  # each costs time at every start
MAX_TRIAL_OUTPUTS = 2_000_000
"""Larger trials than this (rows x outputs) are not worth their time at start-up."""


def proven_row_counts(
    product: Callable[[Tensor], Tensor], in_features: int, out_features: int, candidates: Sequence[int] = CANDIDATES
) -> tuple[int, ...]:
    """The row counts at which ``product`` reproduces the bits of ``CANONICAL_ROWS`` rows, ascending.

    ``product`` maps ``[rows, in_features]`` to ``[rows, out_features]``, each row by itself. Random rows are
    pushed through it at every candidate count and at shifted places of the tile. A kernel that adds in
    another order differs somewhere in thousands of random sums, so equality everywhere is proof enough.
    """
    counts = [count for count in candidates if count * out_features <= MAX_TRIAL_OUTPUTS]
    generator = torch.Generator().manual_seed(0)
    num_rows = max([CANONICAL_ROWS, *counts])
    rows = torch.randn(num_rows, in_features, generator=generator)
    expected = torch.cat([product(tile.contiguous()) for tile in _canonical_tiles(rows)])[:num_rows]

    def reproduces(count: int) -> bool:
        starts = {0, num_rows - count}
        return all(
            torch.equal(product(rows[start : start + count].clone()), expected[start : start + count])
            for start in starts
        )

    return tuple(sorted({CANONICAL_ROWS, *(count for count in counts if reproduces(count))}))


def _canonical_tiles(rows: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(rows), CANONICAL_ROWS):
        tile = rows[start : start + CANONICAL_ROWS]
        if len(tile) < CANONICAL_ROWS:
            tile = torch.cat([tile, tile.new_zeros(CANONICAL_ROWS - len(tile), tile.shape[1])])
        yield tile


def split_rows(num_rows: int, row_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Cover ``num_rows`` rows by tiles of the allowed counts: ``(rows used, rows computed)`` each.

    As few tiles as possible, since each reads all the weights: the largest that fit, then one that is
    padded if need be.
    """
    tiles = []
    remaining = num_rows
    while remaining:
        fitting = next((count for count in row_counts if count >= remaining), None)
        computed = fitting if fitting is not None and fitting < 2 * remaining else _largest(row_counts, remaining)
        used = min(computed, remaining)
        tiles.append((used, computed))
        remaining -= used
    return tiles


def _largest(row_counts: Sequence[int], limit: int) -> int:
    """The largest count within ``limit``, or the smallest of all."""
    return max((count for count in row_counts if count <= limit), default=row_counts[0])
