"""Messages and frames: nothing is lost or changed, nothing malformed gets through, nobody blocks."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass
from enum import Enum
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.engine import messages as messages_module
from outrider.server.engine.channel import (
    MAX_FRAME_BYTES,
    ChannelClosed,
    EngineChannel,
    FrameDecoder,
    ServerChannel,
    encode_frame,
)
from outrider.server.engine.messages import (
    Cancel,
    Failed,
    Message,
    MessageError,
    Outputs,
    Ready,
    Stop,
    Submit,
    decode,
    encode,
)
from outrider.server.engine.request import EngineStats, FinishReason, ModelInfo, Request, StepOutput
from outrider.verify.sampling_params import MAX_SEED, SamplingParams, TokenLogprob

PARAMS = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=MAX_SEED,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={5: -100.0, 0: 1.5},
    stop=("\n", "é🙂"),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    logprobs=3,
    max_draft_tokens=0,
)
OUTPUT = StepOutput(
    request_id="r1",
    token_ids=(1, 2),
    text="é🙂",
    logprobs=(TokenLogprob(1, -0.25, ((1, -0.25), (9, -2.5))), TokenLogprob(2, float("-inf"))),
    num_draft_tokens=4,
    num_accepted=1,
    draft_source="suffix",
    draft_ms=0.5,
    verify_ms=12.25,
    num_cached_tokens=16,
    queue_s=0.25,
    finish_reason=FinishReason.LENGTH,
    error="why",
)
MESSAGES: list[Message] = [
    Submit(Request("r1", (0, 49151), PARAMS, tenant="t", generate=False, prediction_token_ids=(7, 0))),
    Cancel("r1"),
    Stop(),
    Ready(ModelInfo("m", 49152, 8192, "reference", "suffix", 8, "d", "Q4_1", "Q8_0")),
    Outputs((OUTPUT, StepOutput("r2")), EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, 1.5)),
    Failed("because"),
]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    arrived = decode(encode(message))
    assert arrived == message
    assert repr(arrived) == repr(message)  # equality forgives a str for a StrEnum and a list for nothing


@pytest.mark.parametrize("value", [PARAMS, OUTPUT, MESSAGES[0].request, TokenLogprob(1, -0.25, ((1, -0.5),))])  # type: ignore[union-attr]
def test_the_examples_leave_no_field_at_its_default(value: Any) -> None:
    for field in fields(value):
        assert getattr(value, field.name) != field.default, f"{field.name} would not be missed if it did not cross"


def test_a_new_field_crosses_by_itself_and_a_new_type_is_refused() -> None:
    extended = make_dataclass("Extended", [("more", int, 0)], bases=(TokenLogprob,), frozen=True)
    codec = messages_module._codec(extended)
    assert codec is not None
    assert codec.decode(codec.encode(extended(1, -0.5, (), 7))) == extended(1, -0.5, (), 7)

    class Colour(Enum):
        RED = 1

    for kind in (Colour, set[int], bytes, Any):
        with pytest.raises(TypeError, match="no encoding"):
            messages_module._codec(make_dataclass("Unknown", [("more", kind)]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_requests_and_outputs_arrive_as_they_were(data: st.DataObject) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    ids = st.lists(st.integers(0, 2**32), max_size=20).map(tuple)
    number = st.floats(allow_nan=False)
    logprob = st.builds(
        TokenLogprob, st.integers(), number, st.lists(st.tuples(st.integers(0, 9), number), max_size=3).map(tuple)
    )
    logprob = logprob.filter(lambda entry: -(2**63) <= entry.token_id < 2**64)
    output = st.builds(
        StepOutput,
        request_id=text,
        token_ids=ids,
        text=text,
        logprobs=st.lists(logprob, max_size=3).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        error=st.none() | text,
    )
    params = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**40),
        seed=st.integers(0, MAX_SEED),
        logit_bias=st.dictionaries(st.integers(0, 2**32), st.floats(-100, 100), max_size=4),
        logprobs=st.none() | st.integers(0, 20),
    )
    message = data.draw(
        st.builds(Submit, st.builds(Request, text, ids, params, text))
        | st.builds(lambda outputs: Outputs(tuple(outputs), EngineStats(*range(9))), st.lists(output, max_size=4))
    )
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "request_",
    [
        Request("r", (2**64,), PARAMS),
        Request("r", (1,), SamplingParams(max_tokens=10**30)),
        Request("r", (1,), SamplingParams(max_tokens=1, stop=("\ud800",))),
    ],
    ids=["token id", "max_tokens", "surrogate"],
)
def test_what_msgpack_cannot_hold_is_refused_by_the_sender(request_: Request) -> None:
    with pytest.raises(MessageError, match="cannot be encoded"):
        encode(Submit(request_))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb(1),
        msgpack.packb([99]),
        msgpack.packb(["x"]),
        msgpack.packb([1]),
        msgpack.packb([1, "a", "b"]),
        msgpack.packb([2]) + b"\x00",
        msgpack.packb([1, {"a": 1}]),
        msgpack.packb([1, msgpack.ExtType(4, b"x")]),
        msgpack.packb([0, ["r", [1], [0] * 16, "", True]]),
        msgpack.packb([0, 5]),
        msgpack.packb([4, [["r1", [], "", [], 0, 0, 0, None]], [0] * 9]),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
)
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode(payload)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_frames_do_not_care_how_the_bytes_are_cut(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(map(encode_frame, sent))
    places = sorted(min(cut, len(data)) for cut in cuts)
    decoder = FrameDecoder()
    received = []
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        received += decoder.feed(data[start:end])
    assert received == sent


def test_a_frame_that_claims_too_much_is_refused_before_it_is_awaited() -> None:
    with pytest.raises(MessageError, match="too large"):
        FrameDecoder().feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_a_message_too_large_for_a_frame_is_refused_by_the_sender() -> None:
    with pytest.raises(MessageError, match="too large"):
        encode_frame(Failed("x" * MAX_FRAME_BYTES))


def test_the_engine_gets_all_that_waits_and_does_not_wait_itself(sockets: tuple[socket.socket, socket.socket]) -> None:
    channel = EngineChannel(sockets[1])
    assert channel.receive_pending() == []
    for message in MESSAGES[:3]:
        sockets[0].sendall(encode_frame(message))
    sockets[0].sendall(encode_frame(MESSAGES[3])[:-1])
    assert channel.receive_pending() == MESSAGES[:3]
    assert channel.receive_pending() == []
    sockets[0].sendall(encode_frame(MESSAGES[3])[-1:])
    assert channel.wait() == [MESSAGES[3]]


def test_an_idle_engine_wakes_for_a_message(sockets: tuple[socket.socket, socket.socket]) -> None:
    timer = threading.Timer(0.05, sockets[0].sendall, [encode_frame(Cancel("r"))])
    timer.start()
    assert EngineChannel(sockets[1]).wait() == [Cancel("r")]
    timer.join()


def test_a_server_that_does_not_read_blocks_no_step_and_gets_everything_later(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    channel = EngineChannel(theirs)
    sent = [Failed(f"{i} {'x' * 10_000}") for i in range(300)]  # far more than the socket holds
    for message in sent:
        channel.send(message)
    received: list[Message] = []
    decoder = FrameDecoder()

    def read() -> None:
        while len(received) < len(sent):
            received.extend(decoder.feed(ours.recv(65536)))
        ours.sendall(encode_frame(Stop()))

    reader = threading.Thread(target=read)
    reader.start()
    assert channel.wait() == [Stop()]  # an idle engine goes on sending
    reader.join()
    assert received == sent


def test_drain_sends_the_rest_or_gives_up(sockets: tuple[socket.socket, socket.socket]) -> None:
    channel = EngineChannel(sockets[1])
    channel.send(Failed("x" * 3_000_000))
    channel.drain(0.02)  # nobody reads: it returns
    received: list[Message] = []

    def read() -> None:
        decoder = FrameDecoder()
        while not received:
            received.extend(decoder.feed(sockets[0].recv(65536)))

    reader = threading.Thread(target=read)
    reader.start()
    channel.drain(30.0)
    reader.join()
    assert received == [Failed("x" * 3_000_000)]


@pytest.mark.parametrize("act", ["receive_pending", "wait", "send"])
def test_the_engine_learns_that_the_server_is_gone(act: str, sockets: tuple[socket.socket, socket.socket]) -> None:
    channel = EngineChannel(sockets[1])
    sockets[0].close()
    with pytest.raises(ChannelClosed):
        channel.send(Stop()) if act == "send" else getattr(channel, act)()


async def test_both_sides_talk(sockets: tuple[socket.socket, socket.socket]) -> None:
    received: asyncio.Queue[Message] = asyncio.Queue()
    server = await ServerChannel.open(sockets[0], received.put_nowait)
    engine = EngineChannel(sockets[1])
    for message in MESSAGES:
        server.send_frame(encode_frame(message))
        engine.send(message)
    assert engine.receive_pending() == MESSAGES
    assert [await received.get() for _ in MESSAGES] == MESSAGES
    engine.close()
    assert await server.closed is None


@dataclass
class Collector:
    messages: list[Message]
    channel: ServerChannel | None = None

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        assert self.channel is not None
        self.channel.abort()


async def test_nothing_arrives_after_abort(sockets: tuple[socket.socket, socket.socket]) -> None:
    collector = Collector([])
    collector.channel = await ServerChannel.open(sockets[0], collector)
    EngineChannel(sockets[1]).send(Cancel("a"))
    sockets[1].setblocking(True)
    sockets[1].sendall(encode_frame(Cancel("b")) + encode_frame(Cancel("c")))
    await collector.channel.closed
    await asyncio.sleep(0)
    assert collector.messages == [Cancel("a")]


async def test_a_channel_that_gets_nonsense_closes_and_says_so(sockets: tuple[socket.socket, socket.socket]) -> None:
    received: list[Message] = []
    server = await ServerChannel.open(sockets[0], received.append)
    sockets[1].sendall(struct.pack(">I", 1) + b"\xc1")
    assert isinstance(await server.closed, MessageError)
    assert received == []
