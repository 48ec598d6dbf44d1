"""The Responses WebSocket through a real socket: the stock client, big messages, silent clients, leaving."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from outrider.server.protocol.surroundings import ConnectionLimits
from outrider.server.ws.settings import ServerSettings

STANDARD: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


def settings(**fields: Any) -> ServerSettings:
    return ServerSettings(port=0, log_level="warning", drain_timeout_s=0.2, **fields)


def dial(port: int, **options: Any) -> connect:
    return connect(f"ws://127.0.0.1:{port}/v1/responses", max_size=None, **options)


async def send(websocket: ClientConnection, **event: Any) -> None:
    await websocket.send(json.dumps(event))


async def create(websocket: ClientConnection, input: Any, **fields: Any) -> None:
    await send(websocket, type="response.create", input=input, **fields)


async def receive(websocket: ClientConnection) -> dict[str, Any]:
    frame = json.loads(await asyncio.wait_for(websocket.recv(), 10))
    STANDARD.validate_python(frame, strict=True)
    return frame


async def until(websocket: ClientConnection, *types: str) -> list[dict[str, Any]]:
    frames = [await receive(websocket)]
    while frames[-1]["type"] not in (types or TERMINAL):
        frames.append(await receive(websocket))
    return frames


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(frame.get("delta", "") for frame in frames)


@asynccontextmanager
async def stock_connection(port: int) -> AsyncIterator[Any]:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused")
    async with client, client.responses.connect() as connection:
        yield connection


async def stock_until_terminal(connection: Any) -> list[Any]:
    events = []
    async for event in connection:
        events.append(event)
        if event.type in TERMINAL:
            return events
    raise AssertionError("the connection ended first")


async def test_the_stock_client_completes_two_turns(serve: Any) -> None:
    async with serve() as (_, port), stock_connection(port) as connection:
        await connection.response.create(model="echo", input="Hello world")
        events = await stock_until_terminal(connection)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello world"
        first = events[-1].response
        assert first.output_text == "Hello world"
        await connection.response.create(model="echo", input="again", previous_response_id=first.id)
        second = (await stock_until_terminal(connection))[-1].response
        assert second.output_text == "Hello world|Hello world|again"
        assert second.usage.output_tokens == len(second.output_text)
        assert second.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


async def test_the_stock_client_runs_two_lanes_at_once_and_cancels_one(serve: Any, engine: Any) -> None:
    engine.step_s = 0.002
    async with serve() as (_, port), stock_connection(port) as connection:
        await connection.response.create(model="echo", input="forever", stream_id="long")
        await connection.response.create(model="echo", input="short answer", stream_id="short")
        ended, deltas = {}, dict.fromkeys(("long", "short"), "")
        async for event in connection:
            if event.type == "response.output_text.delta":
                deltas[event.stream_id] += event.delta
            if event.type in TERMINAL:
                ended[event.stream_id] = event.response
                if event.stream_id == "short":
                    await connection.send({"type": "response.cancel", "stream_id": "long"})
                if len(ended) == 2:
                    break
        assert (ended["short"].status, deltas["short"]) == ("completed", "short answer")
        assert (ended["long"].status, ended["long"].output_text) == ("cancelled", deltas["long"])
        assert deltas["long"].startswith("forever")
        await eventually(lambda: not engine.running)


async def test_the_stock_client_reads_errors(serve: Any) -> None:
    async with serve() as (_, port), stock_connection(port) as connection:
        await connection.response.create(model="gpt-9", input="x", stream_id="a")
        error = (await stock_until_terminal(connection))[-1]
        assert (error.error.code, error.error.param, error.status) == ("model_not_found", "model", 404)
        assert error.stream_id == "a"


async def test_no_compression_and_no_subprotocol_is_negotiated(serve: Any) -> None:
    async with serve() as (_, port), dial(port) as websocket:  # this client offers compression
        assert "Sec-WebSocket-Extensions" not in websocket.response.headers
        assert websocket.subprotocol is None


@pytest.mark.parametrize("proto", [0, socket.IPPROTO_TCP])
async def test_no_event_waits_for_the_acknowledgement_of_the_one_before(serve: Any, proto: int) -> None:
    # asyncio sees to it only for sockets made with an explicit protocol, and create_server makes none of those.
    async with serve() as (server, _):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, proto)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = server.config
        accepting = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(  # as uvicorn's own startup makes it
                config=config, server_state=server.server_state, app_state=server.lifespan.state
            ),
            sock=listener,
        )
        async with accepting, connect(f"ws://127.0.0.1:{port}/v1/responses"):
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_message_over_the_limit_harms_no_running_response(serve: Any, engine: Any) -> None:
    engine.step_s = 0.005
    async with serve() as (_, port), dial(port) as websocket:
        await create(websocket, "a healthy stream, long enough", stream_id="healthy")
        await create(websocket, "x" * 20_000_000)
        frames = []
        while len([frame for frame in frames if frame["type"] in TERMINAL]) < 2:
            frames.append(await receive(websocket))
        assert [frame["error"]["code"] for frame in frames if frame["type"] == "error"] == ["message_too_large"]
        assert text_of(frames) == "a healthy stream, long enough"


async def test_a_message_over_the_frame_limit_ends_the_connection_with_1009(serve: Any) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        with pytest.raises(ConnectionClosed) as closed:
            await create(websocket, "x" * (33 * 2**20))
            await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_closing_in_mid_stream_leaves_no_error_behind(
    serve: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as (_, port):
        logging.getLogger("uvicorn").addHandler(caplog.handler)  # its records do not reach the root
        async with dial(port) as websocket:
            await create(websocket, "forever")
            await until(websocket, "response.output_text.delta")
            with pytest.raises(ConnectionClosed):
                await create(websocket, "x" * (33 * 2**20))
                while True:
                    await websocket.recv()
        await eventually(lambda: not engine.running)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_fault_of_the_server_ends_one_connection_with_1011(serve: Any, engine: Any) -> None:
    async with serve() as (_, port), dial(port) as other, dial(port) as websocket:
        # The engine answers with a token that cannot be spelled.
        await create(websocket, "unspeakable", include=["message.output_text.logprobs"])
        with pytest.raises(ConnectionClosed) as closed:
            await until(websocket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        await eventually(lambda: not engine.running)
        await create(other, "fine")
        assert text_of(await until(other)) == "fine"


async def test_long_prompts_are_built_beside_the_loop_and_keep_their_lane_order(serve: Any) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        await create(websocket, "x" * 15_000, max_output_tokens=3)
        await create(websocket, "short")
        assert text_of(await until(websocket)) == "xxx"
        assert text_of(await until(websocket)) == "short"


@pytest.mark.parametrize("prompt", ["refuse me", "break the template", "break the template" + "x" * 10_000])
async def test_a_template_that_fails_ends_one_request_only(serve: Any, prompt: str) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        await create(websocket, prompt)
        assert (await receive(websocket))["error"]["code"] == "invalid_prompt"
        await create(websocket, "fine")
        assert text_of(await until(websocket)) == "fine"


async def test_the_engines_refusals_and_failures_reach_the_client(serve: Any, engine: Any) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        engine.overloaded = True
        await create(websocket, "x")
        error = (await receive(websocket))["error"]
        assert (error["code"], error["headers"]) == ("server_overloaded", {"retry-after": "2"})
        engine.overloaded = False
        await create(websocket, "die")
        failed = (await until(websocket))[-1]
        assert (failed["type"], failed["response"]["error"]["message"]) == ("response.failed", "The engine died.")
        engine.state = "stopped"
        await create(websocket, "x")
        assert (await receive(websocket))["error"]["code"] == "engine_unavailable"


async def test_binary_frames_and_many_pipelined_messages_are_all_answered(serve: Any) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        for index in range(40):
            await websocket.send(json.dumps({"type": "response.create", "input": f"n{index}"}).encode())
        answers = [text_of(await until(websocket)) for _ in range(40)]
        assert answers == [f"n{index}" for index in range(40)]


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_leaving_cancels_all_of_the_connection(serve: Any, engine: Any, leave: str) -> None:
    engine.step_s = 0.005
    async with serve() as (_, port):
        websocket = await dial(port)
        for stream_id in ("a", "b"):
            await create(websocket, "forever", stream_id=stream_id)
        await until(websocket, "response.output_text.delta")
        if leave == "close":
            await websocket.close()
        else:
            websocket.transport.abort()
        await eventually(lambda: len(engine.requests) == 2 and not engine.running)


async def test_a_client_that_never_reads_is_cut_off_and_delays_nobody(serve: Any, engine: Any) -> None:
    # A canary for the socket protocol too: with the kernel's default buffers, nothing would be noticed.
    limits = ConnectionLimits(max_outbox_bytes=10_000)
    async with serve(settings(limits=limits)) as (server, port):
        reader, writer = await raw_client(port)
        payload = json.dumps({"type": "response.create", "input": "é" * 100 + "forever", "max_output_tokens": 10**6})
        writer.write(masked_frame(0x1, payload.encode()))
        await eventually(lambda: len(engine.running) == 1)
        async with dial(port) as other:
            for _ in range(3):
                await create(other, "prompt and quick")
                assert text_of(await until(other)) == "prompt and quick"
        await eventually(lambda: not engine.running)
        hub = server.config.app.state.hub
        assert hub.metrics.registry.get_sample_value("outrider:slow_consumer_closes_total") == 1
        received = b""
        while chunk := await asyncio.wait_for(reader.read(65536), 10):
            received += chunk
        assert received.endswith(b"\x88\x19" + (1013).to_bytes(2, "big") + b"client reads too slowly")
        writer.close()


async def test_a_client_that_pings_and_never_reads_is_cut_off(serve: Any) -> None:
    async with serve() as (server, port):
        _, writer = await raw_client(port)
        ping = masked_frame(0x9, b"x" * 125) * 500
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(ping)
                    await writer.drain()
        writer.close()
        await eventually(lambda: not server.server_state.connections)


async def raw_client(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket client with small buffers that reads only when told to."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(
        b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    return reader, writer


def masked_frame(opcode: int, payload: bytes) -> bytes:
    """A client's frame whose mask is zero, which leaves the payload as it is."""
    length = len(payload)
    head = bytes([0x80 | length]) if length < 126 else bytes([0x80 | 126]) + length.to_bytes(2, "big")
    return bytes([0x80 | opcode]) + head + bytes(4) + payload


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("https://app.example", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("https://app.example.evil", False),
        ("null", False),
        ("http://[", False),
    ],
)
async def test_only_known_pages_may_connect(serve: Any, origin: str | None, allowed: bool) -> None:
    async with serve(settings(allow_origins=("https://app.example",))) as (_, port):
        if allowed:
            async with dial(port, origin=origin):
                return
        with pytest.raises(InvalidStatus) as refused:
            await dial(port, origin=origin)
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body)["error"]["code"] == "origin_not_allowed"


async def test_a_page_whose_name_was_pointed_at_this_machine_may_not_connect(serve: Any) -> None:
    async with serve(settings()) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /v1/responses HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n"
            b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b" 403 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_other_websocket_paths_are_not_found(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as (_, port):
        logging.getLogger("uvicorn").addHandler(caplog.handler)  # its records do not reach the root
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/v1/realtime")
        assert refused.value.response.status_code == 404
        assert "/v1/responses" in json.loads(refused.value.response.body)["error"]["message"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("length", [6, 50_000])  # the second is made into tokens in a thread
async def test_a_prediction_travels_with_its_request_and_is_counted_in_the_usage(
    serve: Any, engine: Any, length: int
) -> None:
    async with serve() as (_, port), dial(port) as websocket:
        await create(websocket, "abcdef", prediction={"type": "content", "content": "x" * length})
        details = (await until(websocket))[-1]["response"]["usage"]["output_tokens_details"]
    assert engine.requests[0].prediction_token_ids == (ord("x"),) * min(length, 20_000)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 4)
