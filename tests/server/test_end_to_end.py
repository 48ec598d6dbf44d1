"""The whole line: the console script, real sockets, the stock openai client, our own client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_runs import greedy, make_engine, run_one
from live_server import LiveServer, start_server
from openai import AsyncOpenAI, OpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from outrider_client import AsyncClient, ResponseFailed

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


def stock_client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.http_url}/v1", api_key="unused")


def until_terminal(connection: Any) -> list[Any]:
    events = []
    for event in connection:
        events.append(event)
        if event.type in TERMINAL:
            return events
    raise AssertionError("the connection ended before the response")


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def metrics_of(server: LiveServer) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{server.http_url}/metrics")).text


async def settled_health(server: LiveServer) -> dict[str, Any]:
    """The health once nothing runs."""
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            health: dict[str, Any] = (await client.get(f"{server.http_url}/health")).json()
            metrics = await metrics_of(server)
            idle = "outrider:num_requests_running 0.0" in metrics and "outrider:num_requests_waiting 0.0" in metrics
            if idle and health["status"] == "ready":
                return health
            await asyncio.sleep(0.05)


def test_the_stock_client_has_a_conversation_and_every_token_is_the_models(
    live_server: LiveServer, tiny_model: Path
) -> None:
    from outrider.verify.checkpoint.tokenizer import load_tokenizer

    with stock_client(live_server).responses.connect() as connection:
        ask: dict[str, Any] = {"temperature": 0, "max_output_tokens": 40}
        connection.response.create(input="Hello there", **ask)
        first = until_terminal(connection)
        connection.response.create(input="And then?", previous_response_id=first[-1].response.id, **ask)
        second = until_terminal(connection)

    assert [event.type for event in first][:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert first[-1].response.output_text == text_of(first)

    tokenizer = load_tokenizer(tiny_model)
    turn = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    engine = make_engine(tiny_model, drafter="none")
    assert text_of(first) == run_one(engine, greedy(tokenizer.encode(turn), max_tokens=40)).text
    turn += f"{text_of(first)}<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(second) == run_one(engine, greedy(tokenizer.encode(turn), max_tokens=40)).text

    usage = second[-1].response.usage
    assert usage.input_tokens == len(tokenizer.encode(turn))
    assert usage.input_tokens_details.cached_tokens > 0
    metrics = first[-1].response.metrics["speculative_decoding"]
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    assert metrics["num_accepted_draft_tokens"] > 0


async def test_two_lanes_stream_at_once_and_one_is_cancelled(live_server: LiveServer) -> None:
    client = AsyncOpenAI(base_url=f"{live_server.http_url}/v1", api_key="unused")
    async with client, client.responses.connect() as connection:
        for lane in ("a", "b"):
            create = {"type": "response.create", "input": lane, "max_output_tokens": 300, "ignore_eos": True}
            await connection.send({**create, "stream_id": lane})
        events: dict[str, list[Any]] = {"a": [], "b": []}
        async with asyncio.timeout(60):
            async for event in connection:
                events[event.stream_id].append(event)
                if event.type == "response.output_text.delta" and len(events["a"]) == 8:
                    await connection.send({"type": "response.cancel", "stream_id": "a"})
                if all(seen and seen[-1].type in TERMINAL for seen in events.values()):
                    break
    assert (events["a"][-1].type, events["a"][-1].response.status) == ("response.incomplete", "cancelled")
    assert events["b"][-1].response.incomplete_details.reason == "max_output_tokens"
    assert events["b"][-1].response.usage.output_tokens == 300
    assert 0 < events["a"][-1].response.usage.output_tokens < 300


DOCUMENTED_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_abc", "stream_id": "main"}, "previous_response_not_found"),
    ({"stream_id": "not a stream id"}, "invalid_stream_id"),
    ({"stream_id": "x" * 257}, "invalid_stream_id"),
    ({"model": "gpt-9"}, "model_not_found"),
    ({"input": "word " * 2000}, "context_length_exceeded"),
    ({"temperature": 9}, "invalid_value"),
    ({"temperature": "warm"}, "invalid_type"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter"),
    ({"truncation": "auto"}, "unsupported_value"),
    ({"temprature": 1}, "unknown_parameter"),
    ({"input": None}, "missing_required_parameter"),
    ({"input": "lone \ud800 surrogate"}, "invalid_value"),
]


def test_the_stock_client_understands_every_documented_error_and_goes_on(live_server: LiveServer) -> None:
    with stock_client(live_server).responses.connect() as connection:
        for fields, code in DOCUMENTED_ERRORS:
            connection.send({"type": "response.create", "input": "x", **fields})
            error = until_terminal(connection)[-1]
            assert (error.type, error.error.code) == ("error", code)
            assert error.error.message
            assert error.stream_id == (fields.get("stream_id") if code == "previous_response_not_found" else None)
        for event, code in [
            ({"type": "response.cancel", "response_id": "resp_no"}, "response_not_found"),
            ({"type": "response.sing"}, "unknown_event_type"),
        ]:
            connection.send(event)
            assert until_terminal(connection)[-1].error.code == code
        connection.send({"type": "response.steer", "previous_response_id": "resp_no", "input": "left"})
        assert connection.recv().error.code == "steering_not_supported"
        for index in range(31):  # "main" was the first
            connection.response.create(input="x", stream_id=f"lane{index}", max_output_tokens=1)
            assert until_terminal(connection)[-1].type == "response.incomplete"
        connection.response.create(input="x", stream_id="one too many", max_output_tokens=1)
        assert until_terminal(connection)[-1].error.code == "invalid_stream_id"
        connection.response.create(input="x", stream_id="one.too.many", max_output_tokens=1)
        assert until_terminal(connection)[-1].error.code == "websocket_stream_limit_reached"
        connection.send({"type": "response.create", "input": "x", "max_output_tokens": 3, "ignore_eos": True})
        assert until_terminal(connection)[-1].response.usage.output_tokens == 3


def test_an_old_connection_is_told_to_reconnect_and_never_cut_off_within_an_answer(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = start_server(tiny_model, tmp_path / "log", "--kv-cache-mib", "8", "--max-age-s", "1")
    try:
        with stock_client(server).responses.connect() as connection:
            deadline = time.monotonic() + 1.5
            connection.send({"type": "response.create", "input": "on", "max_output_tokens": 900, "ignore_eos": True})
            events = until_terminal(connection)
            assert events[-1].response.usage.output_tokens == 900
            while time.monotonic() < deadline:
                time.sleep(0.05)
            assert connection.recv().error.code == "websocket_connection_limit_reached"
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001  # one of those after which the SDKs reconnect
    finally:
        assert server.stop() == 0


BAD_INPUT: list[tuple[Any, str, str | None]] = [
    ("{", "invalid_json", None),
    ('{"type": "response.create", "input": "x", "temperature": NaN}', "invalid_json", None),
    ('{"type": "response.create", "input": "x", "input": "y"}', "invalid_json", None),
    ("[" * 100_000, "invalid_json", None),
    ({"type": "response.destroy"}, "unknown_event_type", "type"),
    ({"type": "response.create", "input": 5}, "invalid_type", "input"),
    ({"type": "response.create", "input": "x", "temperature": True}, "invalid_type", "temperature"),
    ({"type": "response.create", "input": "x", "max_output_tokens": 2.5}, "invalid_type", "max_output_tokens"),
    ({"type": "response.create", "input": "x", "seed": 10**400}, "invalid_value", "seed"),
    ({"type": "response.create", "input": "x", "top_k": 2**70}, "invalid_value", "top_k"),
    ({"type": "response.create", "input": "x", "logit_bias": {"259": 1}}, "invalid_value", "logit_bias"),
    ({"type": "response.create", "input": "x", "stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
    ({"type": "response.create", "input": "word " * 2000}, "context_length_exceeded", "input"),
    ({"type": "response.create", "input": "x", "model": "gpt-9"}, "model_not_found", "model"),
    ('{"type": "response.create", "input": "\\ud800"}', "invalid_value", "input"),
    ({"type": "response.create", "input": "x", "previous_response_id": "resp_no"}, "previous_response_not_found",
     "previous_response_id"),
    ({"type": "response.create", "input": "x", "stream_id": ""}, "invalid_stream_id", "stream_id"),
    ({"type": "response.create", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "unsupported_value", "input[0].content[0].type"),
    ({"type": "response.create", "input": "x", "tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"type": "response.cancel", "response_id": "resp_no"}, "response_not_found", "response_id"),
    (json.dumps({"type": "response.create", "input": "x" * 20_000_000}), "message_too_large", None),
]  # fmt: skip


async def test_bad_input_gets_an_error_that_names_the_field_and_harms_no_other_stream(live_server: LiveServer) -> None:
    healthy = {"type": "response.create", "input": "tell", "stream_id": "healthy", "temperature": 0, "ignore_eos": True}
    async with connect(live_server.ws_url, max_size=None) as socket:
        expected = None
        for disturbed in (False, True):
            await socket.send(json.dumps({**healthy, "max_output_tokens": 500}))
            deltas, errors = [], []
            to_send = list(BAD_INPUT) if disturbed else []
            while True:
                event = json.loads(await asyncio.wait_for(socket.recv(), 60))
                if event["type"] == "error":
                    errors.append(event)
                elif event["type"] == "response.output_text.delta":
                    deltas.append(event["delta"])
                    if to_send:
                        frame = to_send.pop(0)[0]
                        await socket.send(frame if isinstance(frame, str) else json.dumps(frame))
                done = event.get("stream_id") == "healthy" and event["type"] in TERMINAL
                if done:
                    assert event["type"] == "response.incomplete", event
                    break
            if not disturbed:
                expected = "".join(deltas)
            else:
                assert "".join(deltas) == expected, "the healthy stream changed"
        while to_send or len(errors) < len(BAD_INPUT):
            if to_send:
                frame = to_send.pop(0)[0]
                await socket.send(frame if isinstance(frame, str) else json.dumps(frame))
            errors.append(json.loads(await asyncio.wait_for(socket.recv(), 60)))
    seen = [(error["error"]["code"], error["error"].get("param")) for error in errors]
    assert sorted(seen, key=str) == sorted([(code, param) for _, code, param in BAD_INPUT], key=str)


async def test_two_hundred_responses_with_cancels_and_disconnects_leave_nothing_running(
    live_server: LiveServer,
) -> None:
    rng = random.Random(3)

    async def one_connection(index: int) -> int:
        terminals = 0
        leaves_early = index % 5 == 4
        async with AsyncClient(live_server.ws_url) as client:

            async def one_response() -> None:
                nonlocal terminals
                stream = await client.respond(
                    "word " * rng.randrange(1, 100), max_output_tokens=rng.randrange(1, 120), ignore_eos=True
                )
                give_up_after = rng.choice([0, 1, 5, 1000])
                async with stream:
                    num_deltas = 0
                    async for _ in stream:
                        num_deltas += 1
                        if num_deltas > give_up_after:
                            stream.cancel()
                terminals += stream.response.status in ("completed", "incomplete", "cancelled")

            responses = asyncio.gather(*(one_response() for _ in range(10)), return_exceptions=True)
            if leaves_early:
                await asyncio.sleep(rng.random())
                responses.cancel()
                return 0
            failures = [result for result in await responses if isinstance(result, BaseException)]
            assert not failures, failures
        return terminals

    async with asyncio.timeout(110):
        counts = await asyncio.gather(*(one_connection(index) for index in range(20)))
    assert [count for index, count in enumerate(counts) if index % 5 != 4] == [10] * 16
    await settled_health(live_server)
    assert "outrider:kv_cache_usage_perc 0.0" in await metrics_of(live_server)


async def test_a_killed_engine_ends_every_response_once_and_the_next_request_works(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = start_server(tiny_model, tmp_path / "log", "--kv-cache-mib", "8")
    try:
        async with AsyncClient(server.ws_url) as client, asyncio.timeout(90):
            streams = [await client.respond("on", max_output_tokens=900, ignore_eos=True) for _ in range(4)]
            iterators = [aiter(stream) for stream in streams]
            for iterator in iterators:
                await anext(iterator)
            os.kill(server.engine_pid, signal.SIGKILL)
            for iterator, stream in zip(iterators, streams, strict=True):
                with pytest.raises(ResponseFailed, match="engine stopped"):
                    while True:
                        await anext(iterator)
                assert stream.response.status == "failed"
            stream = await client.respond("again", max_output_tokens=5, ignore_eos=True)
            assert (await stream.result()).usage.output_tokens == 5
        health = await settled_health(server)
        assert health["engine"]["num_restarts"] == 1
    finally:
        assert server.stop() == 0
