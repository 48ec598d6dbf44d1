"""Token trees: whichever branch is right is kept, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ScriptedDrafter, greedy, make_engine, run, run_one, sampled
from random_speculator import RandomSpeculator
from tiny_model import save_tiny_model, tiny_llama_config

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]
KERNELS: list[dict[str, Any]] = [{"kernels": "reference", "num_threads": 1}, {"kernels": "cpu"}]


class TreeDrafter(ScriptedDrafter):
    """Hides the right continuation among wrong guesses: at each depth a wrong sibling before it, with a child."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            tree_around(chain.token_ids, request.max_draft_tokens)
            for request, chain in zip(requests, super().propose(requests), strict=True)
        ]


def tree_around(chain: Sequence[int], max_tokens: int) -> Draft:
    token_ids: list[int] = []
    parents: list[int] = []
    right = -1
    for token_id in chain:
        if len(token_ids) + 3 > max_tokens:
            break
        wrong = (token_id + 1) % 259
        token_ids += [wrong, token_id, token_id]
        parents += [right, len(token_ids) - 3, right]
        right = len(token_ids) - 1
    return Draft(tuple(token_ids), parents=tuple(parents), source="suffix") if token_ids else NO_DRAFT


def num_steps(num_tokens: int, max_draft_tokens: int) -> int:
    """The prefill's own token, then a third of each tree and one more; no tree has more tokens than are wanted yet."""
    left, steps = num_tokens - 1, 1
    while left > 0:
        left -= min(max_draft_tokens, left - 1) // 3 + 1
        steps += 1
    return steps


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
@pytest.mark.parametrize("settings", [{"max_running": 1}, {"max_running": 8, "page_size": 4, "max_step_tokens": 64}])
def test_the_right_branch_is_kept(tiny_model: Path, kernels: dict[str, Any], settings: dict[str, Any]) -> None:
    questions = [greedy(token_ids, str(i), 25, ignore_eos=True) for i, token_ids in enumerate(PROMPTS)]
    questions += [
        sampled(token_ids, f"s{i}", 25, seed=i, ignore_eos=True, temperature=0.8, presence_penalty=0.5, logprobs=1)
        for i, token_ids in enumerate(prompt(50 + seed, 20) for seed in range(3))
    ]
    plain = run(make_engine(tiny_model, drafter="none", **kernels), questions)
    drafter = TreeDrafter({tuple(q.prompt_token_ids): plain[q.request_id].token_ids for q in questions})
    engine = make_engine(tiny_model, drafter, max_draft_tokens=12, **kernels, **settings)
    for _ in range(2):  # the second time on pages that trees have filled
        answers = run(engine, questions)
        for name, answer in answers.items():
            assert answer.token_ids == plain[name].token_ids
            assert answer.logprobs == plain[name].logprobs
            assert answer.num_accepted * 3 <= answer.num_draft_tokens
        if settings["max_running"] == 1:
            assert [a.num_steps for a in answers.values()] == [num_steps(25, 12)] * len(questions)
    assert engine.stats.prefix_hits > 0


@pytest.mark.parametrize("parents", [(0, 0), (-1, 1), (-2, -1), (-1,), (-1, 0, 1)])
def test_what_is_no_tree_is_no_draft(tiny_model: Path, parents: tuple[int, ...]) -> None:
    plain = run_one(make_engine(tiny_model, drafter="none", kernels="cpu"), greedy(PROMPTS[1]))

    class Bad(ScriptedDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft((5, 6), parents=parents) for _ in requests]

    answer = run_one(make_engine(tiny_model, Bad({tuple(PROMPTS[1]): []}), kernels="cpu"), greedy(PROMPTS[1]))
    assert answer.token_ids == plain.token_ids
    assert answer.num_draft_tokens == 0


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
def test_a_draft_model_reads_the_features_of_the_branch_that_was_kept(tmp_path: Path, kernels: dict[str, Any]) -> None:
    """Its guesses after a tree are those after the same tokens without one."""
    target = save_tiny_model(tmp_path / "target", tiny_llama_config(num_hidden_layers=3))
    head = RandomSpeculator.make(seed=6).save(tmp_path / "head")
    settings = {"drafter": "model", "draft_model_path": str(head), "max_draft_tokens": 6, **kernels}
    expected: dict[int, Draft] = {}
    found: dict[int, Draft] = {}
    plain = make_engine(target, **settings)
    _spy(plain, expected, None)
    answer = run_one(plain, greedy(PROMPTS[2], max_tokens=30, ignore_eos=True))
    drafted = make_engine(target, **settings)
    _spy(drafted, found, answer.token_ids)
    assert run_one(drafted, greedy(PROMPTS[2], max_tokens=30, ignore_eos=True)).token_ids == answer.token_ids
    shared = expected.keys() & found.keys()
    assert len(shared) >= 8
    for length in shared:
        shorter = min(len(expected[length].token_ids), len(found[length].token_ids))
        assert found[length].token_ids[:shorter] == expected[length].token_ids[:shorter]
        assert found[length].confidences[:shorter] == expected[length].confidences[:shorter]


def _spy(engine: Any, drafts: dict[int, Draft], answer: Sequence[int] | None) -> None:
    """Note the model's own drafts by the number of tokens before; with an answer, propose trees around it instead."""
    model = engine._drafter._drafter._model
    propose = model.propose

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            proposed: list[Draft] = propose(requests)
            length = model._followed[requests[0].sequence_id].frontier
            drafts[length] = proposed[0]
            if answer is None:
                return proposed
            rest = answer[length - len(PROMPTS[2]) :]
            return [tree_around(rest, requests[0].max_draft_tokens)]

    engine._drafter._drafter = engine._drafter._paged = Spy()
