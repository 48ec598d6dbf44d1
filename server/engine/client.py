"""The engine as the server process sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from outrider.server.engine.request import EngineStats, ModelInfo, Request, StepOutput

EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]

OutputSink = Callable[[StepOutput], None]
"""Receives a request's outputs in order, in the event loop; must not block and must not raise."""


class EngineOverloaded(Exception):
    """The queue is full; ``retry_after_s`` says when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(Exception):
    """The engine cannot take requests (it failed for good, or the server is stopping)."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    state: EngineState
    num_restarts: int
    last_step_age_s: float | None  # None: nothing was running
    model: ModelInfo | None  # None before the engine was first ready
    stats: EngineStats | None
    message: str  # a sentence for people


class EngineClient(Protocol):
    """Submit, cancel, look. All methods are called in the event loop, and all but one return at once."""

    async def wait_ready(self) -> ModelInfo:
        """Wait until the engine has loaded its model.

        Raises:
            EngineUnavailable: it failed for good, or was stopped.
        """

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Start a request. Exactly one output with a ``finish_reason`` will reach ``sink``, come what may.

        Raises:
            EngineOverloaded: too many requests are waiting.
            EngineUnavailable: the engine takes no requests.
        """

    def cancel(self, request_id: str) -> None:
        """End a request within one step, whatever it is doing. Unknown and finished ids are ignored."""

    @property
    def status(self) -> EngineStatus: ...
