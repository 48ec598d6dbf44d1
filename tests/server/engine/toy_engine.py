"""An engine without a model for the supervisor's tests. A prompt is a small program:

``(op, n)``: give the tokens 100, 101, ... up to ``n`` of them or ``max_tokens``, one a step, then, by ``op``, end.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.server.engine.request import EngineStats, FinishReason, ModelInfo, Request, StepOutput

END, CRASH, EXIT, HANG, SLOW, STRAY, REFUSE, FOREVER = range(8)


class ToyEngine:
    info = ModelInfo("toy", vocab_size=1000, max_context=4096, kernels="none", drafter="none", max_draft_tokens=0)

    def __init__(self) -> None:
        self._running: dict[str, tuple[Request, int]] = {}
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 0, 0, 0, 0, self._num_steps, 0, 0)

    def add_request(self, request: Request) -> list[StepOutput]:
        if request.prompt_token_ids[0] == REFUSE:
            return [StepOutput(request.request_id, finish_reason=FinishReason.ERROR, error="refused")]
        self._running[request.request_id] = (request, 0)
        return []

    def cancel(self, request_id: str) -> list[StepOutput]:
        if self._running.pop(request_id, None) is None:
            return []
        return [StepOutput(request_id, finish_reason=FinishReason.CANCELLED)]

    def step(self) -> list[StepOutput]:
        self._num_steps += 1
        outputs = []
        for request_id, (request, num_tokens) in list(self._running.items()):
            op, length = request.prompt_token_ids
            if op == SLOW:
                time.sleep(0.02)
            if op == FOREVER:
                time.sleep(0.001)
            token = 100 + num_tokens
            num_tokens += 1
            self._running[request_id] = (request, num_tokens)
            if num_tokens < min(length, request.params.max_tokens) or op == FOREVER:
                outputs.append(StepOutput(request_id, (token,), f"{token} "))
                continue
            if op == CRASH:
                raise RuntimeError("told to crash")
            if op == EXIT:
                os.kill(os.getpid(), signal.SIGKILL)
            if op == HANG:
                time.sleep(3600)
            del self._running[request_id]
            last = StepOutput(request_id, (token,), f"{token} ", finish_reason=FinishReason.STOP)
            outputs.append(last)
            if op == STRAY:
                outputs += [last, StepOutput("nobody", (1,), "x")]
        return outputs

    def rest(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def make(settings: Mapping[str, Any]) -> ToyEngine:
    """By the settings: note every start and every orderly end in a file, be slow to start, fail at some starts."""
    num_starts = 1
    if "starts" in settings:
        with Path(settings["starts"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        num_starts = len(Path(settings["starts"]).read_text().splitlines())
    if "farewell" in settings:
        atexit.register(Path(settings["farewell"]).touch)
    time.sleep(settings.get("start_s", 0))
    if num_starts in settings.get("die_at", []):
        os._exit(3)
    if num_starts in settings.get("refuse_at", []):
        raise ValueError("The model file nowhere.gguf does not exist.")
    return ToyEngine()
