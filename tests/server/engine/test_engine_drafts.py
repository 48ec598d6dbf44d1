"""Drafts of every kind, right, wrong, broken and cut short by an end: each changes only the number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ScriptedDrafter, greedy, make_engine, run, run_one

from outrider.server.engine.request import FinishReason


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]


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
    requests = [greedy(token_ids, str(i)) for i, token_ids in enumerate(PROMPTS)]
    answers = run(make_engine(tiny_model, FailingDrafter(fails_in)), requests)
    expected = run(make_engine(tiny_model, drafter="none"), requests)
    assert [answer.token_ids for answer in answers.values()] == [answer.token_ids for answer in expected.values()]


@pytest.mark.parametrize("bad_id", [-1, 259, 10**12])
def test_a_draft_ends_before_an_id_the_model_does_not_have(tiny_model: Path, bad_id: int) -> None:
    expected = run_one(make_engine(tiny_model, drafter="none"), greedy(PROMPTS[4])).token_ids
    drafter = ScriptedDrafter({tuple(PROMPTS[4]): expected}, lambda draft: [*draft[:2], bad_id, *draft[2:]])
    answer = run_one(make_engine(tiny_model, drafter), greedy(PROMPTS[4]))
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
