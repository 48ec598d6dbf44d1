"""Keeps an engine process running, and keeps the promise that every request ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.server.engine.channel import ServerChannel, encode_frame
from outrider.server.engine.client import EngineOverloaded, EngineState, EngineStatus, EngineUnavailable, OutputSink
from outrider.server.engine.launch import EngineWorker, launch
from outrider.server.engine.messages import Cancel, Failed, Message, MessageError, Outputs, Ready, Stop, Submit
from outrider.server.engine.request import EngineStats, FinishReason, ModelInfo, Request, StepOutput

logger = logging.getLogger("outrider.supervisor")

# What a client reads; the details are for the log and for ``EngineStatus.message``.
_LOST = "The engine stopped while it was working on this request. Please send it again."
_FAILED = "The engine failed and takes no requests. The server's log says why."
_STOPPED = "The server is stopping and takes no requests."
_UNSENDABLE = "The request holds a number or text that the engine cannot take."

_EXIT_S = 1.0  # from closing the channel to leaving, then it is killed
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """How patient the supervisor is. Times in seconds."""

    max_open_requests: int = 256  # running, waiting in the engine and held here together
    hang_timeout_s: float = 30.0  # without a step, while there is work
    stop_timeout_s: float = 5.0  # for an orderly end, then the process is killed
    first_backoff_s: float = 0.1  # before a restart; doubles with every death before the engine was ready
    max_backoff_s: float = 5.0
    max_failed_starts: int = 5  # in a row, then the state is "failed"
    retry_after_s: float = 1.0  # what a client hears when there is no room


class EngineProcess:
    """An ``EngineClient`` whose engine runs in a supervised process of its own.

    Requests that come before the engine is ready, or while it restarts, are held and sent when it is. When the
    process dies, requests it had end with an error and a new process is started. ``start`` and all other
    methods belong to one event loop.

    An engine that refuses its very first start with a reason (no such model, say) is not tried again.

    Args:
        settings: the engine's settings, of JSON types.
        engine: ``module:callable`` that makes the engine; None: Outrider's own.
        worker: a process started earlier with the same settings, to win the time of the server's own imports.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        *,
        engine: str | None = None,
        limits: SupervisorSettings | None = None,
        worker: EngineWorker | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._limits = limits or SupervisorSettings()
        self._early_worker = worker
        self._state: EngineState = "starting"
        self._message = "The engine is loading the model."
        self._state_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: ServerChannel | None = None
        self._worker: EngineWorker | None = None
        self._held: dict[str, tuple[OutputSink, bytes]] = {}  # requests no engine has seen, with their frames
        self._sent: dict[str, OutputSink] = {}  # requests the present engine has
        self._model: ModelInfo | None = None
        self._stats: EngineStats | None = None
        self._failure: str | None = None  # the last words of the present process
        self._last_life = 0.0  # loop time of the last step, or of the request that ended the idleness
        self._num_restarts = 0
        self.num_stray_outputs = 0  # outputs for requests that were over

    def start(self) -> None:
        """Start the process and return at once."""
        assert self._task is None, "an engine process is started once"
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> ModelInfo:
        """Raises:
        EngineUnavailable: the engine failed for good or was stopped; the message says why, in full.
        """
        while self._state in ("starting", "restarting"):
            await self._state_changed.wait()
        if self._state != "ready" or self._model is None:
            raise EngineUnavailable(self._message)
        return self._model

    async def stop(self) -> None:
        """End all requests, then the process: in good order if it can within ``stop_timeout_s``."""
        was_ready = self._state == "ready"
        self._set_state("stopped", "The engine was stopped.")
        self._end_held(_STOPPED)
        self._end_sent(_STOPPED)
        if self._task is not None:
            if was_ready:
                self._send(encode_frame(Stop()))
                await asyncio.wait([self._task], timeout=self._limits.stop_timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._early_worker is not None:  # never came into use
            self._early_worker.kill()

    def submit(self, request: Request, sink: OutputSink) -> None:
        request_id = request.request_id
        in_use = request_id in self._held or request_id in self._sent
        assert not in_use, f"request id {request_id!r} is in use"
        match self._state:
            case "failed":
                raise EngineUnavailable(_FAILED)
            case "stopped":
                raise EngineUnavailable(_STOPPED)
        if len(self._held) + len(self._sent) >= self._limits.max_open_requests:
            raise EngineOverloaded(
                f"All {self._limits.max_open_requests} places for requests are taken.", self._limits.retry_after_s
            )
        try:
            frame = encode_frame(Submit(request))
        except MessageError as error:
            logger.warning("Request %s was not sent: %s", request_id, error)
            _end(request_id, sink, FinishReason.ERROR, _UNSENDABLE)
            return
        if self._state == "ready":
            self._send_request(request_id, sink, frame)
        else:
            self._held[request_id] = (sink, frame)

    def cancel(self, request_id: str) -> None:
        if request_id in self._held:
            sink, _ = self._held.pop(request_id)
            _end(request_id, sink, FinishReason.CANCELLED)
        elif request_id in self._sent:
            self._send(encode_frame(Cancel(request_id)))

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            self._state, self._num_restarts, self._last_step_age_s, self._model, self._stats, self._message
        )

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is no process."""
        return None if self._worker is None else self._worker.process.pid

    @property
    def _last_step_age_s(self) -> float | None:
        return asyncio.get_running_loop().time() - self._last_life if self._sent else None

    def _set_state(self, state: EngineState, message: str) -> None:
        self._state, self._message = state, message
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _send(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.send_frame(frame)

    def _send_request(self, request_id: str, sink: OutputSink, frame: bytes) -> None:
        if not self._sent:
            self._last_life = asyncio.get_running_loop().time()
        self._sent[request_id] = sink
        self._send(frame)

    def _end_held(self, error: str) -> None:
        held, self._held = self._held, {}
        for request_id, (sink, _) in held.items():
            _end(request_id, sink, FinishReason.ERROR, error)

    def _end_sent(self, error: str) -> None:
        sent, self._sent = self._sent, {}
        for request_id, sink in sent.items():
            _end(request_id, sink, FinishReason.ERROR, error)

    def _receive(self, message: Message) -> None:
        match message:
            case Ready(model):
                self._model = model
                self._set_state("ready", f"The engine serves {model.name}.")
                held, self._held = self._held, {}
                for request_id, (sink, frame) in held.items():
                    self._send_request(request_id, sink, frame)
            case Outputs(outputs, stats):
                self._stats = stats
                self._last_life = asyncio.get_running_loop().time()
                for output in outputs:
                    self._deliver(output)
            case Failed(reason):
                self._failure = reason
            case _:
                raise AssertionError(f"{type(message).__name__} is not for the server")

    def _deliver(self, output: StepOutput) -> None:
        sink = self._sent.get(output.request_id)
        if sink is None:
            self.num_stray_outputs += 1
            return
        if output.finish_reason is not None:
            del self._sent[output.request_id]
        try:
            sink(output)
        except Exception:
            logger.exception("The receiver of request %s failed; this is a bug.", output.request_id)

    async def _supervise(self) -> None:
        """Run one process after the other until stopped or hopeless."""
        limits = self._limits
        num_failed_starts, backoff_s = 0, limits.first_backoff_s / 2
        try:
            while True:
                was_ready, death = await self._run_worker()
                if self._state == "stopped":
                    return
                num_failed_starts = 0 if was_ready else num_failed_starts + 1
                backoff_s = limits.first_backoff_s if was_ready else min(2 * backoff_s, limits.max_backoff_s)
                refused = self._model is None and self._failure is not None
                if refused or num_failed_starts >= limits.max_failed_starts:
                    self._fail(death)
                    return
                logger.error("%s Starting it again in %.1f s.", death, backoff_s)
                self._set_state("restarting", f"{death} It is being started again.")
                await asyncio.sleep(backoff_s)
                self._num_restarts += 1
        except Exception as error:
            logger.exception("The supervisor failed; this is a bug.")
            self._fail(f"The engine cannot be supervised: {error}")

    def _fail(self, death: str) -> None:
        logger.error("%s. Giving up.", death.rstrip("."))
        self._set_state("failed", death)
        self._end_held(_FAILED)
        self._end_sent(_FAILED)

    async def _run_worker(self) -> tuple[bool, str]:
        """One process, start to end: whether it was ever ready, and a sentence on what became of it."""
        self._failure = None
        try:
            worker, self._early_worker = self._early_worker or launch(self._settings, self._engine), None
        except OSError as error:
            return False, f"The engine process could not be started: {error}."
        self._worker = worker
        try:
            self._channel = await ServerChannel.open(worker.socket, self._receive)
            death = await self._watch(self._channel)
            was_ready = self._state == "ready"
            if was_ready:
                self._set_state("restarting", "The engine stopped and is being started again.")
            self._end_sent(_LOST)
            if death is None:
                await _wait_for_exit(worker, _EXIT_S)
        finally:
            if self._channel is not None:
                self._channel.abort()
            self._channel = self._worker = None
            worker.socket.close()
            worker.process.kill()
            await _wait_for_exit(worker, _KILL_S)
        return was_ready, self._failure or death or _how_it_ended(worker)

    async def _watch(self, channel: ServerChannel) -> str | None:
        """Wait until the process closes the channel (None) or must be ended (why)."""
        limit_s = self._limits.hang_timeout_s
        while True:
            await asyncio.wait([channel.closed], timeout=min(1.0, limit_s / 4))
            if channel.closed.done():
                error = channel.closed.result()
                return None if error is None else f"The engine sent something that is {error}."
            age_s = self._last_step_age_s
            if age_s is not None and age_s > limit_s:
                return f"The engine finished no step in {age_s:.1f} s and was killed."


def _end(request_id: str, sink: OutputSink, reason: FinishReason, error: str | None = None) -> None:
    """Give the terminal output in the next turn of the loop: never from inside the caller's own call."""
    output = StepOutput(request_id, finish_reason=reason, error=error)
    asyncio.get_running_loop().call_soon(sink, output)


async def _wait_for_exit(worker: EngineWorker, timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(worker.process.wait, timeout_s)


def _how_it_ended(worker: EngineWorker) -> str:
    status = worker.process.returncode
    if status is not None and status < 0:
        return f"The engine was killed by signal {-status} ({signal.strsignal(-status)})."
    return f"The engine ended with status {status}."
