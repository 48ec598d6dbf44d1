"""Random numbers as a function of (seed, position, purpose), never a stream.

A stream would hand a token whatever number comes next, and what comes next depends on who shared the
pass, how many guesses were tried before and whether the sequence was preempted. A function of the token's
own place gives the same number however often and in whatever order it is asked.

Each draw has one 64-bit number from Philox4x64-10 (Salmon et al. 2011): the seed is the key; position, purpose
and, where one place needs several independent draws, ``trial`` are words of the counter. A draw over token ids
spreads it with the output function of SplitMix64 (Steele et al. 2014), of which any element can be computed alone:
a few candidates of a large vocabulary cost a few operations. From Philox only the raw output is used, which numpy
keeps the same in every version.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from outrider.kernels import race

_TO_UNIT = 2.0**-53  # a double between 0 and 1 holds 53 bits


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent, as rejection sampling needs."""

    TARGET = 0  # the target's own sample
    DRAFT = 1  # a drafter's sample
    ACCEPT = 2  # whether a drafted token is kept
    RECOVER = 3  # the token in place of a rejected one


def uniform(seed: int, position: int, purpose: Purpose, trial: int = 0) -> float:
    """A number in [0, 1).

    ``seed``: 0 to 2**64 - 1; ``position``: the index, in prompt and output, of the token to be chosen;
    ``trial``: which of the draws for this place, 0 to 2**64 - 1.
    """
    return (draw(seed, position, purpose, trial) >> 11) * _TO_UNIT


def exponentials(
    seed: int, position: int, purpose: Purpose, token_ids: npt.NDArray[np.int64], trial: int = 0
) -> npt.NDArray[np.float64]:
    """Standard exponentials, finite and not negative, shaped like ``token_ids``: each id has its own in a draw."""
    return race.exponentials(draw(seed, position, purpose, trial), token_ids)


def draw(seed: int, position: int, purpose: Purpose, trial: int = 0) -> int:
    """The 64 bits from which a draw's other numbers are made."""
    counter = np.array([0, trial, position, purpose], dtype=np.uint64)  # lowest word first
    philox = np.random.Philox(_Key(seed), counter=counter)  # type: ignore[arg-type]  # takes any ISeedSequence
    return int(philox.random_raw())


class _Key(ISeedSequence):
    """Gives Philox its key. Its own ``key`` argument asks the system for entropy first, four times the cost."""

    def __init__(self, seed: int) -> None:
        self._key = np.array([seed, 0], dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[np.uint64]:
        assert n_words == len(self._key), "Philox4x64 has a key of two words"
        return self._key
