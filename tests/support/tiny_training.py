"""Conversations of a tiny target, and a trainer for a head of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_model import byte_tokenizer

from outrider.draft.distill.batches import frequent_tokens, token_weights
from outrider.draft.distill.conversations import Conversation, Turn
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.distillation import head_shape
from outrider.draft.distill.least_squares import begin_with_fit, fit_hidden_states
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.trainer import Trainer

VOCAB_SIZE = byte_tokenizer().get_vocab_size()


def greedy_conversations(target: DenseTarget, number: int = 24) -> list[Conversation]:
    """The target's own greedy text after some random words, 40 tokens in all."""
    token_ids = torch.randint(3, VOCAB_SIZE, (number, 8), generator=torch.Generator().manual_seed(0))
    while token_ids.shape[1] < 40:
        logits = target.forward(token_ids).hidden[:, -1] @ target.head.T
        token_ids = torch.cat([token_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    turns = (Turn(1, 6, False, 0.8), Turn(8, 40, True, 0.0))
    return [Conversation(index, tuple(row), turns) for index, row in enumerate(token_ids.tolist())]


def make_trainer(
    target: DenseTarget,
    conversations: Sequence[Conversation],
    path: Path,
    settings: DistillSettings,
    save_seconds: float = 0.0,
) -> Trainer:
    """One as a run makes it, that goes on from ``path``."""
    token_map = frequent_tokens(token_weights(conversations), settings.draft_vocab, VOCAB_SIZE, always=[2])
    shape = head_shape(settings, target.config, len(token_map))
    fit = fit_hidden_states(target, conversations, settings.batch_tokens)
    head = begin_with_fit(shape, target, token_map, fit, settings.seed)
    return Trainer(head, target, token_map, settings, 60.0, path, save_seconds)
