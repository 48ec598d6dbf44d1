"""Acceptance: which token stands at a position, and whether it is the drafted one.

*Drafts without probabilities* are kept iff they equal the target's own sample. That sample is a race: token
``i`` finishes at time ``exponential_i / prob_i``, the first one wins, and it wins with probability ``prob_i``
(the Gumbel-max trick in another guise). The exponentials belong to (seed, position, token id) alone, so the
winner can be known before anyone guesses, and a guess can only be found right or wrong. It is right as often
as rejection sampling would accept it (a certain guess passes with its probability under the target), but more
holds: the *text itself*, not only its distribution, is the same with every drafter, with every draft length and
with none, in every batch and after every preemption. Same seed, same text.

*Coupled drafts* are the best of these. A drafter that has a distribution need not draw from it with numbers of its
own: it runs the same race, ``sample(..., Purpose.TARGET)`` with the target's seed and position. Each id then has
one exponential for both, and whoever wins the one race mostly wins the other: draft and target agree with
probability at least ``(1 - d) / (1 + d)``, ``d`` the distance in total variation, where ``1 - d`` is the most any
coupling can reach (Daliri, Musco & Suresh 2025, "Coupling without communication and drafter-invariant speculative
decoding", theorem 1). To peek at these numbers biases nothing: what the target chooses is a function of them and
of its own logits, and the guess is no part of it.

*Drafts with probabilities* go through speculative rejection sampling (Leviathan et al. 2023, algorithm 1; Chen
et al. 2023, algorithm 2), or all at once through ``block``, which keep more of a guess that was drawn with the
drafter's own numbers. The text then has the target's distribution, and depends on the seed and on the drafts.

At temperature 0 the distribution is a single token, and all come down to comparing with it.
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
    draft_token_ids: Sequence[int],
    draft_probs: npt.NDArray[np.float64],
    seed: int,
    position: int,
) -> Choice:
    """Keep one of the tokens drafted for a position, or recover one from what they leave out.

    Candidates are tried in turn; each rejection leaves the next one only what the target has beyond the rejected
    one's distribution (SpecInfer, Miao et al. 2024, algorithm 2). One candidate is plain rejection sampling.

    ``draft_probs`` ``[num_candidates, vocab_size]``: what each was drawn from, given the candidates before it. So
    candidates may be drawn with or without replacement: without, those before have probability 0 in the later rows.
    Probabilities from which a token cannot have been drawn make all be matched instead, which is always exact.
    """
    drafted = list(zip(draft_token_ids, draft_probs, strict=True))
    if not drafted or not all(could_have_drawn(probs, token_id) for token_id, probs in drafted):
        choice = choose_by_match(target, None, seed, position)
        return Choice(choice.token_id, accepted=choice.token_id in draft_token_ids)
    for trial, (token_id, probs) in enumerate(drafted):
        probs = probs / probs.sum()
        if uniform(seed, position, Purpose.ACCEPT, trial) * probs[token_id] < target.prob(token_id):
            return Choice(token_id, accepted=True)
        target = residual(target, probs)
    return Choice(sample(target, seed, position, Purpose.RECOVER), accepted=False)


def could_have_drawn(draft_probs: npt.NDArray[np.float64], token_id: int) -> bool:
    """Whether ``draft_probs`` ``[vocab_size]`` are probabilities, and ``token_id`` has one."""
    return bool(
        0 <= token_id < len(draft_probs)
        and draft_probs[token_id] > 0.0
        and draft_probs.min() >= 0.0
        and abs(draft_probs.sum() - 1.0) <= _MAX_PROB_SUM_ERROR
    )


def residual(target: TokenDistribution, draft_probs: npt.NDArray[np.float64], share: float = 1.0) -> TokenDistribution:
    """``norm(max(share * target_probs - draft_probs, 0))``: what of each token drafts do not already fill."""
    missing = share * target.probs - draft_probs[target.token_ids]
    kept = missing > 0.0
    if not kept.any():  # both are equal but for rounding, so the target itself is as good
        return target
    return TokenDistribution(target.token_ids[kept], missing[kept] / missing[kept].sum())
