"""Training a head: that it learns, and that a kill costs it nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_training import make_trainer

from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.trainer import TrainingDiverged
from outrider.draft.distill.training_state import CurvePoint
from outrider.draft.distill.unrolled import unroll

SETTINGS = DistillSettings(tokens=1, epochs=4, draft_vocab=128, batch_tokens=128, seed=1)


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, layers=2, directness=0.8),
        replace(SETTINGS, kv_heads=4, intermediate=70),
        replace(SETTINGS, kv_heads=1, intermediate=130, unroll=1),
    ],
    ids=["one layer", "two layers, direct loss", "more KV heads, narrower", "fewer KV heads, wider"],
)
def test_guesses_become_what_the_target_says(
    settings: DistillSettings, target: DenseTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    trainer = make_trainer(
        target, conversations, tmp_path / "state", replace(settings, epochs=15, learning_rate=5e-3), 60.0
    )
    before = trainer.held_out_acceptance(conversations)
    trainer.run(conversations, conversations[:4], lambda _: None)
    after = trainer.held_out_acceptance(conversations)
    lengths = [CurvePoint(0, 0.0, 0.0, None, accepted).acceptance_length for accepted in (before, after)]
    assert lengths[1] > lengths[0] + 0.15
    assert after[0] > 0.5
    losses = [point.loss for point in trainer.progress.points if point.loss is not None]
    quarter = len(losses) // 4
    assert sum(losses[-quarter:]) < sum(losses[:quarter])


class Killed(Exception):
    pass


def test_a_killed_training_ends_with_the_bits_of_one_that_was_not(
    target: DenseTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    whole = make_trainer(target, conversations, tmp_path / "whole", SETTINGS)
    whole.run(conversations, conversations[:4], lambda _: None)

    def kill(progress: Progress) -> None:
        if trainer.progress.step % 9 == 0:
            raise Killed

    while True:
        trainer = make_trainer(target, conversations, tmp_path / "killed", SETTINGS)
        try:
            trainer.run(conversations, conversations[:4], kill if trainer.progress.step < 20 else lambda _: None)
        except Killed:
            continue
        break
    assert trainer.progress.step == whole.progress.step > 27
    assert trainer.progress.num_tokens == whole.progress.num_tokens
    for name, weight in whole.head.weights.items():
        assert torch.equal(weight, trainer.head.weights[name]), name
    final = make_trainer(target, conversations, tmp_path / "killed", SETTINGS)
    assert final.progress.is_done and torch.equal(final.head.weights["fc.weight"], whole.head.weights["fc.weight"])
    held_out = [point for point in whole.progress.points if point.loss is None]
    assert len(held_out) == 5 and held_out[-1].done == 1.0


def test_acceptance_counts_whole_chains_of_the_likeliest_tokens(
    target: DenseTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    # The oracle drafts chain by chain, and begins each on true rows alone.
    trainer = make_trainer(target, conversations, tmp_path / "state", replace(SETTINGS, epochs=10), save_seconds=60.0)
    trainer.run(conversations, conversations[:4], lambda _: None)
    found = trainer.held_out_acceptance(conversations[:3])

    reached, right = [0] * 6, [0] * 6
    ready = trainer.head.ready(torch.float32)
    for conversation in conversations[:3]:
        tokens = torch.tensor([conversation.token_ids])
        features = target.forward(tokens).features
        embeddings = torch.nn.functional.embedding(tokens, target.embedding)
        guesses = [
            trainer.token_map[ready.logits(residual[0]).argmax(dim=-1)].tolist()
            for residual in unroll(ready, embeddings, features, target.rotary(40), 6)
        ]
        for begin in range(7, 39):
            for step in range(min(6, 39 - begin)):
                reached[step] += 1
                if guesses[step][begin + step] != conversation.token_ids[begin + step + 1]:
                    break
                right[step] += 1
    assert found == tuple(hit / max(of, 1) for hit, of in zip(right, reached, strict=True))


def test_a_loss_that_is_no_number_ends_training_with_a_sentence(
    target: DenseTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    trainer = make_trainer(target, conversations, tmp_path / "state", SETTINGS)
    with torch.no_grad():
        trainer.head.weights["norm.weight"].fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="learning rate lower"):
        trainer.run(conversations, conversations[:4], lambda _: None)
    assert not (tmp_path / "state").exists(), "what is no number is not kept"
