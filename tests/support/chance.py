"""Whether what was drawn fits the probabilities it should have been drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

FALSE_ALARM = 1e-6
"""A smaller p-value fails a test; seeds are fixed, so a test that passes keeps passing."""


def chi_square_p_value(outcomes: Sequence[int] | npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> float:
    """The probability of a fit as bad as this, if ``outcomes`` were drawn from ``probs``."""
    counts = np.bincount(outcomes, minlength=len(probs))
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    expected = probs[possible] * len(outcomes)
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    half = torch.tensor([(possible.sum() - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()
