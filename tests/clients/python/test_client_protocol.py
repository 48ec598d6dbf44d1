"""The client's protocol core: frames in, frames out, no socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider_client.errors import (
    ConnectionLimitReached,
    ConnectionLost,
    PreviousResponseNotFound,
    ProtocolError,
    RequestRefused,
    ResponseFailed,
    SlowConsumer,
)
from outrider_client.events import DraftCounts, Event, TextDelta, parse_event
from outrider_client.lanes import MAX_LANES, NUM_AUTOMATIC_LANES
from outrider_client.protocol import ClientProtocol, Exchange


def lifecycle(kind: str, lane: str, response_id: str, **response: Any) -> str:
    response = {"id": response_id, "object": "response", "status": "in_progress", "output": [], **response}
    return json.dumps({"type": f"response.{kind}", "sequence_number": 0, "stream_id": lane, "response": response})


def delta(lane: str, text: str) -> str:
    fields = {"item_id": "msg", "output_index": 0, "content_index": 0, "logprobs": []}
    return json.dumps({"type": "response.output_text.delta", "stream_id": lane, "delta": text, **fields})


def error(lane: str | None, code: str) -> str:
    fields = {"error": {"type": "invalid_request_error", "code": code, "message": "No.", "param": "input"}}
    return json.dumps({"type": "error", "status": 400, **fields, **({"stream_id": lane} if lane else {})})


def texts(exchange: Exchange) -> list[str]:
    found = []
    while (event := exchange.take()) is not None:
        if isinstance(event, TextDelta):
            found.append(event.text)
    return found


def sent(protocol: ClientProtocol) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in protocol.frames_to_send()]


def test_create_sends_the_given_fields_flat_and_leaves_out_those_that_are_none() -> None:
    protocol = ClientProtocol()
    protocol.create({"input": "hi", "seed": 0, "instructions": None}, lane="main")
    assert sent(protocol) == [{"type": "response.create", "input": "hi", "seed": 0, "stream_id": "main"}]
    assert sent(protocol) == []


def test_interleaved_lanes_keep_their_deltas_apart() -> None:
    protocol = ClientProtocol()
    a, b = protocol.create({}), protocol.create({})
    assert a.lane != b.lane
    for frame in (
        lifecycle("created", a.lane, "r1"),
        lifecycle("created", b.lane, "r2"),
        delta(b.lane, "B"),
        delta(a.lane, "A"),
        delta(b.lane, "b"),
    ):
        protocol.receive(frame)
    assert (texts(a), texts(b)) == (["A"], ["B", "b"])


def test_responses_on_one_lane_take_turns_even_when_both_are_created_at_once() -> None:
    protocol = ClientProtocol()
    first, second = protocol.create({}, lane="main"), protocol.create({}, lane="main")
    for frame in (
        lifecycle("created", "main", "r1"),
        lifecycle("created", "main", "r2"),
        lifecycle("queued", "main", "r2", status="queued"),
        delta("main", "one"),
        lifecycle("completed", "main", "r1", status="completed"),
        delta("main", "two"),
        lifecycle("completed", "main", "r2", status="completed"),
    ):
        protocol.receive(frame)
    assert (texts(first), texts(second)) == (["one"], ["two"])
    assert first.is_done
    assert second.is_done


def test_a_cancel_before_the_response_has_an_id_is_sent_once_it_has_one() -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({}, lane="main")
    sent(protocol)
    protocol.cancel(exchange)
    assert sent(protocol) == []
    protocol.receive(lifecycle("created", "main", "r1"))
    assert sent(protocol) == [{"type": "response.cancel", "response_id": "r1", "stream_id": "main"}]


def test_a_cancel_is_sent_once_and_never_after_the_end() -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({}, lane="main")
    protocol.receive(lifecycle("created", "main", "r1"))
    protocol.receive(delta("main", "unread"))
    sent(protocol)
    protocol.cancel(exchange)
    protocol.cancel(exchange)
    assert len(sent(protocol)) == 1
    protocol.receive(delta("main", "late"))
    protocol.receive(lifecycle("incomplete", "main", "r1", status="cancelled"))
    protocol.cancel(exchange)
    assert sent(protocol) == []
    assert texts(exchange) == []
    assert exchange.response is not None
    assert exchange.response.status == "cancelled"


def test_a_refusal_ends_the_request_that_was_not_accepted_and_not_the_running_one() -> None:
    protocol = ClientProtocol()
    running, refused = protocol.create({}, lane="main"), protocol.create({}, lane="main")
    protocol.receive(lifecycle("created", "main", "r1"))
    assert protocol.receive(error("main", "invalid_value")) == [refused]
    assert isinstance(refused.error, RequestRefused)
    assert refused.error.param == "input"
    protocol.receive(delta("main", "still here"))
    assert texts(running) == ["still here"]
    assert running.error is None


def test_an_error_ends_a_running_response_and_its_late_failure_hits_nobody_else() -> None:
    protocol = ClientProtocol()
    running = protocol.create({}, lane="main")
    protocol.receive(lifecycle("created", "main", "r1"))
    protocol.receive(error("main", "server_error"))
    assert running.is_done
    assert isinstance(running.error, RequestRefused)
    following = protocol.create({}, lane="main")
    assert protocol.receive(delta("main", "late")) == []
    assert protocol.receive(lifecycle("failed", "main", "r1", status="failed")) == []
    assert not following.is_done


def test_an_error_without_a_lane_ends_a_lone_request_and_no_one_of_several() -> None:
    lone = ClientProtocol()
    exchange = lone.create({})
    lone.receive(error(None, "invalid_json"))
    assert exchange.is_done
    several = ClientProtocol()
    exchanges = [several.create({}), several.create({})]
    assert several.receive(error(None, "invalid_json")) == []
    assert not any(e.is_done for e in exchanges)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("previous_response_not_found", PreviousResponseNotFound),
        ("websocket_connection_limit_reached", ConnectionLimitReached),
        ("something_new", RequestRefused),
    ],
)
def test_error_codes_become_types(code: str, kind: type[RequestRefused]) -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({}, lane="main")
    protocol.receive(error("main", code))
    assert type(exchange.error) is kind
    assert str(exchange.error) == "No."
    assert exchange.error.code == code
    assert exchange.error.status == 400


def test_a_flat_error_frame_is_understood_too() -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({}, lane="main")
    frame = {"type": "error", "code": "invalid_value", "message": "Bad.", "param": "seed", "stream_id": "main"}
    protocol.receive(json.dumps(frame))
    assert isinstance(exchange.error, RequestRefused)
    assert (str(exchange.error), exchange.error.code, exchange.error.param) == ("Bad.", "invalid_value", "seed")


def test_a_failed_response_is_an_error_that_holds_the_response() -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({}, lane="main")
    failure = {"code": "server_error", "message": "engine died"}
    protocol.receive(lifecycle("failed", "main", "r1", status="failed", error=failure))
    assert isinstance(exchange.error, ResponseFailed)
    assert str(exchange.error) == "engine died"
    assert exchange.error.response.id == "r1"


def test_a_server_without_lanes_is_understood_while_one_response_runs() -> None:
    protocol = ClientProtocol()
    exchange = protocol.create({})
    for frame in (lifecycle("created", exchange.lane, "r1"), delta(exchange.lane, "x")):
        fields = json.loads(frame)
        del fields["stream_id"]
        protocol.receive(json.dumps(fields))
    assert texts(exchange) == ["x"]


@pytest.mark.parametrize(
    "frame",
    [
        "not json",
        b"\xff",
        "[]",
        '{"no": "type"}',
        '{"type": 3}',
        '{"type": "response.created"}',
        '{"type": "response.created", "response": {}}',
        '{"type": "response.output_text.delta", "delta": null}',
    ],
)
def test_what_is_no_event_is_a_protocol_error(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        ClientProtocol().receive(frame)


def test_unknown_events_and_fields_are_kept_and_harm_nothing() -> None:
    frame = {"type": "outrider:news", "sequence_number": 4, "surprise": [1]}
    event = parse_event(frame)
    assert type(event) is Event
    assert event.type == "outrider:news"
    assert event.raw["surprise"] == [1]
    response = {"id": "r1", "usage": {"input_tokens": 3, "novel": 1}, "metrics": {"novel": {}}, "novel": True}
    parsed = parse_event({"type": "response.completed", "response": response, "novel": None})
    assert parsed.response.usage.input_tokens == 3  # type: ignore[attr-defined]
    assert parsed.response.raw["novel"] is True  # type: ignore[attr-defined]


def test_a_delta_tells_what_of_it_was_drafted_if_the_server_says() -> None:
    counts = {"num_tokens": 4, "num_draft_tokens": 5, "num_accepted": 3}
    event = parse_event(json.loads(delta("main", "four tokens at once")) | {"outrider": counts})
    assert event.draft == DraftCounts(num_tokens=4, num_draft_tokens=5, num_accepted=3)  # type: ignore[attr-defined]
    assert parse_event(json.loads(delta("main", "x"))).draft is None  # type: ignore[attr-defined]


def test_a_stream_left_unread_is_cancelled_at_the_bound_and_others_are_not() -> None:
    protocol = ClientProtocol(max_buffer=1000)
    slow, quick = protocol.create({}), protocol.create({})
    protocol.receive(lifecycle("created", slow.lane, "r1"))
    protocol.receive(lifecycle("created", quick.lane, "r2"))
    sent(protocol)
    for _ in range(20):
        protocol.receive(delta(slow.lane, "s"))
        protocol.receive(delta(quick.lane, "q"))
        assert texts(quick) == ["q"]
    assert sent(protocol) == [{"type": "response.cancel", "response_id": "r1", "stream_id": slow.lane}]
    kept = texts(slow)
    assert 0 < len(kept) < 20, "what fitted can still be read"
    assert isinstance(slow.error, SlowConsumer)
    assert quick.error is None
    protocol.receive(lifecycle("incomplete", slow.lane, "r1", status="cancelled"))
    assert isinstance(slow.error, SlowConsumer)
    assert slow.is_done


def test_a_lost_connection_ends_every_exchange_with_an_error_of_its_own() -> None:
    protocol = ClientProtocol()
    exchanges = [protocol.create({}) for _ in range(3)]
    assert protocol.connection_lost(lambda: ConnectionLost("gone")) == exchanges
    assert all(e.is_done and isinstance(e.error, ConnectionLost) for e in exchanges)
    assert len({id(e.error) for e in exchanges}) == 3


def test_lanes_are_reused_so_that_the_server_never_sees_too_many() -> None:
    protocol = ClientProtocol()
    for number in range(100):
        exchange = protocol.create({}, lane=None)
        protocol.receive(lifecycle("completed", exchange.lane, f"r{number}", status="completed"))
    many = [protocol.create({}) for _ in range(50)]
    lanes = {frame["stream_id"] for frame in sent(protocol)}
    assert len(lanes) == NUM_AUTOMATIC_LANES
    busiest = max(sum(e.lane == lane for e in many) for lane in lanes)
    assert busiest == -(-50 // NUM_AUTOMATIC_LANES), "more responses than lanes spread evenly"


def test_a_continuation_runs_where_its_parent_ran_and_that_lane_is_the_last_to_be_reused() -> None:
    protocol = ClientProtocol()
    parent = protocol.create({})
    protocol.receive(lifecycle("completed", parent.lane, "parent", status="completed"))
    for number in range(NUM_AUTOMATIC_LANES - 1):
        other = protocol.create({})
        assert other.lane != parent.lane
        protocol.receive(lifecycle("completed", other.lane, f"r{number}", status="completed"))
    assert protocol.create({"previous_response_id": "parent"}).lane == parent.lane
    assert protocol.create({"previous_response_id": "parent"}).lane != parent.lane, "it is busy: a fork"


def test_a_new_response_takes_a_free_lane_and_of_these_the_one_used_longest_ago() -> None:
    protocol = ClientProtocol()
    exchanges = [protocol.create({}) for _ in range(NUM_AUTOMATIC_LANES)]
    last = exchanges[-1]
    protocol.receive(lifecycle("completed", last.lane, "r15", status="completed"))
    assert protocol.create({}).lane == last.lane, "the others are busy"
    for number, exchange in enumerate(exchanges[:3]):
        protocol.receive(lifecycle("completed", exchange.lane, f"r{number}", status="completed"))
    continued = protocol.create({"previous_response_id": "r0"})
    protocol.receive(lifecycle("completed", continued.lane, "r0b", status="completed"))
    assert continued.lane == exchanges[0].lane
    assert [protocol.create({}).lane for _ in range(3)] == [exchanges[i].lane for i in (1, 2, 0)]


@pytest.mark.parametrize("lane", ["", "a b", "ü", "x" * 257])
def test_a_lane_the_server_would_refuse_is_refused_here(lane: str) -> None:
    with pytest.raises(ValueError, match="a lane is"):
        ClientProtocol().create({}, lane=lane)


def test_too_many_lanes_and_unwritable_fields_leave_nothing_behind() -> None:
    protocol = ClientProtocol()
    for number in range(MAX_LANES):
        protocol.create({}, lane=f"lane{number}")
    with pytest.raises(ValueError, match="one more than the 32"):
        protocol.create({}, lane="another")
    sent(protocol)
    with pytest.raises(ValueError, match="JSON"):
        protocol.create({"temperature": float("nan")}, lane="lane0")
    assert sent(protocol) == []
