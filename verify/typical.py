"""Typical acceptance: LOSSY. It keeps what the target finds likely enough, and changes what the target says.

Medusa (Cai et al. 2024, section 2.3.1): a drafted token passes if its probability exceeds a threshold that falls
with the target's entropy, ``min(epsilon, delta * exp(-entropy))``. Where the target is sure, only its favourite
passes; where it is not, much does. Drafts are kept more often than any lossless rule can keep them, and the text is
the drafter's as much as the target's: its distribution is not the target's, and a seed gives the same text only with
the same drafts. Nothing selects this but code that says
``typical_lossy``; no option does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.verify.acceptance import Choice, choose_by_match
from outrider.verify.distribution import TokenDistribution

EPSILON = 0.09  # as Medusa's own code has them, delta = sqrt(epsilon)
DELTA = 0.3


def choose_typical(target: TokenDistribution, draft_token_ids: Sequence[int], seed: int, position: int) -> Choice:
    """The target's own sample if it was drafted or nothing drafted is typical; else the likeliest drafted token."""
    own = choose_by_match(target, None, seed, position)
    if not draft_token_ids or own.token_id in draft_token_ids:
        return Choice(own.token_id, accepted=own.token_id in draft_token_ids)
    likeliest = max(draft_token_ids, key=target.prob)
    return Choice(likeliest, accepted=True) if target.prob(likeliest) > threshold(target) else own


def threshold(target: TokenDistribution) -> float:
    """What a token's probability must exceed to be typical."""
    entropy = -float((target.probs * np.log(target.probs)).sum())
    return min(EPSILON, DELTA * float(np.exp(-entropy)))
