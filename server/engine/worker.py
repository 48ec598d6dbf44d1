"""The engine process: messages in, one step after the other, outputs out."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from outrider.server.engine.channel import ChannelClosed, EngineChannel
from outrider.server.engine.messages import Cancel, Failed, Message, Outputs, Ready, Stop, Submit
from outrider.server.engine.request import EngineStats, ModelInfo, Request, StepOutput
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FAREWELL_S = 2.0

logger = logging.getLogger("outrider.engine")


class SteppedEngine(Protocol):
    """What the process drives. ``outrider.server.engine.engine.Engine`` is one."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def stats(self) -> EngineStats: ...

    def add_request(self, request: Request) -> list[StepOutput]: ...

    def cancel(self, request_id: str) -> list[StepOutput]: ...

    def step(self) -> list[StepOutput]: ...

    def rest(self) -> None:
        """Called when there is nothing to do for anybody: the time for what could wait."""

    def check_integrity(self) -> None: ...


def run(engine: SteppedEngine, channel: EngineChannel) -> None:
    """Serve until told to stop. Raises ``ChannelClosed`` when the server is gone, and what ``step`` raises."""
    while True:
        if not (messages := channel.receive_pending()) and not engine.has_work:
            engine.rest()
            engine.check_integrity()
            messages = channel.wait()
        outputs: list[StepOutput] = []
        for message in messages:
            if isinstance(message, Stop):
                return
            outputs += _handle(engine, message)
        if outputs:  # refusals and cancellations do not wait for a step
            channel.send(Outputs(tuple(outputs), engine.stats))
        if engine.has_work:
            outputs = engine.step()
            channel.send(Outputs(tuple(outputs), engine.stats))


def _handle(engine: SteppedEngine, message: Message) -> list[StepOutput]:
    match message:
        case Submit(request):
            return engine.add_request(request)
        case Cancel(request_id):
            return engine.cancel(request_id)
        case _:
            raise AssertionError(f"{type(message).__name__} is not for the engine")


def _make_engine(path: str | None, settings: dict[str, Any]) -> SteppedEngine:
    if path is None:
        from outrider.server.engine.engine import Engine
        from outrider.server.engine.settings import EngineSettings

        return Engine(EngineSettings(**settings))
    module, _, name = path.partition(":")
    engine: SteppedEngine = getattr(importlib.import_module(module), name)(settings)
    return engine


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after ``Stop`` or the server's end, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="outrider-engine", description="Started by the server, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="the server's process id")
    parser.add_argument("--settings", required=True, help="the engine's settings, a JSON object")
    parser.add_argument("--engine", help="module:callable that makes the engine from its settings")
    options = parser.parse_args(arguments)

    _outlive_signals_but_not_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine[%(process)d] %(levelname)s %(message)s")
    channel = EngineChannel(socket.socket(fileno=options.fd))
    try:
        return _serve(channel, lambda: _make_engine(options.engine, json.loads(options.settings)))
    except ChannelClosed:
        logger.info("The server is gone; leaving.")
        return 0
    finally:
        channel.close()


def _serve(channel: EngineChannel, make_engine: Callable[[], SteppedEngine]) -> int:
    try:
        engine = make_engine()
    except Exception as error:
        # Most often the user's own: the sentence says it all.
        if not isinstance(error, OSError | ValueError | UnsupportedCheckpoint):
            logger.exception("The engine could not start.")
        return _fail(channel, str(error) or f"The engine could not start: {type(error).__name__}.")
    channel.send(Ready(engine.info))
    try:
        run(engine, channel)
    except ChannelClosed:
        raise
    except Exception as error:
        logger.exception("The engine failed; this is a bug.")
        return _fail(channel, f"The engine failed: {type(error).__name__}: {error}.")
    return 0


def _fail(channel: EngineChannel, message: str) -> int:
    channel.send(Failed(message))
    channel.drain(_FAREWELL_S)
    return 1


def _outlive_signals_but_not_parent(parent_pid: int) -> None:
    # Ctrl-C and service managers signal the whole group, but running answers may still be drained: the server decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere the closed socket is noticed after the running step
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
