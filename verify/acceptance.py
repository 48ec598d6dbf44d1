"""Acceptance: which token stands at a position, and whether it is the drafted one.

*Drafts without probabilities* are kept iff they equal the target's own sample. That sample is a race: token
``i`` finishes at time ``exponential_i / prob_i``, the first one wins, and it wins with probability ``prob_i``
(the Gumbel-max trick in another guise). The exponentials belong to (seed, position, token id) alone, so the
winner can be known before anyone guesses, and a guess can only be found right or wrong. It is right as often
as rejection sampling would accept it (a certain guess passes with its probability under the target), but more
holds: the *text itself*, not only its distribution, is the same with every drafter, with every draft length and
with none, in every batch and after every preemption. Same seed, same text.

*Drafts with probabilities* go through speculative rejection sampling (Leviathan et al. 2023, algorithm 1; Chen
et al. 2023, algorithm 2), which accepts more often when the guess was sampled. The text then has the target's
distribution, and depends on the seed and on the drafts.

At temperature 0 the distribution is a single token, and both come down to comparing with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outrider.kernels.operations import Operations
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose, draw, exponentials, uniform

_MAX_PROB_SUM_ERROR = 1e-4  # what rounding leaves of a float32 softmax over 10^5 tokens, with room


@dataclass(frozen=True, slots=True)
class Choice:
    """The token at one position, and whether it was drafted there."""

    token_id: int
    accepted: bool


def num_matching(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """How many drafted tokens, from the first on, are the target's own choices."""
    for index, (draft_id, target_id) in enumerate(zip(draft_token_ids, target_token_ids, strict=False)):
        if draft_id != target_id:
            return index
    return min(len(draft_token_ids), len(target_token_ids))


def sample(distribution: TokenDistribution, seed: int, position: int, purpose: Purpose) -> int:
    """The winner of the race: a token drawn from ``distribution``."""
    token_ids = distribution.token_ids
    if len(token_ids) == 1:
        return int(token_ids[0])
    times = exponentials(seed, position, purpose, token_ids) / distribution.probs
    return int(token_ids[times.argmin()])


def race(
    operations: Operations, logits: Tensor, temperature: float, seed: int, position: int, purpose: Purpose
) -> int | None:
    """The token that ``sample`` would draw from the softmax of a row ``[vocab_size]``, at a fraction of the cost.

    Only tokens that can finish first are run exactly; None if the row cannot be drawn from (NaN, nothing finite).
    """
    token_ids = operations.race_candidates(logits, temperature, draw(seed, position, purpose))
    if len(token_ids) == 0:
        return None
    candidates = token_ids.cpu().numpy()
    chances = logits[token_ids].cpu().numpy().astype(np.float64) / temperature
    with np.errstate(divide="ignore"):  # what underflows never finishes
        times = exponentials(seed, position, purpose, candidates) / np.exp(chances - chances.max())
    return int(candidates[times.argmin()])


def choose_by_match(target: TokenDistribution, draft_token_id: int | None, seed: int, position: int) -> Choice:
    """The target's own sample; ``draft_token_id`` is accepted if it is that (None: nothing was drafted)."""
    token_id = sample(target, seed, position, Purpose.TARGET)
    return Choice(token_id, accepted=token_id == draft_token_id)


def choose_by_rejection(
    target: TokenDistribution,
    draft_token_id: int,
    draft_probs: npt.NDArray[np.float64],
    seed: int,
    position: int,
) -> Choice:
    """Keep a token sampled from ``draft_probs`` ``[vocab_size]``, or recover one from what the draft left out.

    Probabilities from which the token cannot have been sampled are ignored: to match is always exact.
    """
    if not _could_have_drawn(draft_probs, draft_token_id):
        return choose_by_match(target, draft_token_id, seed, position)
    draft_probs = draft_probs / draft_probs.sum()
    if uniform(seed, position, Purpose.ACCEPT) * draft_probs[draft_token_id] < target.prob(draft_token_id):
        return Choice(draft_token_id, accepted=True)
    return Choice(sample(_residual(target, draft_probs), seed, position, Purpose.RECOVER), accepted=False)


def _could_have_drawn(draft_probs: npt.NDArray[np.float64], token_id: int) -> bool:
    return bool(
        0 <= token_id < len(draft_probs)
        and draft_probs[token_id] > 0.0
        and draft_probs.min() >= 0.0
        and abs(draft_probs.sum() - 1.0) <= _MAX_PROB_SUM_ERROR
    )


def _residual(target: TokenDistribution, draft_probs: npt.NDArray[np.float64]) -> TokenDistribution:
    """``norm(max(target_probs - draft_probs, 0))``: the share of each token that drafts do not already fill."""
    missing = target.probs - draft_probs[target.token_ids]
    kept = missing > 0.0
    if not kept.any():  # both are equal but for rounding, so the target itself is as good
        return target
    return TokenDistribution(target.token_ids[kept], missing[kept] / missing[kept].sum())
