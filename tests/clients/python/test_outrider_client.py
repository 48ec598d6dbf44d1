"""The client against a real WebSocket server that speaks valid frames."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

import outrider_client as oc

WORDS = [f"word{i} " for i in range(6)]


class ScriptedServer:
    """Answers ``response.create`` with WORDS, one delta each, as the Responses dialect prescribes.

    ``input`` chooses what happens: "forever" streams until cancelled, "refuse" is refused, "fail" fails after the
    first word, "drop" ends the connection after the first word, "garbage" sends a frame that is no JSON.
    """

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.stored: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def handle(self, socket: ServerConnection) -> None:
        lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # its responses take turns
        async for frame in socket:
            event = json.loads(frame)
            if event["type"] == "response.cancel":
                self.cancelled.append(event["response_id"])
                self._tasks[event["response_id"]].cancel()
            else:
                self.created.append(event)
                response_id = f"resp_{len(self.created)}"
                self._tasks[response_id] = asyncio.create_task(
                    self._take_turn(lanes[event["stream_id"]], socket, event, response_id)
                )

    async def _take_turn(self, lane: asyncio.Lock, *request: Any) -> None:
        async with lane:
            with suppress(ConnectionClosed):
                await self._respond(*request)

    async def _respond(self, socket: ServerConnection, request: dict[str, Any], response_id: str) -> None:
        lane, text, number = request["stream_id"], "", 0

        async def send(kind: str, **fields: Any) -> None:
            nonlocal number
            frame = {"type": kind, "sequence_number": number, "stream_id": lane, **fields}
            number += 1
            await socket.send(json.dumps(frame))

        async def report(kind: str, status: str, **fields: Any) -> None:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            item = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content}
            fields |= {"id": response_id, "object": "response", "created_at": 1, "model": "m", "status": status}
            await send(kind, response={"output": [item] if text else [], **fields})

        parent = request.get("previous_response_id")
        if request["input"] == "refuse" or (parent is not None and parent not in self.stored):
            code = "invalid_value" if parent is None else "previous_response_not_found"
            error = {"type": "invalid_request_error", "code": code, "message": "No.", "param": "input"}
            await socket.send(json.dumps({"type": "error", "status": 400, "stream_id": lane, "error": error}))
            return
        await report("response.created", "in_progress")
        ending = ("response.completed", "completed")
        try:
            for word in self._words(request):
                text += word
                position = {"item_id": "msg", "output_index": 0, "content_index": 0}
                await send("response.output_text.delta", delta=word, logprobs=[], **position)
                await asyncio.sleep(0)
                if request["input"] == "garbage":
                    await socket.send("garbage")
                elif request["input"] == "drop":
                    await socket.close(1012, "restart")
                    return
                elif request["input"] == "fail":
                    await report("response.failed", "failed", error={"code": "server_error", "message": "died"})
                    return
        except asyncio.CancelledError:
            ending = ("response.incomplete", "cancelled")
        self.stored.add(response_id)
        usage = {"input_tokens": 5, "output_tokens": 6, "total_tokens": 11}
        counts = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3}
        by_source = {"prediction": {**counts, "num_accepted_tokens_per_pos": [2, 1]}, "odd": None}
        drafts = {**counts, "mean_acceptance_length": 2.5, "by_source": by_source, "draft_time_ms": 0.5}
        details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
        await report(
            *ending,
            usage={**usage, "input_tokens_details": {"cached_tokens": 4}, "output_tokens_details": details},
            metrics={"time_to_first_token_ms": 1.5, "speculative_decoding": drafts},
        )

    @staticmethod
    def _words(request: dict[str, Any]) -> Iterator[str]:
        if request.get("generate") is False:
            return
        yield from WORDS
        while request["input"] == "forever":
            yield "more "


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedServer, str]]:
    server = ScriptedServer()
    async with serve(server.handle, "127.0.0.1", 0) as listener:
        port = next(iter(listener.sockets)).getsockname()[1]
        yield server, f"ws://127.0.0.1:{port}/v1/responses"


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[ScriptedServer, oc.AsyncClient]]:
    async with scripted() as (server, url), oc.AsyncClient(url, **options) as client:
        yield server, client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("prediction", ["abc", {"type": "content", "content": "abc"}])
async def test_a_prediction_is_sent_in_the_standard_shape_and_its_counts_come_back(prediction: Any) -> None:
    async with connected() as (server, client):
        stream = await client.respond("Hello", prediction=prediction)
        await stream.result()
        assert server.created[0]["prediction"] == {"type": "content", "content": "abc"}
        assert stream.usage is not None
        assert (stream.usage.accepted_prediction_tokens, stream.usage.rejected_prediction_tokens) == (3, 1)


async def test_deltas_come_typed_and_in_order_and_the_end_brings_usage_and_metrics() -> None:
    async with connected() as (server, client):
        stream = await client.respond("Hello", max_output_tokens=64, seed=7)
        assert [delta.text async for delta in stream] == WORDS
        assert stream.response.status == "completed"
        assert stream.response.output_text == "".join(WORDS)
        assert stream.usage is not None
        assert (stream.usage.output_tokens, stream.usage.cached_tokens) == (6, 4)
        assert stream.metrics is not None
        assert stream.metrics.speculative_decoding is not None
        assert stream.metrics.speculative_decoding.mean_acceptance_length == 2.5
        assert stream.metrics.speculative_decoding.draft_time_ms == 0.5
        counts = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3}
        expected = oc.Drafts(**counts, num_accepted_tokens_per_pos=[2, 1])
        assert stream.metrics.speculative_decoding.by_source == {"prediction": expected}
    request = server.created[0]
    assert (request["input"], request["max_output_tokens"], request["seed"]) == ("Hello", 64, 7)
    assert "prediction" not in request
    assert server.cancelled == [], "an answer read to its end is not cancelled"


async def leave_by_break(stream: oc.ResponseStream) -> None:
    async for _ in stream:
        break


async def leave_by_exception(stream: oc.ResponseStream) -> None:
    async def fail() -> None:
        async for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def leave_by_task_cancel(stream: oc.ResponseStream) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_aclose(stream: oc.ResponseStream) -> None:
    await stream.aclose()


async def leave_with_block(stream: oc.ResponseStream) -> None:
    async with stream:
        pass


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_exception, leave_by_task_cancel, leave_by_aclose, leave_with_block]
)
async def test_leaving_cancels_that_response_and_nothing_else(
    leave: Callable[[oc.ResponseStream], Coroutine[Any, Any, None]],
) -> None:
    async with connected() as (server, client):
        left, other = await client.respond("forever"), await client.respond("forever")
        await leave(left)
        await until(lambda: server.cancelled == [left.id])
        assert (await left.result()).status == "cancelled"
        seen = 0
        async for _ in other:
            seen += 1
            if seen == 50:
                break
        assert seen == 50, "the other stream went on"


async def test_abandoning_a_request_before_it_is_accepted_cancels_it() -> None:
    async with connected(max_buffer=2**30) as (server, client):
        asking = asyncio.create_task(client.respond("forever"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.cancelled == ["resp_1"])


async def test_many_streams_at_once_each_get_their_own_answer() -> None:
    async with connected() as (_, client):
        streams = await asyncio.gather(*(client.respond(f"question {i}") for i in range(40)))
        answers = await asyncio.gather(*(stream.text() for stream in streams))
    assert answers == ["".join(WORDS)] * 40
    assert len({stream.id for stream in streams}) == 40


async def test_a_slow_reader_is_cancelled_while_its_neighbour_runs_on() -> None:
    async with connected(max_buffer=20_000) as (server, client):
        slow = await client.respond("forever")
        assert await (await client.respond("Hello")).text() == "".join(WORDS)
        await until(lambda: server.cancelled == [slow.id])
        with pytest.raises(oc.SlowConsumer, match="20000 characters"):
            await slow.text()
        assert await (await client.respond("Hello")).text() == "".join(WORDS)


async def test_events_gives_the_whole_lifecycle() -> None:
    async with connected() as (_, client):
        stream = await client.respond("Hello")
        kinds = [event.type async for event in stream.events()]
    assert kinds == ["response.created", *["response.output_text.delta"] * 6, "response.completed"]


async def test_a_refused_request_raises_where_it_was_asked_and_the_connection_lives_on() -> None:
    async with connected() as (_, client):
        with pytest.raises(oc.RequestRefused, match=r"No\.") as refused:
            await client.respond("refuse")
        assert (refused.value.code, refused.value.param, refused.value.status) == ("invalid_value", "input", 400)
        assert await (await client.respond("Hello")).text() == "".join(WORDS)


async def test_a_failed_response_raises_after_its_deltas() -> None:
    async with connected() as (_, client):
        stream = await client.respond("fail")
        deltas = aiter(stream)
        assert (await anext(deltas)).text == WORDS[0]
        with pytest.raises(oc.ResponseFailed, match="died"):
            await anext(deltas)
        assert stream.response.status == "failed"


@pytest.mark.parametrize(("ending", "error"), [("drop", oc.ConnectionLost), ("garbage", oc.ProtocolError)])
async def test_when_the_connection_ends_every_stream_raises_and_so_does_the_next_request(
    ending: str, error: type[oc.OutriderError]
) -> None:
    async with connected() as (_, client):
        first = await client.respond("forever")
        second = await client.respond(ending)
        async with asyncio.timeout(5):
            for stream in (first, second):
                with pytest.raises(error):
                    await stream.result()
            with pytest.raises(error):
                await client.respond("Hello")


async def test_a_lost_connection_tells_its_close_code() -> None:
    async with connected() as (_, client):
        with pytest.raises(oc.ConnectionLost, match="restart") as lost:
            await (await client.respond("drop")).text()
        assert lost.value.code == 1012


async def test_closing_the_client_ends_its_streams() -> None:
    async with scripted() as (_, url):
        client = await oc.AsyncClient(url).connect()
        stream = await client.respond("forever")
        reading = asyncio.create_task(stream.text())
        await client.aclose()
        with pytest.raises(oc.ClientClosed):
            await reading
        with pytest.raises(oc.ClientClosed):
            await client.respond("Hello")


async def test_no_server_is_a_sentence_with_the_url() -> None:
    async with scripted() as (_, url):
        pass
    with pytest.raises(oc.ConnectionFailed, match=url):
        await oc.AsyncClient(url).connect()
    with pytest.raises(oc.ConnectionFailed, match="htp"):
        await oc.AsyncClient("htp://nowhere").connect()


async def test_a_refused_handshake_tells_its_status() -> None:
    def refuse(connection: ServerConnection, request: Any) -> Any:
        assert request.headers["Authorization"] == "Bearer secret"
        return connection.respond(401, "who are you?\n")

    async def never(_: ServerConnection) -> None: ...

    async with serve(never, "127.0.0.1", 0, process_request=refuse) as listener:
        url = f"ws://127.0.0.1:{next(iter(listener.sockets)).getsockname()[1]}/"
        with pytest.raises(oc.ConnectionFailed, match="HTTP 401 who are you") as failed:
            await oc.AsyncClient(url, token="secret").connect()
        assert failed.value.status == 401


async def test_a_conversation_sends_only_what_is_new() -> None:
    async with connected() as (server, client):
        conversation = client.conversation(instructions="Be brief.", temperature=0)
        first = await conversation.respond("One?")
        await first.text()
        await (await conversation.respond("Two?", max_output_tokens=3)).text()
    turns = server.created
    assert [turn["input"][0]["content"] for turn in turns] == ["One?", "Two?"]
    assert "previous_response_id" not in turns[0]
    assert turns[1]["previous_response_id"] == first.id
    assert turns[0]["stream_id"] == turns[1]["stream_id"]
    assert all(turn["instructions"] == "Be brief." for turn in turns), "the server does not inherit them"
    assert turns[1]["max_output_tokens"] == 3


async def test_a_turn_waits_for_the_answer_before_it() -> None:
    async with connected() as (server, client):
        conversation = client.conversation()
        first = await conversation.respond("One?")
        await conversation.respond("Two?")
        assert first.response.status == "completed"
        assert await first.text() == "".join(WORDS), "and what was not read yet can still be read"
    assert server.created[1]["previous_response_id"] == first.id


async def test_a_conversation_the_server_forgot_is_sent_again_in_full() -> None:
    async with connected() as (server, client):
        conversation = client.conversation()
        async for _ in await conversation.respond("One?"):
            break
        server.stored.clear()
        await until(lambda: bool(server.cancelled))
        await until(lambda: bool(server.stored))
        server.stored.clear()
        assert await (await conversation.respond("Two?")).text() == "".join(WORDS)
    dialogue = server.created[-1]["input"]
    assert [item["role"] for item in dialogue] == ["user", "assistant", "user"]
    assert dialogue[1]["content"].startswith(WORDS[0]), "the answer as far as it came before the cancel"


async def test_prewarm_asks_for_no_output_and_gives_an_id_to_continue_from() -> None:
    async with connected() as (server, client):
        warm = await client.prewarm(instructions="A long prompt.")
        assert warm.status == "completed"
        assert warm.output_text == ""
        assert await (await client.respond("Go", previous_response_id=warm.id)).text() == "".join(WORDS)
    assert server.created[0]["generate"] is False


@contextmanager
def scripted_in_thread() -> Iterator[tuple[ScriptedServer, str]]:
    ready, stop, found = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with scripted() as (server, url):
            found.extend((server, url))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(5)
    try:
        yield found[0], found[1]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()


def test_the_synchronous_client_streams_breaks_and_converses() -> None:
    with scripted_in_thread() as (server, url), oc.Client(url) as client:
        stream = client.respond("Hello")
        assert [delta.text for delta in stream] == WORDS
        assert stream.usage is not None
        assert stream.usage.output_tokens == 6
        endless = client.respond("forever")
        for _ in endless:
            break
        assert endless.result().status == "cancelled"
        assert server.cancelled == [endless.id]
        conversation = client.conversation()
        conversation.respond("One?").text()
        assert conversation.respond("Two?").text() == "".join(WORDS)
        assert client.prewarm(instructions="x").status == "completed"
        with pytest.raises(oc.RequestRefused):
            client.respond("refuse")


def test_the_synchronous_client_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with scripted_in_thread() as (_, url):
        client = oc.Client(url).connect()
        client.close()
        client.close()
        with pytest.raises(oc.ClientClosed):
            client.respond("Hello")
    with pytest.raises(oc.ConnectionFailed):
        oc.Client(url).connect()
    assert set(threading.enumerate()) == before
