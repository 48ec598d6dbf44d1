"""Answers, and every bit of the logits behind them, are the model's own, whatever the engine does to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answer, greedy, make_engine, run, run_one, sampled
from logit_tap import LogitTap
from tiny_model import save_tiny_model, tiny_llama_config
from transformers import AutoModelForCausalLM

MAX_TOKENS = 40
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
KERNELS: dict[str, dict[str, Any]] = {
    "reference": {"kernels": "reference"},
    "cpu": {"kernels": "cpu"},
    "cpu, int8 weights": {"kernels": "cpu", "quantize": "int8"},
    "cpu, int4 weights, int8 cache": {"kernels": "cpu", "quantize": "int4", "kv_cache_dtype": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {
    "drafts of 8, alone": {"max_draft_tokens": 8, "max_running": 1},
    "no drafts, batches of 8, chunks of 16": {"max_draft_tokens": 0, "max_running": 8, "max_step_tokens": 16},
    "drafts of 1, batches of 4, chunks of 512": {"max_draft_tokens": 1, "max_running": 4, "max_step_tokens": 512},
    "drafts of 8, batches of 16, chunks of 24": {"max_draft_tokens": 8, "max_running": 16, "max_step_tokens": 24},
    "1 thread, pages of 5": {"num_threads": 1, "page_size": 5},
    "3 threads, pages of 64, drafts of 3": {"num_threads": 3, "page_size": 64, "max_draft_tokens": 3},
}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]


@pytest.fixture(scope="module")
def whole_groups_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the tiny model, but of sizes that 4-bit weights can have: whole groups of 32."""
    config = tiny_llama_config(hidden_size=64, head_dim=16, intermediate_size=160)
    return save_tiny_model(tmp_path_factory.mktemp("whole_groups_model"), config)


@dataclass(frozen=True)
class Plain:
    """One model on some kernels, and its own answers: one request at a time, a token a step."""

    path: Path
    settings: dict[str, Any]
    greedy: list[list[int]]
    sampled: list[list[int]]
    logits: LogitTap

    def engine(self, **changes: Any) -> Any:
        return make_engine(self.path, **{**self.settings, **changes})


@pytest.fixture(scope="module", params=KERNELS)
def plain(request: pytest.FixtureRequest, tiny_model: Path, whole_groups_model: Path) -> Plain:
    path = whole_groups_model if "quantize" in KERNELS[request.param] else tiny_model
    engine = make_engine(path, drafter="none", **KERNELS[request.param])
    tap = LogitTap(engine)
    answers = [
        [run_one(engine, question).token_ids for question in questions]
        for questions in (greedy_requests(), sampled_requests())
    ]
    return Plain(path, KERNELS[request.param], *answers, tap)


def greedy_requests(indices: Sequence[int] = range(8), **params: Any) -> list[Any]:
    return [greedy(PROMPTS[i], str(i), MAX_TOKENS, **params) for i in indices]


def sampled_requests(indices: Sequence[int] = range(8)) -> list[Any]:
    return [sampled(PROMPTS[i], f"sampled {i}", 24, seed=i, **SAMPLING) for i in indices]


def assert_plain(answers: dict[str, Answer], plain: Plain, tap: LogitTap) -> None:
    for index, expected in enumerate(plain.greedy):
        assert answers[str(index)].token_ids == expected
    for index, expected in enumerate(plain.sampled):
        if f"sampled {index}" in answers:
            assert answers[f"sampled {index}"].token_ids == expected
    tap.assert_same(plain.logits)


@pytest.mark.parametrize("kernels", [KERNELS["reference"], {"kernels": "cpu", "kv_cache_dtype": "f32"}], ids=str)
def test_answers_in_float32_equal_hugging_faces(tiny_model: Path, kernels: dict[str, Any]) -> None:
    hugging_face = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    answers = run(make_engine(tiny_model, **kernels), greedy_requests())
    for index, token_ids in enumerate(PROMPTS):
        with torch.no_grad():
            expected = hugging_face.generate(
                torch.tensor([token_ids]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        assert answers[str(index)].token_ids == expected[0, len(token_ids) :].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_be_faster_changes_a_bit(plain: Plain, way: str) -> None:
    engine = plain.engine(**WAYS[way])
    tap = LogitTap(engine)
    # They join two steps apart and leave when done, so the batch changes all the time.
    joining = {2 * i: list(both) for i, both in enumerate(zip(greedy_requests(), sampled_requests(), strict=True))}
    answers = run(engine, [], joining)
    assert_plain(answers, plain, tap)
    assert tap.bits.keys() >= plain.logits.bits.keys()
    assert len({tuple(answer) for answer in plain.sampled}) == len(PROMPTS)
    if WAYS[way].get("max_draft_tokens") != 0:
        assert sum(answer.num_accepted for answer in answers.values()) > 20, "no draft was ever accepted: vacuous"


def test_prefix_hits_change_no_bit(plain: Plain) -> None:
    engine = plain.engine()
    tap = LogitTap(engine)
    assert_plain(run(engine, greedy_requests()), plain, tap)
    again = run(engine, greedy_requests())
    assert_plain(again, plain, tap)
    assert tap.num_repeats >= sum(map(len, plain.greedy))
    for index, token_ids in enumerate(PROMPTS):
        # All full pages of the prompt, but for the last token: it is computed to be continued from.
        assert again[str(index)].num_cached_tokens == min(len(token_ids) // 16 * 16, len(token_ids) - 1)
    assert engine.stats.prefix_hits == sum(answer.num_cached_tokens for answer in again.values())


def test_an_answer_can_be_a_prefix(plain: Plain) -> None:
    engine, cold = plain.engine(), plain.engine()
    warm_tap, cold_tap = LogitTap(engine), LogitTap(cold)
    first = run_one(engine, greedy(PROMPTS[4], max_tokens=40))
    turn = PROMPTS[4] + first.token_ids + [5, 6, 7]
    warm = run_one(engine, greedy(turn))
    assert warm.num_cached_tokens >= (len(PROMPTS[4]) + len(first.token_ids) - 1) // 16 * 16
    assert warm.token_ids == run_one(cold, greedy(turn)).token_ids
    warm_tap.assert_same(cold_tap)


def test_preemption_changes_no_bit(plain: Plain) -> None:
    # 40 sequences that soon need a second page each, and at most 32 pages.
    engine = plain.engine(kv_cache_mib=1, page_size=256, max_running=40, max_step_tokens=512, max_context=512)
    tap = LogitTap(engine)
    questions = [greedy(prompt(seed, 250 - seed % 7), str(seed), 20, ignore_eos=True) for seed in range(40)]
    answers = run(engine, questions)
    assert engine.stats.num_preemptions > 0, "the pool was never short: vacuous"
    assert sum(answer.num_draft_tokens for answer in answers.values()) > 0
    roomy = plain.engine(drafter="none", max_step_tokens=512)
    roomy_tap = LogitTap(roomy)
    expected = run(roomy, questions)
    assert roomy.stats.num_preemptions == 0
    assert [answers[q.request_id].token_ids for q in questions] == [expected[q.request_id].token_ids for q in questions]
    tap.assert_same(roomy_tap)


def test_tenants_do_not_share_pages(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    run_one(engine, sampled(PROMPTS[4], tenant="a"))
    assert run_one(engine, sampled(PROMPTS[4], tenant="b")).num_cached_tokens == 0
    assert run_one(engine, sampled(PROMPTS[4], tenant="a")).num_cached_tokens > 0
