"""What the machine does when it does nothing else: read memory, multiply int8, multiply floats."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from outrider.server.bench.kernels import Ceilings

if TYPE_CHECKING:  # it may not be built
    from outrider.kernels.cpu import _native

MEMORY_BYTES = 256 << 20
_PIECE = 8 << 20
_HUGE_PAGE = 2 << 20
_MULTIPLY_S = 0.003

Result = TypeVar("Result")


class MachineCeilings:
    """Reads the ceilings of a machine's threads, in about 20 ms; what was in its caches is gone then.

    Memory is read in pieces and the fastest counts, or whatever else runs for a moment would lower the ceiling: beside
    a busy process 256 MB in one go gave 11 GB/s, and the best 8 MB of them 35.

    Args:
        num_bytes: of memory to be read, a multiple of 1024. Too few stay in the caches, and tell of these.
    """

    def __init__(self, machine: _native.Machine, num_bytes: int = MEMORY_BYTES) -> None:
        from outrider.kernels.cpu import _native

        memory = np.empty(num_bytes + _HUGE_PAGE, np.uint8)
        start = -memory.ctypes.data % _HUGE_PAGE
        memory = memory[start : start + num_bytes]
        _native.advise_huge_pages(memory.ctypes.data, num_bytes)
        memory.fill(1)  # or all of it would be the system's one page of zeros
        self._pieces = [memory[at : at + _PIECE] for at in range(0, num_bytes, _PIECE)]
        self._read = partial(_native.read_memory, machine)
        self._int8 = _fixed_time(partial(_native.multiply_int8, machine))
        self._f32 = _fixed_time(partial(_native.multiply_f32, machine))

    def __call__(self) -> Ceilings:
        int8_s, int8_macs = _timed(self._int8)
        f32_s, f32_macs = _timed(self._f32)
        bytes_per_s = max(piece.size / _timed(partial(self._read, piece))[0] for piece in self._pieces)
        return Ceilings(bytes_per_s, int8_macs / int8_s, f32_macs / f32_s)


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _fixed_time(multiply: Callable[[int], int]) -> Callable[[], int]:
    """The same with as many steps as take about ``_MULTIPLY_S``."""
    num_steps = 256
    while (took_s := _timed(partial(multiply, num_steps))[0]) < _MULTIPLY_S / 4:
        num_steps *= 2
    return partial(multiply, max(1, round(num_steps * _MULTIPLY_S / took_s)))
