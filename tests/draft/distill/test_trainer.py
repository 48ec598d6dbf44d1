"""Training a head: that it learns, and that a kill costs it nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import byte_tokenizer, save_tiny_model, tiny_llama_config

from outrider.draft.distill.batches import frequent_tokens, token_weights
from outrider.draft.distill.conversations import Conversation, Turn
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.head import HeadShape, begin_from_target
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.trainer import Trainer, TrainingDiverged
from outrider.draft.distill.unrolled import unroll
from outrider.verify.checkpoint.checkpoint import open_checkpoint

SETTINGS = DistillSettings(tokens=1, epochs=4, draft_vocab=128, batch_tokens=128, seed=1)
VOCAB_SIZE = byte_tokenizer().get_vocab_size()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DenseTarget:
    config = tiny_llama_config(num_hidden_layers=4, initializer_range=0.07)
    path = save_tiny_model(tmp_path_factory.mktemp("target"), config)
    return DenseTarget(open_checkpoint(path), torch.float32, torch.device("cpu"), max_length=64)


@pytest.fixture(scope="module")
def conversations(target: DenseTarget) -> list[Conversation]:
    """The target's own greedy text after some random words."""
    token_ids = torch.randint(3, VOCAB_SIZE, (24, 8), generator=torch.Generator().manual_seed(0))
    while token_ids.shape[1] < 40:
        logits = target.forward(token_ids).hidden[:, -1] @ target.head.T
        token_ids = torch.cat([token_ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    turns = (Turn(1, 6, False, 0.8), Turn(8, 40, True, 0.0))
    return [Conversation(index, tuple(row), turns) for index, row in enumerate(token_ids.tolist())]


def make_trainer(
    target: DenseTarget,
    conversations: Sequence[Conversation],
    path: Path,
    settings: DistillSettings = SETTINGS,
    save_seconds: float = 0.0,
) -> Trainer:
    config = target.config
    token_map = frequent_tokens(token_weights(conversations), settings.draft_vocab, VOCAB_SIZE, always=[2])
    heads = (config.num_heads, settings.kv_heads or config.num_kv_heads, config.head_dim)
    width = settings.intermediate or config.intermediate_size
    shape = HeadShape(config.hidden_size, width, settings.layers, *heads, len(token_map), config.rms_norm_eps)
    head = begin_from_target(shape, target, token_map, settings.seed)
    return Trainer(head, target, token_map, settings, 60.0, path, save_seconds)


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, layers=2, directness=0.5),
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
    assert after[0] > max(0.5, before[0] + 0.1)
    losses = [point.loss for point in trainer.progress.points if point.loss is not None]
    assert losses[-1] < 0.7 * losses[0]


class Killed(Exception):
    pass


def test_a_killed_training_ends_with_the_bits_of_one_that_was_not(
    target: DenseTarget, conversations: list[Conversation], tmp_path: Path
) -> None:
    whole = make_trainer(target, conversations, tmp_path / "whole")
    whole.run(conversations, conversations[:4], lambda _: None)

    def kill(progress: Progress) -> None:
        if trainer.progress.step % 9 == 0:
            raise Killed

    while True:
        trainer = make_trainer(target, conversations, tmp_path / "killed")
        try:
            trainer.run(conversations, conversations[:4], kill if trainer.progress.step < 20 else lambda _: None)
        except Killed:
            continue
        break
    assert trainer.progress.step == whole.progress.step > 27
    assert trainer.progress.num_tokens == whole.progress.num_tokens
    for name, weight in whole.head.weights.items():
        assert torch.equal(weight, trainer.head.weights[name]), name
    final = make_trainer(target, conversations, tmp_path / "killed")
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
    trainer = make_trainer(target, conversations, tmp_path / "state")
    with torch.no_grad():
        trainer.head.weights["norm.weight"].fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="learning rate lower"):
        trainer.run(conversations, conversations[:4], lambda _: None)
    assert not (tmp_path / "state").exists(), "what is no number is not kept"
