"""The distribution a token is drawn from: temperature, top_k, top_p and min_p, in this order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.verify.sampling_params import SamplingParams

_LEAST_WEIGHT = 1e-300  # of the largest: rarer tokens count as impossible, so that no quotient leaves the doubles


@dataclass(frozen=True, slots=True, eq=False)
class TokenDistribution:
    """Probabilities of the tokens that can be drawn; every other token has none.

    In double precision, so that rare tokens keep their share, and reduced over one row at a time, so that
    a row's distribution does not depend on the rows around it.
    """

    token_ids: npt.NDArray[np.int64]  # [num_candidates], ascending
    probs: npt.NDArray[np.float64]  # [num_candidates], all positive, sum 1

    def prob(self, token_id: int) -> float:
        index = int(np.searchsorted(self.token_ids, token_id))
        found = index < len(self.token_ids) and self.token_ids[index] == token_id
        return float(self.probs[index]) if found else 0.0


def target_distribution(logits: npt.NDArray[np.float64], params: SamplingParams) -> TokenDistribution:
    """What ``params`` make of processed logits ``[vocab_size]``; temperature 0 leaves one token, the likeliest.

    Where tokens are equally likely at the edge of ``top_k`` or ``top_p``, those with the lowest ids stay.
    At least one logit must be finite, and none NaN or +inf.
    """
    if params.is_greedy:
        return TokenDistribution(np.array([logits.argmax()]), np.ones(1))
    token_ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        token_ids = largest(logits, params.top_k)
        logits = logits[token_ids]
    weights = logits - logits.max()
    with np.errstate(over="ignore"):  # a tiny temperature: everything below the largest goes to exp(-inf) = 0
        weights /= params.temperature
    np.exp(weights, out=weights)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        kept = kept[weights[kept] >= params.min_p]  # the largest weight is 1
    else:
        kept = np.flatnonzero(weights >= max(params.min_p, _LEAST_WEIGHT))
    weights = weights[kept]
    return TokenDistribution(token_ids[kept], weights / weights.sum())


def largest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the ``count`` largest values; of equal ones the first. ``1 <= count``, no NaN."""
    if count >= len(values):
        return np.arange(len(values))
    num_columns = 8 * count
    if len(values) < 4 * num_columns:
        return _largest_of_few(values, count)
    # As many columns as this have a maximum that is no less, so the largest are no less either: few are looked at.
    maxima = values[: len(values) // num_columns * num_columns].reshape(-1, num_columns).max(axis=0)
    candidates = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    return candidates[_largest_of_few(values[candidates], count)]


def _largest_of_few(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    threshold = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the smallest set that holds ``top_p`` of all weight (Holtzman et al. 2020, section 3.1).

    Sorts only as many of the largest weights (the largest is 1) as it takes to find it.
    """
    total = weights.sum()
    # Tokens below this hold less than 1 - top_p together, so the nucleus lies above.
    least = (1.0 - top_p) * total / len(weights)
    cutoff = 2.0**-6
    while True:
        candidates = np.flatnonzero(weights >= max(cutoff, least))
        descending = np.sort(weights[candidates])[::-1]
        held = np.cumsum(descending)
        if cutoff <= least or held[-1] >= top_p * total:
            break
        cutoff /= 32.0
    num_kept = min(int(np.searchsorted(held, top_p * total)) + 1, len(candidates))
    return candidates[_largest_of_few(weights[candidates], num_kept)]
