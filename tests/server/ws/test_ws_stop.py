"""Stopping: what runs finishes, what is new is refused, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from outrider.server.ws.settings import ServerSettings


async def start(port: int, prompt: str) -> ClientConnection:
    """A connection whose response has begun."""
    websocket = await connect(f"ws://127.0.0.1:{port}/v1/responses")
    await websocket.send(json.dumps({"type": "response.create", "input": prompt}))
    while json.loads(await websocket.recv())["type"] != "response.output_text.delta":
        pass
    return websocket


async def rest(websocket: ClientConnection) -> tuple[dict[str, Any], int]:
    """The last frame and the close code."""
    last: dict[str, Any] = {}
    try:
        while True:
            last = json.loads(await asyncio.wait_for(websocket.recv(), 15))
    except ConnectionClosed as closed:
        return last, closed.rcvd.code if closed.rcvd else 1006


async def test_draining_finishes_what_runs_and_refuses_what_is_new(serve: Any, engine: Any) -> None:
    engine.step_s = 0.02
    async with serve(ServerSettings(port=0, log_level="warning", drain_timeout_s=30.0)) as (server, port):
        websocket = await start(port, "x" * 150)
        idle = await connect(f"ws://127.0.0.1:{port}/v1/responses")
        server.request_stop()
        assert (await rest(idle))[1] == 1001
        async with httpx.AsyncClient() as http:
            health = await http.get(f"http://127.0.0.1:{port}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/v1/responses")
        assert refused.value.response.status_code == 503
        last, code = await rest(websocket)
        assert (last["type"], code) == ("response.completed", 1001)
        assert last["response"]["output"][0]["content"][0]["text"] == "x" * 150


async def test_a_response_too_long_for_the_drain_is_cancelled_with_its_terminal_event(serve: Any, engine: Any) -> None:
    engine.step_s = 0.01
    async with serve(ServerSettings(port=0, log_level="warning", drain_timeout_s=0.1)) as (server, port):
        websocket = await start(port, "forever")
        server.request_stop()
        last, code = await rest(websocket)
        assert (last["response"]["status"], code) == ("cancelled", 1001)
    assert not engine.running


SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("echo", sys.argv[1])
echo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(echo)
from outrider.server.ws.serve import make_server
from outrider.server.ws.settings import ServerSettings
engine = echo.EchoEngine()
engine.step_s = 0.01
make_server(engine, echo.CharacterPrompts(), ServerSettings(port=0, drain_timeout_s=60.0),
            on_started=lambda host, port: print(port, flush=True)).run()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_the_first_sigterm_drains_and_the_second_quits(num_signals: int) -> None:
    script = ["-c", SCRIPT, str(Path(__file__).parent / "conftest.py")]
    process = await asyncio.create_subprocess_exec(sys.executable, *script, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        websocket = await start(port, "x" * 60 if num_signals == 1 else "forever")
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
        last, code = await rest(websocket)
        if num_signals == 1:
            assert (last["type"], code) == ("response.completed", 1001)
        else:
            assert code == 1012
        exit_status = await asyncio.wait_for(process.wait(), 10)
        assert exit_status == (0 if num_signals == 1 else -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
