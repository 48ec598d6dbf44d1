"""Driving an in-process engine to the end, and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.draft.base import Draft, DraftRequest
from outrider.server.engine.cost_table import CostTable
from outrider.server.engine.engine import Engine
from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.engine.settings import EngineSettings
from outrider.verify.sampling_params import SamplingParams, TokenLogprob


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, output: StepOutput) -> None:
        assert self.finish_reason is None, "an output after the terminal one"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.num_steps += bool(output.token_ids)
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted += output.num_accepted
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = output.finish_reason
        self.error = output.error


def make_engine(path: Path, drafter: Any = None, cost_table: CostTable | None = None, **settings: Any) -> Engine:
    """``drafter``: one itself, or the name of one.

    Without a profile, unless asked for: drafts are then as long in every run.
    """
    if isinstance(drafter, str):
        settings["drafter"], drafter = drafter, None
    settings = {"kv_cache_mib": 16, "profile": False, **settings}
    return Engine(EngineSettings(model_path=str(path), model_name="tiny", **settings), drafter, cost_table)


def greedy(prompt: Sequence[int], request_id: str = "r", max_tokens: int = 32, **params: Any) -> Request:
    return sampled(prompt, request_id, max_tokens, temperature=0.0, **params)


def sampled(
    prompt: Sequence[int], request_id: str = "r", max_tokens: int = 32, tenant: str = "", **params: Any
) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), tenant)


def run(
    engine: Engine, requests: Iterable[Request], joining: Mapping[int, Sequence[Request]] | None = None
) -> dict[str, Answer]:
    """All answers by request id. ``joining``: more requests, by the step before which they come.

    Checks the pool's balance after every step, and that each request ends exactly once.
    """
    answers: dict[str, Answer] = {}
    joining = dict(joining or {})

    def add(request: Request) -> None:
        answers[request.request_id] = Answer()
        take(engine.add_request(request))

    def take(outputs: list[StepOutput]) -> None:
        for output in outputs:
            answers[output.request_id].add(output)

    for request in requests:
        add(request)
    step = 0
    while engine.has_work or joining:
        for request in joining.pop(step, ()):
            add(request)
        take(engine.step())
        engine.check_integrity()
        step += 1
        assert step < 20_000, "the engine makes no progress"
    unended = [request_id for request_id, answer in answers.items() if answer.finish_reason is None]
    assert not unended, f"no terminal output for {unended}"
    return answers


def run_one(engine: Engine, request: Request) -> Answer:
    return run(engine, [request])[request.request_id]


class ScriptedDrafter:
    """Drafts from a known continuation, altered by ``change``: right, wrong or invalid at will."""

    name = "scripted"

    def __init__(
        self, continuations: Mapping[tuple[int, ...], Sequence[int]], change: Any = lambda draft: draft
    ) -> None:
        self._continuations = {tuple(prompt): list(tokens) for prompt, tokens in continuations.items()}
        self._change = change
        self._following: dict[int, tuple[list[int], int]] = {}

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        tokens = tuple(prompt_token_ids)
        prompt = next(p for p in self._continuations if tokens[: len(p)] == p)
        self._following[sequence_id] = (self._continuations[prompt], len(tokens) - len(prompt))

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        continuation, position = self._following[sequence_id]
        self._following[sequence_id] = (continuation, position + len(token_ids))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            continuation, position = self._following[request.sequence_id]
            drafts.append(Draft(tuple(self._change(continuation[position : position + request.max_draft_tokens]))))
        return drafts

    def release(self, sequence_id: int) -> None:
        del self._following[sequence_id]
