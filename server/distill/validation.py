"""What a draft is worth: acceptance in the engine, at temperature 0, where guesses can be counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.draft.distill.card import Acceptance
from outrider.draft.distill.progress import Progress
from outrider.server.engine.engine import Engine
from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.engine.settings import EngineSettings
from outrider.verify.sampling_params import SamplingParams

PARALLEL = 8
Prompts = Sequence[tuple[int, ...]]


class ValidationFailed(Exception):
    """The engine could not answer a question; the message is the engine's."""


def measure_acceptance(
    settings: EngineSettings,
    questions: Mapping[str, Prompts],
    max_tokens: int,
    max_seconds: float,
    report: Callable[[Progress], None],
) -> list[Acceptance]:
    """Acceptance by name of the questions: token ids of prompts, answered greedily with the settings' drafter.

    After ``max_seconds`` no more are asked, except that each name gets ``PARALLEL`` of them at least.

    Raises:
        UnsupportedCheckpoint, ValueError: the model or the draft cannot be used.
        ValidationFailed: a question failed.
    """
    engine = Engine(replace(settings, profile=False, max_running=PARALLEL))
    begun_at, num_all, num_done = time.monotonic(), sum(map(len, questions.values())), 0
    results = []
    for name, prompts in questions.items():
        found = Acceptance(name, 0, 0, 0, 0, 0)
        for start in range(0, len(prompts), PARALLEL):
            if start and time.monotonic() - begun_at > max_seconds:
                break
            some = prompts[start : start + PARALLEL]
            for output in _answers(engine, some, max_tokens):
                found = _with(found, output)
            found = replace(found, num_questions=found.num_questions + len(some))
            num_done += len(some)
            detail = f"{name}: {found.acceptance_length:.2f} tokens a step"
            report(Progress("validating", num_done / num_all, detail))
        results.append(found)
    return results


def total(name: str, parts: Sequence[Acceptance]) -> Acceptance:
    """All of them together."""
    return Acceptance(
        name,
        sum(part.num_questions for part in parts),
        sum(part.num_tokens for part in parts),
        sum(part.num_steps for part in parts),
        sum(part.num_draft_tokens for part in parts),
        sum(part.num_accepted for part in parts),
    )


def _answers(engine: Engine, prompts: Prompts, max_tokens: int) -> Sequence[StepOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    outputs = []
    for number, prompt in enumerate(prompts):
        outputs += engine.add_request(Request(str(number), prompt, params))
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        if output.finish_reason is FinishReason.ERROR:
            raise ValidationFailed(str(output.error))
    return outputs


def _with(found: Acceptance, output: StepOutput) -> Acceptance:
    return replace(
        found,
        num_tokens=found.num_tokens + len(output.token_ids),
        num_steps=found.num_steps + (output.num_draft_tokens > 0),
        num_draft_tokens=found.num_draft_tokens + output.num_draft_tokens,
        num_accepted=found.num_accepted + output.num_accepted,
    )
