"""The race of ``Operations.race_candidates``, in numpy: what the target's choice and a draft's guess have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2**64 over the golden ratio, odd
_TO_UNIT = 2.0**-53  # a double between 0 and 1 holds 53 bits


def exponentials(draw: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The numbers ``E_i`` of the race: standard exponentials, finite and not negative, shaped like ``token_ids``."""
    bits = token_ids.astype(np.uint64)
    bits *= _GOLDEN_GAMMA
    bits += np.uint64(draw)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(11)
    bits += np.uint64(1)
    result: npt.NDArray[np.float64] = -np.log(bits * _TO_UNIT)  # of what is in (0, 1]
    return result
