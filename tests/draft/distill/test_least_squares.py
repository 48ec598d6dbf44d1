"""Where a head begins, beside numpy's least squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.distillation import head_shape
from outrider.draft.distill.least_squares import begin_with_fit, fit_hidden_states
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.unrolled import unroll

SETTINGS = DistillSettings()


def inputs_of(target: DenseTarget, conversation: Conversation) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows 1, 2, ... of a conversation: what the fit reads, and what it is to give."""
    rows = target.forward(torch.tensor([conversation.token_ids]))
    words = target.embedding[torch.tensor(conversation.token_ids[1:])]
    words = words / (words.square().mean(dim=1, keepdim=True) + target.config.rms_norm_eps).sqrt()
    return torch.cat([rows.features[0, :-1], words], dim=1), rows.hidden[0, 1:] / target.norm


def test_the_fit_is_the_ridge_regression_over_the_rows_that_count(
    target: DenseTarget, conversations: list[Conversation]
) -> None:
    pairs = [inputs_of(target, conversation) for conversation in conversations]
    counted = [place - 1 for place in range(1, 39) if place + 1 < 6 or 8 <= place + 1 < 40]
    inputs = np.concatenate([found[0][counted].numpy() for found in pairs]).astype(np.float64)
    wanted = np.concatenate([found[1][counted].numpy() for found in pairs]).astype(np.float64)
    ridge = np.diag(np.sqrt(0.003 * (inputs**2).sum(axis=0) + 1e-6))  # as rows of their own
    expected = np.linalg.lstsq(
        np.concatenate([inputs, ridge]), np.concatenate([wanted, np.zeros((len(ridge), wanted.shape[1]))]), rcond=None
    )[0].T
    found = fit_hidden_states(target, conversations, SETTINGS.batch_tokens).numpy()
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_begins_as_the_fit(num_layers: int, target: DenseTarget, conversations: list[Conversation]) -> None:
    # With as many values as hidden units nothing is left out; attention to other rows is what remains.
    settings = replace(SETTINGS, layers=num_layers, kv_heads=4)
    shape = head_shape(settings, target.config, 50)
    fit = fit_hidden_states(target, conversations, SETTINGS.batch_tokens)
    ready = begin_with_fit(shape, target, torch.arange(50), fit, seed=0).ready(torch.float32)
    for conversation in conversations[:4]:
        inputs, _ = inputs_of(target, conversation)
        tokens = torch.tensor([conversation.token_ids])
        features = target.forward(tokens).features
        (residual,) = unroll(ready, target.embedding[tokens], features, target.rotary(tokens.shape[1]), 1)
        likeness = torch.cosine_similarity(residual[0, 1:].detach(), inputs @ fit.T, dim=1)
        assert likeness.median() > 0.9
