"""The target's continuations, by the engine: many at a time, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.draft.distill.continuation import Continuation, Prompt
from outrider.server.cli.machine import available_memory
from outrider.server.engine.engine import Engine
from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.engine.settings import EngineSettings
from outrider.verify.sampling_params import SamplingParams

MAX_RUNNING = 96  # more rows in a pass cost next to nothing each, until their keys and values fill the memory
FEW_RUNNING = 32  # where there is little time: all that are begun together also end together, late
MAX_STEP_TOKENS = 512
_MAX_CACHE_MIB = 2048


class GenerationFailed(Exception):
    """The engine refused a prompt or failed on it; the message is the engine's."""


class EngineContinuations:
    """A ``Generate`` by an engine without drafts. That a text depends on nothing beside it is the engine's first rule.

    Raises:
        UnsupportedCheckpoint: the model cannot be served.
        ValueError: it does not fit this machine.
    """

    def __init__(self, model_path: Path, model_name: str, num_threads: int, max_running: int = MAX_RUNNING) -> None:
        self._max_running = max_running
        self._engine = Engine(
            EngineSettings(
                model_path=str(model_path),
                model_name=model_name,
                num_threads=num_threads,
                drafter="none",
                profile=False,
                max_running=max_running,
                max_step_tokens=MAX_STEP_TOKENS,
                kv_cache_mib=cache_mib(),
            )
        )
        self._token_ids: dict[int, list[int]] = {}

    @property
    def num_parallel(self) -> int:
        return self._max_running

    def submit(self, key: int, prompt: Prompt) -> None:
        """Start one.

        Raises:
            GenerationFailed: the engine cannot take it.
        """
        params = SamplingParams(
            max_tokens=prompt.max_tokens,
            temperature=prompt.temperature,
            seed=prompt.seed,
            stop_token_ids=prompt.stop_token_ids,
        )
        self._token_ids[key] = []
        for output in self._engine.add_request(Request(str(key), prompt.token_ids, params)):
            raise GenerationFailed(str(output.error))

    def step(self) -> Sequence[tuple[int, Continuation]]:
        """One step of the engine.

        Raises:
            GenerationFailed: a prompt failed.
        """
        found = [self._take(output) for output in self._engine.step()]
        return [ended for ended in found if ended is not None]

    def _take(self, output: StepOutput) -> tuple[int, Continuation] | None:
        key = int(output.request_id)
        self._token_ids[key] += output.token_ids
        if output.finish_reason is None:
            return None
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationFailed(str(output.error))
        return key, Continuation(tuple(self._token_ids.pop(key)), output.finish_reason is FinishReason.LENGTH)


def cache_mib() -> int:
    """Memory for keys and values: a quarter of what is free, within reason."""
    free = available_memory()
    return _MAX_CACHE_MIB if free is None else max(min(free // 2**22, _MAX_CACHE_MIB), 64)
