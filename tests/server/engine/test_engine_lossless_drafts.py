"""With a draft model, alone or in a hybrid, answers and the logits behind them are the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answer, greedy, make_engine, run, run_one, sampled
from logit_tap import LogitTap
from random_speculator import RandomSpeculator
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_model, tiny_llama_config

from outrider.server.engine.cost_table import CostTable, Curve

MAX_TOKENS = 24
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
KERNELS: dict[str, dict[str, Any]] = {
    "cpu": {"kernels": "cpu"},
    "cpu, int8 weights and cache": {"kernels": "cpu", "quantize": "int8", "kv_cache_dtype": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {
    "drafts of 8, alone": {"max_draft_tokens": 8, "max_running": 1},
    "drafts of 1, batches of 4, chunks of 512": {"max_draft_tokens": 1, "max_running": 4, "max_step_tokens": 512},
    "drafts of 8, batches of 8, chunks of 24": {"max_draft_tokens": 8, "max_running": 8, "max_step_tokens": 24},
    "1 thread, pages of 5, drafts of 3": {"num_threads": 1, "page_size": 5, "max_draft_tokens": 3},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "head": {"drafter": "model", "draft": "head"},
    "model": {"drafter": "model", "draft": "model"},
    "head in a hybrid": {"drafter": "hybrid", "draft": "head"},
    "model in a hybrid": {"drafter": "hybrid", "draft": "model"},
}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]


@dataclass(frozen=True)
class Plain:
    """One model on some kernels, its own answers (one request at a time, a token a step), and drafts for it."""

    path: Path
    drafts: dict[str, str]
    settings: dict[str, Any]
    greedy: list[list[int]]
    sampled: list[list[int]]
    logits: LogitTap

    def engine(self, drafter: str, cost_table: CostTable | None = None, **changes: Any) -> Any:
        chosen = DRAFTERS[drafter]
        settings = {**self.settings, **changes, "drafter": chosen["drafter"]}
        return make_engine(self.path, cost_table=cost_table, draft_model_path=self.drafts[chosen["draft"]], **settings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), tiny_llama_config(num_hidden_layers=3))


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    # The same weights but for the noise that makes it another model, so it is right now and then.
    other = save_tiny_model(folder / "model", tiny_llama_config(num_hidden_layers=3), seed=0)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(noisy, other / "model.safetensors", {"format": "pt"})
    head = RandomSpeculator.make(seed=8).save(folder / "head")
    return {"model": str(other), "head": str(head)}


@pytest.fixture(scope="module", params=KERNELS)
def plain(request: pytest.FixtureRequest, target: Path, drafts: dict[str, str]) -> Plain:
    return make_plain(target, drafts, KERNELS[request.param])


def make_plain(target: Path, drafts: dict[str, str], settings: dict[str, Any]) -> Plain:
    engine = make_engine(target, drafter="none", **settings)
    tap = LogitTap(engine)
    answers = [
        [run_one(engine, question).token_ids for question in questions]
        for questions in (greedy_requests(), sampled_requests())
    ]
    return Plain(target, drafts, settings, *answers, tap)


def greedy_requests(indices: Sequence[int] = range(8), **params: Any) -> list[Any]:
    return [greedy(PROMPTS[i], str(i), MAX_TOKENS, **params) for i in indices]


def sampled_requests(indices: Sequence[int] = range(8)) -> list[Any]:
    return [sampled(PROMPTS[i], f"sampled {i}", 16, seed=i, **SAMPLING) for i in indices]


def assert_plain(answers: dict[str, Answer], plain: Plain, tap: LogitTap) -> None:
    for index, expected in enumerate(plain.greedy):
        assert answers[str(index)].token_ids == expected
    for index, expected in enumerate(plain.sampled):
        assert answers[f"sampled {index}"].token_ids == expected
    tap.assert_same(plain.logits)


def joining() -> dict[int, list[Any]]:
    """They join two steps apart and leave when done, so the batch changes all the time."""
    return {2 * i: list(both) for i, both in enumerate(zip(greedy_requests(), sampled_requests(), strict=True))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_draft_model_changes_a_bit_in_any_way_nor_after_prefix_hits(plain: Plain, drafter: str, way: str) -> None:
    engine = plain.engine(drafter, **WAYS[way])
    tap = LogitTap(engine)
    for _ in range(2):  # the second time with prefixes
        answers = run(engine, [], joining())
        assert_plain(answers, plain, tap)
        assert sum(answer.num_draft_tokens for answer in answers.values()) > 50
    assert engine.stats.prefix_hits > 0
    if drafter != "head":
        assert sum(answer.num_accepted for answer in answers.values()) > 20, "no draft was ever accepted: vacuous"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nor_on_the_reference_kernels(target: Path, drafts: dict[str, str], drafter: str) -> None:
    plain = make_plain(target, drafts, {"kernels": "reference", "num_threads": 1})
    engine = plain.engine(drafter, max_running=16, max_step_tokens=48, max_draft_tokens=4)
    tap = LogitTap(engine)
    answers = run(engine, [], joining())
    assert_plain(answers, plain, tap)
    assert sum(answer.num_draft_tokens for answer in answers.values()) > 50


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_draft_model_changes_a_bit_under_a_controller(plain: Plain, drafter: str) -> None:
    """Lengths then depend on how long things take, and differ from run to run."""
    table = CostTable(
        forward=Curve((1, 16, 64), (10.0, 14.0, 30.0)),
        logits=Curve((1, 16), (1.0, 3.0)),
        attention=Curve((0,), (0.0,)),
        chunk_attention=Curve((0,), (0.0,)),
        chunk_rows=16,
        draft_step=Curve((1, 8), (0.5, 1.0)),
    )
    engine = plain.engine(drafter, table, max_running=4)
    tap = LogitTap(engine)
    answers = run(engine, [], joining())
    assert_plain(answers, plain, tap)
    assert sum(answer.num_draft_tokens for answer in answers.values()) > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption_changes_no_bit(plain: Plain, drafter: str) -> None:
    # About as many sequences as there are pages, and most begin before the first needs a second page.
    settings = {"page_size": 128, "max_step_tokens": 1024, "max_context": 512, "max_draft_tokens": 2}
    engine = plain.engine(drafter, kv_cache_mib=1, max_running=40, **settings)
    tap = LogitTap(engine)
    questions = [greedy(prompt(seed, 112 - seed % 7), str(seed), 32, ignore_eos=True) for seed in range(24)]
    answers = run(engine, questions)
    assert engine.stats.num_preemptions > 0, f"the pool was never short: vacuous: {engine.stats}"
    assert sum(answer.num_draft_tokens for answer in answers.values()) > 0
    roomy = make_engine(plain.path, drafter="none", **plain.settings, **settings, max_running=40)
    roomy_tap = LogitTap(roomy)
    expected = run(roomy, questions)
    assert {i: a.token_ids for i, a in answers.items()} == {i: a.token_ids for i, a in expected.items()}
    tap.assert_same(roomy_tap)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cancelled_request_leaves_the_others_as_they_are(plain: Plain, drafter: str) -> None:
    engine = plain.engine(drafter, max_running=3, max_step_tokens=24)
    tap = LogitTap(engine)
    questions = [*greedy_requests(), *sampled_requests()]
    for question in questions:
        engine.add_request(question)
        engine.add_request(greedy(question.prompt_token_ids, f"cancelled {question.request_id}", MAX_TOKENS))
    answers: dict[str, list[int]] = {question.request_id: [] for question in questions}
    number = 0
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        if number % 3 == 0:
            engine.cancel(f"cancelled {questions[number // 3 % len(questions)].request_id}")
        engine.check_integrity()
        number += 1
    engine.rest()
    engine.check_integrity()
    assert [answers[str(i)] for i in range(8)] == plain.greedy
    assert [answers[f"sampled {i}"] for i in range(8)] == plain.sampled
    tap.assert_same(plain.logits)
