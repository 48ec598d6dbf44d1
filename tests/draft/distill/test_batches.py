"""Conversations as rows: what is predicted, what it counts, and which words a draft gets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from outrider.draft.distill.batches import (
    QUESTION_WEIGHT,
    frequent_tokens,
    make_batch,
    plan_epoch,
    split,
    token_weights,
)
from outrider.draft.distill.conversations import Conversation, Turn

CPU = torch.device("cpu")


def conversation(index: int, length: int = 12, temperature: float = 0.0) -> Conversation:
    """Template up to 2, a question up to 5, template up to 7, an answer to the end."""
    tokens = np.random.default_rng(index).zipf(1.6, length).clip(max=50).tolist()
    return Conversation(index, tuple(tokens), (Turn(2, 5, False, 0.8), Turn(7, length, True, temperature)))


def test_a_row_counts_as_what_it_predicts_counts() -> None:
    batch = make_batch([conversation(0, 12), conversation(1, 9, temperature=0.7)], CPU)
    for row, (length, is_greedy) in enumerate([(12, True), (9, False)]):
        expected = conversation(row, length).token_ids
        assert batch.token_ids[row].tolist() == [*expected, *[0] * (12 - length)]
        for place in range(12):
            in_answer, in_question = 7 <= place + 1 < length, 2 <= place + 1 < 5
            weight = 1.0 if in_answer else QUESTION_WEIGHT if in_question else 0.0
            assert batch.weights[row, place].item() == pytest.approx(weight)
            assert batch.is_greedy[row, place].item() == (in_answer and is_greedy)
    assert batch.num_tokens == 5 + 3 + 2 + 3


@pytest.mark.parametrize("batch_tokens", [16, 100, 1000])
def test_an_epoch_takes_each_conversation_once_in_batches_that_fit(batch_tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(8, 60, 50)
    conversations = [conversation(index, int(length)) for index, length in enumerate(lengths)]
    batches = plan_epoch(conversations, batch_tokens, seed=3, epoch=1)
    assert sorted(place for batch in batches for place in batch) == list(range(50))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= batch_tokens
    assert plan_epoch(conversations, batch_tokens, seed=3, epoch=1) == batches
    assert plan_epoch(conversations, batch_tokens, seed=3, epoch=2) != batches
    assert plan_epoch(conversations, batch_tokens, seed=4, epoch=1) != batches


@pytest.mark.parametrize("count", [2, 19, 20, 100])
def test_what_is_held_out_is_not_learned_from(count: int) -> None:
    conversations = [conversation(index) for index in range(count)]
    learned, held_out = split(conversations)
    assert len(held_out) == max(count // 20, 1)
    assert sorted([*learned, *held_out], key=lambda each: each.index) == conversations
    assert learned


@pytest.mark.parametrize("num_tokens", [3, 10, 60, 1000])
def test_a_draft_gets_the_words_that_come_most_often(num_tokens: int) -> None:
    conversations = [conversation(index, 40) for index in range(20)]
    counts: Counter[int] = Counter()
    for each in conversations:
        counts.update(each.token_ids[7:] * 100)
        counts.update(each.token_ids[2:5] * round(100 * QUESTION_WEIGHT))
    weights = token_weights(conversations)
    assert {token: round(100 * weight) for token, weight in weights.items()} == counts
    found = frequent_tokens(weights, num_tokens, vocab_size=70, always=[60, 61]).tolist()
    assert found == sorted(set(found)) and len(found) == min(num_tokens, 70) and {60, 61} <= set(found)
    others = [token for token in found if token not in (60, 61)]
    left_out = set(range(60)) - set(others)
    assert min(counts[token] for token in others) >= max((counts[token] for token in left_out), default=0)
