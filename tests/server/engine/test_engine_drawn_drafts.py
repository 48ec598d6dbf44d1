"""Drafts with probabilities on their way to the sampler."""

from __future__ import annotations

import numpy as np
import torch
from chance import FALSE_ALARM, chi_square_p_value

from outrider.draft.base import Draft
from outrider.server.engine.drafting import usable
from outrider.verify.acceptance import choose_by_match, choose_by_rejection
from outrider.verify.distribution import TokenDistribution


def test_a_drawn_draft_is_not_cut_by_what_was_drawn() -> None:
    probs = torch.full((3, 8), 1 / 8)
    drawn = usable(Draft((5, 6, 7), probs, (0.9, 0.5, 0.1), "model"), 2, vocab_size=8)
    assert drawn.token_ids == (5, 6)
    assert drawn.confidences == ()
    assert drawn.draft_probs is not None
    assert drawn.draft_probs.shape == (2, 8)
    assert usable(Draft((5, 6, 7), None, (0.9, 0.5, 0.1), "model"), 2, vocab_size=8).confidences == (0.9, 0.5)


def test_such_a_cut_would_show_in_the_text() -> None:
    # Dropping the guesses that the drafter itself finds unlikely, and drawing from the target in their place.
    target, drafter = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])
    guesses = np.random.default_rng(0).choice(3, size=10_000, p=drafter)
    row = TokenDistribution(np.arange(3), target)
    kept = [choose_by_rejection(row, [int(guess)], drafter[None], seed, 0) for seed, guess in enumerate(guesses)]
    assert chi_square_p_value([choice.token_id for choice in kept], target) > FALSE_ALARM
    cut = [
        choice if drafter[guess] > 0.4 else choose_by_match(row, None, seed, 0)
        for seed, (guess, choice) in enumerate(zip(guesses, kept, strict=True))
    ]
    assert chi_square_p_value([choice.token_id for choice in cut], target) < FALSE_ALARM
