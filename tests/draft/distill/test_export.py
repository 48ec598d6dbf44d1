"""What is trained is what is drafted: the engine's chains are those that training foresaw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import greedy, make_engine
from tiny_training import make_trainer

from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.distillation import TrainedHead
from outrider.draft.distill.export import write_draft
from outrider.draft.distill.head import DraftHead
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.unrolled import unroll

CHAIN = 4
SETTINGS = DistillSettings(tokens=1, epochs=6, draft_vocab=128, batch_tokens=128)


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, layers=2, kv_heads=4, intermediate=70)])
def test_the_engine_accepts_what_unrolling_foresees(
    settings: DistillSettings,
    target: DenseTarget,
    target_path: Path,
    conversations: list[Conversation],
    tmp_path: Path,
) -> None:
    trainer = make_trainer(target, conversations, tmp_path / "state", settings, save_seconds=60.0)
    trainer.run(conversations, conversations[:2], lambda _: None)
    weights = {name: weight.detach().bfloat16().float() for name, weight in trainer.head.weights.items()}
    trained = TrainedHead(trainer.head.shape, weights, trainer.token_map, 1.0, target.taps, trainer.progress)
    write_draft(tmp_path / "draft", trained, target.config, "tiny", CHAIN)

    engine = make_engine(
        target_path,
        "model",
        draft_model_path=str(tmp_path / "draft"),
        adaptive_drafts=False,
        max_draft_tokens=CHAIN,
        kernels="reference",
    )
    ready, num_foreseen, num_accepted = DraftHead(trainer.head.shape, weights).ready(torch.float32), 0, 0
    for conversation in conversations[:3]:
        prompt, steps = conversation.token_ids[:8], []  # steps: tokens known before it, drafted, accepted
        tokens = list(prompt)
        engine.add_request(greedy(prompt, max_tokens=30))
        while engine.has_work:
            for output in engine.step():
                steps.append((len(tokens), output.num_draft_tokens, output.num_accepted))
                tokens += output.token_ids
        row = torch.tensor([tokens])
        chains = unroll(ready, target.embedding[row], target.forward(row).features, target.rotary(len(tokens)), CHAIN)
        guesses = [trainer.token_map[ready.logits(each[0]).argmax(dim=-1)].tolist() for each in chains]
        for num_known, num_drafted, accepted in steps[1:]:
            begin = num_known - 1
            right = [guesses[step][begin + step] == tokens[num_known + step] for step in range(num_drafted)]
            foreseen = next((step for step, is_right in enumerate(right) if not is_right), num_drafted)
            num_foreseen += foreseen
            num_accepted += accepted
            assert foreseen == accepted, f"after {num_known} tokens"
    assert num_accepted == num_foreseen > 10
