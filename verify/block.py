"""Block verification: how much of a sampled draft is kept is decided for all of it at once.

Token by token, a token that the target likes less than the draft did is at risk however much the target likes what
follows. Block verification (Sun et al. 2025, "Block verification accelerates speculative decoding", algorithm 2)
weighs whole prefixes: a prefix may be kept although one of its tokens alone would have been rejected. The text has
the target's distribution, and no other way that knows as much keeps more tokens of a draft on average
(theorems 1 and 2); token-by-token verification is never better.

It looks at the whole draft, and so two rules of token-by-token verification do not hold:

- The numbers of positions *behind* the last kept token have been used, and next time those positions are decided
  again. Numbers are therefore kept apart by where the block starts (``trial``), here and in a drafter: it must draw
  the token at ``position`` with ``Purpose.DRAFT`` and ``trial=`` the position of the draft's first token.
- How long the draft is must not depend on what was drawn in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.verify.acceptance import residual, sample
from outrider.verify.distribution import TokenDistribution
from outrider.verify.random_numbers import Purpose, uniform


def verify_block(
    targets: Sequence[TokenDistribution],
    draft_token_ids: Sequence[int],
    draft_probs: npt.NDArray[np.float64],
    seed: int,
    position: int,
) -> tuple[int, int | None]:
    """How many drafted tokens are kept, and the token recovered after them; None if all were kept.

    Args:
        targets: of each drafted token, what the target would have drawn it from, after the drafted ones before it.
        draft_token_ids: drawn from ``draft_probs``, and possible in them.
        draft_probs: ``[num_draft_tokens, vocab_size]``, each row summing to about 1.
        seed: the request's.
        position: of the first drafted token.
    """
    draft_probs = draft_probs / draft_probs.sum(axis=1, keepdims=True)
    shares = prefix_shares(targets, draft_token_ids, draft_probs)
    chances = acceptance_chances(targets, draft_probs, shares)
    num_draft_tokens = len(draft_token_ids)
    for num_kept in range(num_draft_tokens, 0, -1):  # the longest prefix that passes, whatever those within it say
        if uniform(seed, position + num_kept - 1, Purpose.ACCEPT, trial=position) < chances[num_kept]:
            break
    else:
        num_kept = 0
    if num_kept == num_draft_tokens:
        return num_kept, None
    missing = residual(targets[num_kept], draft_probs[num_kept], shares[num_kept])
    return num_kept, sample(missing, seed, position + num_kept, Purpose.RECOVER)


def prefix_shares(
    targets: Sequence[TokenDistribution], draft_token_ids: Sequence[int], draft_probs: npt.NDArray[np.float64]
) -> list[float]:
    """``p_i`` of the algorithm, ``[num_draft_tokens + 1]``: the part of each drafted prefix that the target covers."""
    shares = [1.0]
    for target, token_id, probs in zip(targets, draft_token_ids, draft_probs, strict=True):
        shares.append(min(1.0, shares[-1] * target.prob(token_id) / float(probs[token_id])))
    return shares


def acceptance_chances(
    targets: Sequence[TokenDistribution], draft_probs: npt.NDArray[np.float64], shares: Sequence[float]
) -> list[float]:
    """``h_i`` of the algorithm, ``[num_draft_tokens + 1]``: the chance of a prefix if no longer one is kept."""
    chances = []
    for target, probs, share in zip(targets, draft_probs, shares, strict=False):
        missing = float(np.maximum(share * target.probs - probs[target.token_ids], 0.0).sum())
        chances.append(missing / (missing + 1.0 - share) if share < 1.0 else 1.0)
    return [*chances, shares[-1]]
