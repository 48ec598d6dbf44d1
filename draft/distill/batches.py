"""Conversations as the rows of training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.draft.distill.conversations import Conversation

QUESTION_WEIGHT = 0.15
"""Of a row that predicts a word of a question, beside 1 for one of an answer: questions are never drafted for, but the
target wrote them too, and there are more of them than room to learn by heart."""

HELD_OUT_EVERY = 20
_LENGTH_NOISE = 20  # tokens: in each epoch, conversations of nearly one length meet others


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded at their ends.

    ``weights``: what it counts that row ``r`` predicts token ``r + 1`` well. ``is_greedy``: whether token ``r + 1``
    is the target's likeliest, because the answer was generated at temperature 0.
    """

    token_ids: Tensor  # [num_seqs, length] int64
    weights: Tensor  # [num_seqs, length] float32
    is_greedy: Tensor  # [num_seqs, length] bool

    @property
    def num_tokens(self) -> int:
        """Tokens whose next one is to be predicted."""
        return int((self.weights > 0).sum())


def split(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Those to learn from, and those held out: every twentieth, or the last of fewer."""
    held_out = list(conversations[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]) or list(conversations[-1:])
    excluded = {conversation.index for conversation in held_out}
    return [conversation for conversation in conversations if conversation.index not in excluded], held_out


def token_weights(conversations: Iterable[Conversation]) -> dict[int, float]:
    """How much each token that the target wrote counts in training."""
    weights: dict[int, float] = {}
    for conversation in conversations:
        for turn in conversation.turns:
            weight = 1.0 if turn.is_answer else QUESTION_WEIGHT
            for token_id in conversation.token_ids[turn.start : turn.stop]:
                weights[token_id] = weights.get(token_id, 0.0) + weight
    return weights


def frequent_tokens(weights: Mapping[int, float], num_tokens: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The ``num_tokens`` heaviest of ``vocab_size`` tokens, of equals the lower ids, ``always`` among them.

    Ascending, int64. Where too few are known, the lowest other ids fill up: a tokenizer learns frequent words first.
    """
    ranked = sorted(range(vocab_size), key=lambda token_id: (-weights.get(token_id, 0.0), token_id))
    kept = dict.fromkeys([*always, *ranked])
    return torch.tensor(sorted([*kept][:num_tokens]), dtype=torch.int64)


def plan_epoch(conversations: Sequence[Conversation], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The conversations of each step, by their place: all of them once, those of similar length together.

    A batch holds at most ``batch_tokens`` rows with its padding, unless a single conversation is longer.
    """
    draw = np.random.default_rng([seed, epoch])
    lengths = np.array([len(conversation.token_ids) for conversation in conversations])
    noisy = lengths + draw.uniform(0, _LENGTH_NOISE, len(lengths))
    batches: list[list[int]] = []
    longest = 0
    for place in np.argsort(noisy, kind="stable").tolist():
        longest = max(longest, int(lengths[place]))
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = int(lengths[place])
        batches[-1].append(place)
    draw.shuffle(batches)
    return batches


def make_batch(conversations: Sequence[Conversation], device: torch.device) -> Batch:
    """Pad ``conversations`` to one length and say what their rows count."""
    longest = max(len(conversation.token_ids) for conversation in conversations)
    shape = (len(conversations), longest)
    token_ids = torch.zeros(shape, dtype=torch.int64)
    weights = torch.zeros(shape)
    is_greedy = torch.zeros(shape, dtype=torch.bool)
    for row, conversation in enumerate(conversations):
        token_ids[row, : len(conversation.token_ids)] = torch.tensor(conversation.token_ids)
        for turn in conversation.turns:
            predicting = slice(turn.start - 1, turn.stop - 1)
            weights[row, predicting] = 1.0 if turn.is_answer else QUESTION_WEIGHT
            is_greedy[row, predicting] = turn.is_answer and turn.temperature == 0.0
    return Batch(token_ids.to(device), weights.to(device), is_greedy.to(device))
