"""What may be asked of the engine, how requests end, and that the pages are always all there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answer, greedy, make_engine, run, run_one, sampled

from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.engine.settings import EngineSettings

PROMPT = list(range(3, 103))


def step_until(engine: Any, done: Any) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while not done():
        outputs += engine.step()
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (greedy([]), "the prompt is empty"),
        (greedy([5] * 1024), "the prompt has 1024 tokens; this server takes at most 1023"),
        (greedy([5, 259]), "token 259; this model has tokens 0 to 258"),
        (greedy([5, -1]), "token -1"),
        (greedy([5], logit_bias={259: 1.0}), "logit_bias names token 259"),
        (greedy([5], stop_token_ids=(2**40,)), "stop_token_ids names token 1099511627776"),
    ],
)
def test_what_can_never_run_is_refused_with_a_sentence_and_harms_nobody(
    tiny_model: Path, request_: Any, message: str
) -> None:
    engine = make_engine(tiny_model)
    alone = run_one(engine, greedy(PROMPT, "healthy"))
    answers = run(engine, [greedy(PROMPT, "healthy")], {4: [replace(request_, request_id="bad")]})
    assert answers["healthy"].token_ids == alone.token_ids
    assert answers["bad"].finish_reason == FinishReason.ERROR
    assert message in str(answers["bad"].error)


def test_the_answer_ends_where_the_context_does(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_context=128)
    answer = run_one(engine, greedy(PROMPT, max_tokens=1000, ignore_eos=True))
    assert len(answer.token_ids) == 28
    assert answer.finish_reason == FinishReason.LENGTH


def test_a_prompt_of_one_token_and_one_that_fills_the_context_both_run(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_context=64)
    assert len(run_one(engine, greedy([5], ignore_eos=True)).token_ids) == 32
    assert len(run_one(engine, greedy([5] * 63, ignore_eos=True)).token_ids) == 1


def test_one_request_may_use_every_page(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, kv_cache_mib=1, page_size=256)
    capacity = engine.stats.num_pages * 256
    assert engine.info.max_context == min(capacity, 1024)
    for _ in range(2):  # the second time on a hit of its own pages
        answer = run_one(engine, greedy(PROMPT, max_tokens=2000, ignore_eos=True))
        assert len(answer.token_ids) == engine.info.max_context - len(PROMPT)


def test_prefill_alone_produces_nothing_and_is_reused(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_step_tokens=32)
    warm = run_one(engine, replace(greedy(PROMPT), generate=False))
    assert (warm.token_ids, warm.text, warm.finish_reason) == ([], "", FinishReason.STOP)
    answer = run_one(engine, greedy(PROMPT))
    assert answer.num_cached_tokens == 96
    assert answer.token_ids == run_one(make_engine(tiny_model), greedy(PROMPT)).token_ids


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 8])
def test_cancel_ends_a_request_in_every_phase_at_once(tiny_model: Path, num_steps: int) -> None:
    engine = make_engine(tiny_model, max_step_tokens=32, max_running=1)
    for request_id in ("first", "second"):  # the second waits
        assert engine.add_request(greedy(PROMPT, request_id, ignore_eos=True)) == []
    answers = {"first": Answer(), "second": Answer()}
    for _ in range(num_steps):
        for output in engine.step():
            answers[output.request_id].add(output)
    for request_id in ("second", "first"):
        for output in engine.cancel(request_id):
            answers[request_id].add(output)
    assert [answer.finish_reason for answer in answers.values()] == [FinishReason.CANCELLED] * 2
    assert not engine.has_work
    engine.check_integrity()
    assert engine.cancel("first") == []
    assert engine.cancel("never heard of") == []


def test_all_text_comes_once_and_equals_the_tokens(tiny_model: Path) -> None:
    from outrider.verify.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    answers = run(make_engine(tiny_model), [sampled(PROMPT, str(i), 60, seed=i, temperature=1.5) for i in range(8)])
    for answer in answers.values():
        assert answer.text == tokenizer.decode(answer.token_ids)
    assert any("\ufffd" in answer.text for answer in answers.values()), "no broken character came up: vacuous"


def test_logprobs_are_the_models_own(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer = run_one(make_engine(tiny_model, kv_cache_dtype="f32"), greedy(PROMPT, logprobs=3, ignore_eos=True))
    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        logits = oracle(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    by_token = {entry.token_id for entry in answer.logprobs}
    assert by_token <= set(answer.token_ids)
    assert len(answer.logprobs) == len(answer.token_ids)
    for row, entry in zip(expected, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        top = row.topk(3)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_a_request_that_turns_to_nan_ends_alone(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    healthy = run_one(engine, greedy(PROMPT, "healthy", tenant="b"))
    engine.add_request(greedy(PROMPT, "poisoned", tenant="a", ignore_eos=True))
    engine.add_request(greedy(PROMPT, "healthy", tenant="b"))
    engine.step()
    poisoned_pages = engine._sequences["poisoned"].pages.page_table
    engine._storage.layers("target")[0, 1][list(poisoned_pages)] = torch.nan
    answers = {"poisoned": Answer(), "healthy": Answer()}
    answers["healthy"].token_ids = []
    outputs = step_until(engine, lambda: not engine.has_work)
    final = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert final["poisoned"].finish_reason == FinishReason.ERROR
    assert "NaN" in str(final["poisoned"].error)
    tokens = [t for output in outputs if output.request_id == "healthy" for t in output.token_ids]
    assert tokens == healthy.token_ids[-len(tokens) :]
    # Whoever gets the poisoned pages next is not harmed.
    for seed in range(30):
        request = sampled([*PROMPT, seed], "next", 8, tenant=str(seed), seed=seed)
        assert run_one(engine, request).token_ids == run_one(make_engine(tiny_model), request).token_ids


def test_two_hundred_requests_with_random_cancels_leave_nothing_behind(tiny_model: Path) -> None:
    rng = random.Random(7)
    engine = make_engine(tiny_model, kv_cache_mib=1, page_size=64, max_running=12, max_step_tokens=48)
    answers: dict[str, Answer] = {}
    unstarted = [
        sampled(
            [rng.randrange(3, 259) for _ in range(rng.randrange(1, 90))],
            str(i),
            rng.randrange(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            tenant=rng.choice(["a", "b"]),
            seed=i,
        )
        for i in range(200)
    ]
    while unstarted or engine.has_work:
        outputs: list[StepOutput] = []
        for _ in range(rng.randrange(4)):
            if unstarted:
                request = unstarted.pop()
                answers[request.request_id] = Answer()
                outputs += engine.add_request(request)
        if rng.random() < 0.3 and answers:
            outputs += engine.cancel(rng.choice(list(answers)))
        outputs += engine.step()
        for output in outputs:
            answers[output.request_id].add(output)
        engine.check_integrity()
    reasons = {answer.finish_reason for answer in answers.values()}
    assert len(answers) == 200
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    assert engine.stats.num_free_pages + engine.stats.num_reusable_pages == engine.stats.num_pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": "magic"}, "kernels must be one of"),
        ({"drafter": "oracle"}, "drafter must be one of"),
        ({"page_size": 0}, "page_size must be from 1 to 256, not 0"),
        ({"max_step_tokens": 8}, r"max_step_tokens must be at least max_running \(32\), not 8"),
        ({"max_draft_tokens": -1}, "max_draft_tokens must be from 0"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings("model", "name", **changes)


def test_settings_that_do_not_fit_the_model_or_the_machine_are_named(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_mib is 1000000000; this machine has not that much memory"):
        make_engine(tiny_model, kv_cache_mib=10**9)
    with pytest.raises(ValueError, match="max_context is 4096; this model was made for at most 1024 tokens"):
        make_engine(tiny_model, max_context=4096)
