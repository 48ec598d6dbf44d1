"""Greedy answers are the model's own, token for token, whatever the engine does to compute them sooner."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ScriptedDrafter, greedy, make_engine, run, run_one, sampled
from transformers import AutoModelForCausalLM

from outrider.server.engine.request import FinishReason

MAX_TOKENS = 48


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]


@cache
def oracle(model: Path) -> list[list[int]]:
    """Hugging Face's greedy answers."""
    hugging_face = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for token_ids in PROMPTS:
            result = hugging_face.generate(
                torch.tensor([token_ids]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
            answers.append(result[0, len(token_ids) :].tolist())
    return answers


def requests(indices: range | list[int], **params: Any) -> list[Any]:
    return [greedy(PROMPTS[i], str(i), MAX_TOKENS, **params) for i in indices]


@pytest.mark.parametrize("batch_size", [1, 4, 8])
@pytest.mark.parametrize("max_draft_tokens", [0, 1, 4, 8])
@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_answers_equal_hugging_faces(
    tiny_model: Path, max_draft_tokens: int, batch_size: int, max_step_tokens: int
) -> None:
    engine = make_engine(
        tiny_model, max_draft_tokens=max_draft_tokens, max_step_tokens=max_step_tokens, max_running=batch_size
    )
    # They join two steps apart and leave when done, so the batch changes all the time.
    joining = {2 * i: requests([i]) for i in range(len(PROMPTS))}
    answers = run(engine, [], joining)
    assert [answers[str(i)].token_ids for i in range(len(PROMPTS))] == oracle(tiny_model)
    if max_draft_tokens == 8:
        assert sum(answer.num_accepted for answer in answers.values()) > 50, "no draft was ever accepted: vacuous"


def test_prefix_hits_change_nothing(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    first = run(engine, requests(range(len(PROMPTS))))
    again = run(engine, requests(range(len(PROMPTS))))
    for index, expected in enumerate(oracle(tiny_model)):
        assert first[str(index)].token_ids == again[str(index)].token_ids == expected
        # All full pages of the prompt, but for the last token: it is computed to be continued from.
        assert again[str(index)].num_cached_tokens == min(len(PROMPTS[index]) // 16 * 16, len(PROMPTS[index]) - 1)
    assert engine.stats.prefix_hits == sum(answer.num_cached_tokens for answer in again.values())


def test_an_answer_can_be_a_prefix(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    first = run_one(engine, greedy(PROMPTS[4], max_tokens=40))
    turn = PROMPTS[4] + first.token_ids + [5, 6, 7]
    warm = run_one(engine, greedy(turn))
    assert warm.num_cached_tokens >= (len(PROMPTS[4]) + len(first.token_ids) - 1) // 16 * 16
    assert warm.token_ids == run_one(make_engine(tiny_model), greedy(turn)).token_ids


def test_tenants_do_not_share_pages(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    run_one(engine, sampled(PROMPTS[4], tenant="a"))
    assert run_one(engine, sampled(PROMPTS[4], tenant="b")).num_cached_tokens == 0
    assert run_one(engine, sampled(PROMPTS[4], tenant="a")).num_cached_tokens > 0


@pytest.mark.parametrize("max_draft_tokens", [0, 8])
def test_preemption_changes_nothing(tiny_model: Path, max_draft_tokens: int) -> None:
    # 1 MiB / (16 tokens x 2 layers x 2 x 2 heads x 12 x 4 bytes) = 170 pages; longer pages make it fewer.
    engine = make_engine(tiny_model, kv_cache_mib=1, page_size=128, max_draft_tokens=max_draft_tokens)
    many = {f"{i}.{copy}": greedy([*PROMPTS[i], 200 + copy], f"{i}.{copy}", 150) for i in range(8) for copy in range(3)}
    answers = run(engine, many.values())
    assert engine.stats.num_preemptions > 0, "the pool was never short: vacuous"
    roomy = make_engine(tiny_model, max_draft_tokens=0)
    for name, request in many.items():
        assert answers[name].token_ids == run_one(roomy, request).token_ids


@pytest.mark.parametrize("phase", range(0, 16, 3))
@pytest.mark.parametrize("max_draft_tokens", [1, 3, 4, 8, 16])
def test_a_drafter_that_knows_the_answer_is_always_right(tiny_model: Path, phase: int, max_draft_tokens: int) -> None:
    token_ids = PROMPTS[3][: 40 + phase]
    plain = run_one(make_engine(tiny_model, drafter="none"), greedy(token_ids, ignore_eos=True))
    drafter = ScriptedDrafter({tuple(token_ids): plain.token_ids})
    drafted = run_one(
        make_engine(tiny_model, drafter, max_draft_tokens=max_draft_tokens), greedy(token_ids, ignore_eos=True)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted == drafted.num_draft_tokens
    # The prefill's own token, then max_draft_tokens + 1 a step.
    assert drafted.num_steps == 1 + -(-31 // (max_draft_tokens + 1))


def test_a_drafter_that_is_always_wrong_costs_one_token_a_step_and_changes_nothing(tiny_model: Path) -> None:
    plain = run_one(make_engine(tiny_model, drafter="none"), greedy(PROMPTS[2], ignore_eos=True))
    drafter = ScriptedDrafter({tuple(PROMPTS[2]): plain.token_ids}, lambda draft: [(t + 1) % 259 for t in draft])
    drafted = run_one(make_engine(tiny_model, drafter), greedy(PROMPTS[2], ignore_eos=True))
    assert drafted.token_ids == plain.token_ids
    assert (drafted.num_accepted, drafted.num_steps) == (0, 32)
    assert drafted.num_draft_tokens > 100


@pytest.mark.parametrize("right", range(8))
def test_a_draft_that_is_right_for_a_while_gains_just_that(tiny_model: Path, right: int) -> None:
    plain = run_one(make_engine(tiny_model, drafter="none"), greedy(PROMPTS[1], ignore_eos=True, max_tokens=91))
    drafter = ScriptedDrafter(
        {tuple(PROMPTS[1]): plain.token_ids}, lambda draft: [*draft[:right], *((t + 1) % 259 for t in draft[right:])]
    )
    drafted = run_one(make_engine(tiny_model, drafter), greedy(PROMPTS[1], ignore_eos=True, max_tokens=91))
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_steps == 1 + -(-90 // (right + 1))


class FailingDrafter(ScriptedDrafter):
    def __init__(self, fails_in: str) -> None:
        super().__init__({tuple(token_ids): [] for token_ids in PROMPTS})
        setattr(self, fails_in, self._fail)

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("the drafter is broken")


@pytest.mark.parametrize("fails_in", ["begin", "extend", "propose", "release"])
def test_a_drafter_that_fails_is_done_without(tiny_model: Path, fails_in: str) -> None:
    answers = run(make_engine(tiny_model, FailingDrafter(fails_in)), requests(range(8)))
    assert [answers[str(i)].token_ids for i in range(8)] == oracle(tiny_model)


@pytest.mark.parametrize("bad_id", [-1, 259, 10**12])
def test_a_draft_ends_before_an_id_the_model_does_not_have(tiny_model: Path, bad_id: int) -> None:
    expected = oracle(tiny_model)[4]
    drafter = ScriptedDrafter({tuple(PROMPTS[4]): expected}, lambda draft: [*draft[:2], bad_id, *draft[2:]])
    answer = run_one(make_engine(tiny_model, drafter), greedy(PROMPTS[4], max_tokens=MAX_TOKENS))
    assert answer.token_ids == expected
    assert answer.num_accepted == answer.num_draft_tokens > 0


@pytest.mark.parametrize("stop_at", range(1, 20))
def test_an_end_inside_a_draft_ends_the_answer_there(tiny_model: Path, stop_at: int) -> None:
    full = run_one(
        make_engine(tiny_model, drafter="none"), greedy(PROMPTS[5], max_tokens=24, ignore_eos=True)
    ).token_ids
    stop_id = full[stop_at]
    expected = full[: full.index(stop_id) + 1]
    drafter = ScriptedDrafter({tuple(PROMPTS[5]): full})
    request = greedy(PROMPTS[5], max_tokens=24, ignore_eos=True, stop_token_ids=(stop_id,))
    answer = run_one(make_engine(tiny_model, drafter), request)
    assert answer.token_ids == expected
    assert answer.finish_reason == FinishReason.STOP
    assert answer.num_accepted <= len(expected)


@pytest.mark.parametrize("cap", range(1, 20))
@pytest.mark.parametrize("stop_at", [3, 8, 12])
def test_stop_strings_and_caps_inside_a_draft_act_as_without_one(tiny_model: Path, cap: int, stop_at: int) -> None:
    plain_engine = make_engine(tiny_model, drafter="none")
    full = run_one(plain_engine, greedy(PROMPTS[6], max_tokens=24, ignore_eos=True))
    stop = full.text[stop_at : stop_at + 2]
    request = greedy(PROMPTS[6], max_tokens=cap, ignore_eos=True, stop=(stop,), logprobs=2)
    drafted = run_one(make_engine(tiny_model, ScriptedDrafter({tuple(PROMPTS[6]): full.token_ids})), request)
    plain = run_one(plain_engine, request)
    for name in ("token_ids", "text", "finish_reason", "logprobs"):
        assert getattr(drafted, name) == getattr(plain, name), name
    assert stop not in drafted.text


def test_sampled_text_does_not_depend_on_drafts_or_neighbours(tiny_model: Path) -> None:
    def ask(index: int, **params: Any) -> Any:
        return sampled(PROMPTS[index], str(index), 40, temperature=0.8, top_p=0.95, seed=index, **params)

    alone = [run_one(make_engine(tiny_model, drafter="none"), ask(i)).token_ids for i in range(8)]
    for settings in ({}, {"max_draft_tokens": 3}, {"max_step_tokens": 16, "max_running": 4}):
        engine = make_engine(tiny_model, **settings)
        answers = run(engine, [], {3 * i: [ask(i)] for i in range(8)})
        assert [answers[str(i)].token_ids for i in range(8)] == alone
    assert len({tuple(tokens) for tokens in alone}) == 8
