"""A head conditioned on the target guesses what its formulas say, whatever the engine did before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import greedy, make_engine, run, run_one
from random_speculator import RandomSpeculator, layer_config
from tiny_model import save_tiny_model, tiny_llama_config
from transformers import AutoModelForCausalLM

from outrider.draft.base import Draft, DraftRequest
from outrider.draft.model import ModelDrafter
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all words": {"draft_vocab_size": 259},
    "residual after its norm": {"norm_before_residual": True},
    "norm over all taps": {"fusion_norm": "all"},
    "norm over each tap": {"fusion_norm": "each", "norm_before_residual": True},
    "own embedding": {"own_embedding": True},
    "two layers": {"layers": layer_config(num_layers=2)},
    "norms of heads": {"layers": layer_config(architecture="qwen3", qk_norm=True)},
    "biases": {"layers": layer_config(attention_bias=True, attention_output_bias=True, mlp_bias=True)},
    "two taps": {"taps": (3, 1)},
    "another size": {
        "layers": layer_config(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16),
        "own_embedding": True,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), tiny_llama_config(num_hidden_layers=5))


@pytest.fixture(scope="module")
def hugging_face(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()


class Recorded:
    """Notes each draft with the tokens before it."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._drafter = drafter
        self._tokens: dict[int, list[int]] = {}
        self.drafts: list[tuple[list[int], Draft]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def begin(self, sequence_id: int, token_ids: list[int]) -> None:
        self._tokens[sequence_id] = list(token_ids)

    def extend(self, sequence_id: int, token_ids: list[int]) -> None:
        self._tokens[sequence_id] += token_ids

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = self._drafter.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self.drafts.append((list(self._tokens[request.sequence_id]), draft))
        return drafts


def recorded(engine: Any) -> Recorded:
    recorder = Recorded(engine._drafter._drafter._model)
    engine._drafter._drafter = recorder
    return recorder


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def features(hugging_face: Any, token_ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        states = hugging_face(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in taps], dim=-1)


def assert_as_computed(
    recorder: Recorded, head: RandomSpeculator, hugging_face: Any, unknown: tuple[int, ...] = ()
) -> None:
    embedding = hugging_face.get_input_embeddings().weight.detach()
    assert head.config.taps is not None
    for token_ids, draft in recorder.drafts:
        before = features(hugging_face, token_ids[:-1], head.config.taps)
        guesses, chances = head.chain(token_ids, before, embedding, len(draft.token_ids), unknown)
        assert draft.token_ids == tuple(guesses)
        assert draft.confidences == pytest.approx(chances, rel=1e-3)
        assert draft.source == "model"


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("kind", HEADS)
def test_guesses_are_those_of_the_formulas(
    target: Path, hugging_face: Any, tmp_path: Path, kind: str, kernels: str
) -> None:
    head = RandomSpeculator.make(seed=3, **HEADS[kind])
    engine = make_engine(
        target,
        drafter="model",
        draft_model_path=str(head.save(tmp_path / "draft")),
        draft_quantize="none",
        kv_cache_dtype="f32",
        kernels=kernels,
        max_draft_tokens=4,
    )
    recorder = recorded(engine)
    run_one(engine, greedy(prompt(1, 20), max_tokens=12, ignore_eos=True))
    assert len(recorder.drafts) >= 8
    assert_as_computed(recorder, head, hugging_face)


def test_guesses_are_the_same_in_batches_and_chunks(target: Path, hugging_face: Any, tmp_path: Path) -> None:
    head = RandomSpeculator.make(seed=4)
    path = str(head.save(tmp_path / "draft"))
    engine = make_engine(
        target,
        drafter="model",
        draft_model_path=path,
        kernels="reference",
        max_step_tokens=16,
        max_running=4,
        page_size=5,
    )
    recorder = recorded(engine)
    run(engine, [greedy(prompt(seed, 9 + 7 * seed), str(seed), 12, ignore_eos=True) for seed in range(6)])
    assert_as_computed(recorder, head, hugging_face)
    assert len(recorder.drafts) >= 30


def test_after_a_prefix_hit_only_the_first_row_lacks_its_feature(
    target: Path, hugging_face: Any, tmp_path: Path
) -> None:
    head = RandomSpeculator.make(seed=7)
    path = str(head.save(tmp_path / "draft"))
    engine = make_engine(target, drafter="model", draft_model_path=path, kernels="reference", page_size=8)
    first = greedy(prompt(2, 30), "first", 12, ignore_eos=True)
    run_one(engine, first)
    recorder = recorded(engine)
    answer = run_one(engine, greedy([*first.prompt_token_ids[:28], 5, 6, 7], max_tokens=10, ignore_eos=True))
    assert answer.num_cached_tokens == 24
    assert len(recorder.drafts) >= 5
    assert_as_computed(recorder, head, hugging_face, unknown=(24,))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_hidden_size": 64}, "hidden size 64"),
        ({"taps": (1, 2, 6)}, "this target has 5 layers"),
        ({"layers": layer_config(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16)}, "has no embed_tokens"),
    ],
)
def test_a_head_for_another_target_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = RandomSpeculator.make(seed=5, **changes).save(tmp_path / "draft")
    with pytest.raises(UnsupportedCheckpoint, match=problem):
        make_engine(target, drafter="model", draft_model_path=str(path), kernels="reference")
