"""Lanes, continuation, cancelling, limits and the end of a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.protocol.errors import ErrorCode, ProtocolError
from outrider.server.protocol.items import Message
from outrider.server.protocol.store import ResponseStore, StoredResponse

NewPeer = Callable[..., Any]


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["type"].removeprefix("response.") for frame in frames]


def codes(frames: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """The errors among frames: (code, stream_id)."""
    return [(frame["error"]["code"], frame.get("stream_id")) for frame in frames if frame["type"] == "error"]


# -- lanes --


def test_responses_of_one_lane_come_one_after_another(peer: Any) -> None:
    first = peer.create_id("one", stream_id="a")
    assert peer.create("two", stream_id="a") == []
    assert peer.prompts == ["user:one"]
    frames = peer.finish(first)
    assert kinds(frames)[-3:] == ["completed", "created", "in_progress"]
    assert peer.prompts == ["user:one", "user:two"]


def test_lanes_run_side_by_side(peer: Any) -> None:
    one, two, default = peer.create_id(stream_id="a"), peer.create_id(stream_id="b"), peer.create_id()
    assert peer.output(two, "2")[-1]["stream_id"] == "b"
    assert peer.output(one, "1")[-1]["stream_id"] == "a"
    assert kinds(peer.finish(default))[-1] == "completed"
    assert kinds(peer.finish(one))[-1] == "completed"


def test_a_refused_request_waits_for_its_place_in_the_lane(peer: Any) -> None:
    # An error that overtook the running response would be taken for its end.
    running = peer.create_id(stream_id="a")
    assert peer.create(stream_id="a", temperature="hot") == []
    assert codes(peer.create(stream_id="b", temperature="hot")) == [("invalid_type", "b")]
    frames = peer.finish(running)
    assert kinds(frames)[-2:] == ["completed", "error"]
    assert codes(frames) == [("invalid_type", "a")]


def test_sixteen_run_and_more_wait_announced_as_queued(peer: Any) -> None:
    running = [peer.create_id(stream_id=f"s{index}") for index in range(16)]
    waiting = peer.create(stream_id="late")
    assert kinds(waiting) == ["created", "queued"]
    assert [frame["response"]["status"] for frame in waiting] == ["queued", "queued"]
    assert len(peer.submitted) == 16
    assert kinds(peer.tick(16))[-1] == "queued"
    frames = peer.finish(running[3])
    assert [frame["sequence_number"] for frame in frames if frame["stream_id"] == "late"] == [3]
    assert kinds(frames)[-1] == "in_progress"
    assert len(peer.submitted) == 17


def test_thirty_two_named_lanes_are_allowed_beside_the_default(peer: Any) -> None:
    for index in range(32):
        peer.answer("x", stream_id=f"s{index}")
    peer.answer("x")
    frames = peer.create(stream_id="one.too.many")
    assert codes(frames) == [("websocket_stream_limit_reached", "one.too.many")]
    assert frames[0]["error"]["message"] == (
        "This WebSocket connection has reached its maximum number of distinct stream IDs (32). "
        "Reuse an existing stream_id or open a new WebSocket connection."
    )
    peer.answer("x", stream_id="s0")


def test_the_queue_is_bounded_and_what_runs_is_unharmed(new_peer: NewPeer) -> None:
    peer = new_peer(max_queued=2)
    running = peer.create_id()
    peer.create()
    peer.create()
    assert codes(peer.create()) == [("websocket_queue_full", None)]
    assert kinds(peer.finish(running))[-2:] == ["created", "in_progress"]


@pytest.mark.parametrize("stream_id", ["", "a b", "é", "x" * 257, 5, True, ["a"], "a\n"])
def test_a_stream_id_of_the_wrong_form_is_refused_without_echo(peer: Any, stream_id: object) -> None:
    frames = peer.create(stream_id=stream_id)
    assert codes(frames) == [("invalid_stream_id", None)]
    assert frames[0]["error"]["param"] == "stream_id"


def test_a_null_stream_id_is_the_default_lane(peer: Any) -> None:
    assert "stream_id" not in peer.create(stream_id=None)[0]


# -- continuation --


def test_a_continuation_has_the_delivered_answer_and_no_old_instructions(peer: Any) -> None:
    first = peer.answer(" exact \n", "one", instructions="be brief")
    peer.answer("b", "two", previous_response_id=first, instructions="be long")
    assert peer.prompts == ["system:be brief\nuser:one", "system:be long\nuser:one\nassistant: exact \n\nuser:two"]


def test_a_warm_up_can_be_continued_even_with_no_new_input(peer: Any) -> None:
    warm = peer.create_id("one", generate=False)
    peer.finish(warm)
    peer.create_id([], previous_response_id=warm)
    assert peer.prompts == ["user:one", "user:one"]


def test_a_cancelled_answer_can_be_continued_from_what_was_delivered(peer: Any) -> None:
    first = peer.create_id("one")
    peer.output(first, "par")
    peer.finish(first, FinishReason.CANCELLED)
    peer.create_id("two", previous_response_id=first)
    assert peer.prompts[-1] == "user:one\nassistant:par\nuser:two"


def test_a_continuation_sent_early_waits_for_its_parent_in_the_lane(peer: Any) -> None:
    first = peer.create_id("one")
    assert peer.create("two", previous_response_id=first) == []
    peer.finish(first, text="a")
    assert peer.prompts[-1] == "user:one\nassistant:a\nuser:two"


def test_an_unknown_parent_is_not_found(peer: Any) -> None:
    frames = peer.create(previous_response_id="resp_abc", stream_id="main")
    assert frames[0]["error"] == {
        "type": "invalid_request_error",
        "code": "previous_response_not_found",
        "message": "Previous response with id 'resp_abc' not found.",
        "param": "previous_response_id",
    }
    assert (frames[0]["status"], frames[0]["stream_id"]) == (400, "main")


def test_a_failed_response_cannot_be_continued(peer: Any) -> None:
    first = peer.create_id()
    peer.finish(first, FinishReason.ERROR)
    assert codes(peer.create(previous_response_id=first)) == [("previous_response_not_found", None)]


def test_unstored_responses_live_in_their_connection_until_the_next_of_the_lane(peer: Any, new_peer: NewPeer) -> None:
    first = peer.answer("a", store=False)
    assert codes(new_peer().create(previous_response_id=first)) == [("previous_response_not_found", None)]
    second = peer.answer("b", store=False, previous_response_id=first)
    assert codes(peer.create(previous_response_id=first)) == [("previous_response_not_found", None)]
    peer.answer("c", store=False, previous_response_id=second)


def test_stored_responses_are_found_by_other_connections_of_the_tenant_only(new_peer: NewPeer) -> None:
    first = new_peer(tenant="a").answer("secret")
    assert codes(new_peer(tenant="b").create(previous_response_id=first)) == [("previous_response_not_found", None)]
    new_peer(tenant="a").create_id(previous_response_id=first)


@pytest.mark.parametrize("failure", ["refused", "engine error"])
def test_a_failed_continuation_evicts_its_parent_from_the_lane(peer: Any, failure: str) -> None:
    parent = peer.answer("a", store=False)
    if failure == "refused":
        assert codes(peer.create(previous_response_id=parent, temperature=9)) == [("invalid_value", None)]
    else:
        peer.finish(peer.create_id(previous_response_id=parent, store=False), FinishReason.ERROR)
    assert codes(peer.create(previous_response_id=parent)) == [("previous_response_not_found", None)]


def test_a_failed_fork_leaves_the_parent_in_its_own_lane(peer: Any) -> None:
    parent = peer.answer("a", store=False, stream_id="main")
    peer.finish(peer.create_id(previous_response_id=parent, store=False, stream_id="fork"), FinishReason.ERROR)
    peer.create_id(previous_response_id=parent, stream_id="main")


def test_forks_of_one_parent_do_not_see_each_other(peer: Any) -> None:
    parent = peer.answer("a", "q", stream_id="main")
    for stream_id, question in (("f1", "x"), ("f2", "y")):
        peer.answer("b", question, previous_response_id=parent, stream_id=stream_id)
    assert peer.prompts[1:] == ["user:q\nassistant:a\nuser:x", "user:q\nassistant:a\nuser:y"]


def test_the_store_forgets_by_count_bytes_and_age_and_uses_the_latest_last() -> None:
    now = 0.0
    store = ResponseStore(lambda: now, max_responses=2, max_bytes=2000, max_age_s=10.0)

    def stored(response_id: str, num_chars: int) -> StoredResponse:
        return StoredResponse.following(None, response_id, (Message(role="user", content="x" * num_chars),))

    for response_id in "abc":
        store.put("t", stored(response_id, 1))
        store.get("t", "a")
    assert [store.get("t", response_id) is not None for response_id in "abc"] == [True, False, True]
    assert store.get("other", "a") is None
    store.put("t", stored("big", 1600))  # with a and c more than 2000 bytes: the older ones go
    assert (store.get("t", "c"), store.get("t", "big") is not None, len(store)) == (None, True, 1)
    assert store.num_bytes <= 2000
    store.put("t", stored("huge", 3000))
    assert store.get("t", "huge") is None
    now = 10.5
    assert store.get("t", "big") is None
    assert (len(store), store.num_bytes) == (0, 0)


# -- cancelling --


def test_cancel_reaches_a_running_response_once(peer: Any) -> None:
    response_id = peer.create_id(stream_id="a")
    for _ in range(2):
        assert peer.send(type="response.cancel", response_id=response_id) == []
    assert peer.cancelled == [response_id]
    assert peer.finish(response_id, FinishReason.CANCELLED)[-1]["response"]["status"] == "cancelled"
    assert peer.send(type="response.cancel", response_id=response_id) == []
    assert peer.send(type="response.cancel", stream_id="a") == []


def test_cancel_while_the_prompt_is_built_ends_the_response_at_once(peer: Any) -> None:
    peer.prepare_at_once = False
    peer.create()
    frames = peer.send(type="response.cancel")
    assert kinds(frames) == ["created", "incomplete"]
    assert frames[-1]["response"]["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    peer.build(peer.prepared[0])
    assert peer.read() == []
    assert peer.submitted == []


def test_cancelling_a_lane_starts_nothing_that_was_queued_in_it(peer: Any) -> None:
    peer.prepare_at_once = False
    peer.create("one")
    peer.create("two")
    assert kinds(peer.send(type="response.cancel")) == ["created", "incomplete"] * 2
    assert len(peer.prepared) == 1


def test_cancel_before_the_engine_has_answered_follows_the_request(peer: Any) -> None:
    peer.admit_at_once = False
    peer.create()
    assert peer.send(type="response.cancel") == []
    assert peer.cancelled == [peer.submitted[0].request_id]
    assert kinds(peer.finish(peer.cancelled[0], FinishReason.CANCELLED)) == ["created", "in_progress", "incomplete"]


def test_cancel_while_waiting_for_a_place_never_reaches_the_engine(new_peer: NewPeer) -> None:
    peer = new_peer(max_in_flight=1)
    running = peer.create_id(stream_id="a")
    waiting = peer.create(stream_id="b")[0]["response"]["id"]
    assert kinds(peer.send(type="response.cancel", response_id=waiting)) == ["incomplete"]
    peer.finish(running)
    assert (len(peer.submitted), peer.cancelled) == (1, [])


def test_cancelling_a_lane_ends_all_of_it_in_order(peer: Any) -> None:
    running = peer.create_id(stream_id="a")
    peer.create(stream_id="a")
    peer.create(stream_id="a", temperature="hot")
    other = peer.create_id(stream_id="b")
    assert peer.send(type="response.cancel", stream_id="a") == []
    frames = peer.finish(running, FinishReason.CANCELLED)
    assert kinds(frames) == ["incomplete", "created", "incomplete", "error"]
    assert kinds(peer.finish(other))[-1] == "completed"


def test_cancel_of_what_never_was_is_an_error(peer: Any, new_peer: NewPeer) -> None:
    frames = peer.send(type="response.cancel", response_id="resp_x", stream_id="a")
    assert codes(frames) == [("response_not_found", "a")]
    assert frames[0]["error"]["param"] == "response_id"
    frames = peer.send(type="response.cancel", stream_id="never")
    assert (codes(frames), frames[0]["error"]["param"]) == ([("response_not_found", "never")], "stream_id")
    frames = peer.send(type="response.cancel", response_id=5)
    assert (codes(frames), frames[0]["error"]["param"]) == ([("invalid_type", None)], "response_id")
    running = peer.create_id(stream_id="a")
    assert codes(new_peer().send(type="response.cancel", response_id=running)) == [("response_not_found", None)]
    frames = peer.send(type="response.cancel", response_id=running, stream_id="b")
    assert (codes(frames), frames[0]["error"]["param"]) == ([("invalid_value", "b")], "stream_id")
    assert peer.cancelled == []


def test_a_client_that_leaves_cancels_everything_and_hears_nothing(peer: Any, shared: Any) -> None:
    running = peer.create_id(stream_id="a")
    peer.create(stream_id="a")
    peer.prepare_at_once = False
    peer.create(stream_id="b")
    peer.connection.connection_lost()
    assert peer.read() == []
    assert peer.cancelled == [running]
    assert peer.output(running, "late") == []
    assert peer.finish(running, FinishReason.CANCELLED) == []
    assert shared.ledger.reasons == [FinishReason.CANCELLED] * 3
    assert peer.connection.num_in_flight == 0


# -- the engine's refusals, and the end --


def test_a_request_the_engine_refuses_gets_one_error_and_the_lane_goes_on(peer: Any) -> None:
    peer.admit_at_once = False
    assert peer.create("one", stream_id="a") == []
    error = ProtocolError(ErrorCode.SERVER_OVERLOADED, "Full.", headers={"retry-after": "2"})
    peer.connection.receive_refusal(peer.submitted[0].request_id, error)
    frames = peer.read()
    assert codes(frames) == [("server_overloaded", "a")]
    assert (frames[0]["status"], frames[0]["error"]["headers"]) == (503, {"retry-after": "2"})
    peer.admit_at_once = True
    peer.create_id("two", stream_id="a")


def test_an_announced_request_that_the_engine_refuses_fails_too(new_peer: NewPeer) -> None:
    peer = new_peer(max_in_flight=1)
    running = peer.create_id(stream_id="a")
    peer.create(stream_id="b")
    peer.admit_at_once = False
    peer.finish(running)
    peer.connection.receive_refusal(peer.submitted[1].request_id, ProtocolError(ErrorCode.ENGINE_UNAVAILABLE, "Gone."))
    assert kinds(peer.read()) == ["error", "failed"]


def test_an_engine_that_is_not_ready_is_said_to_be_so(peer: Any, shared: Any) -> None:
    shared.model = None
    frames = peer.create()
    assert (codes(frames), frames[0]["status"]) == ([("engine_unavailable", None)], 503)


def test_an_old_connection_is_closed_only_when_idle(peer: Any) -> None:
    response_id = peer.create_id(stream_id="a")
    assert peer.connection.close is None
    peer.tick(3600)
    assert codes(peer.create(stream_id="b")) == [("websocket_connection_limit_reached", "b")]
    assert peer.connection.close is None
    frames = peer.finish(response_id)
    assert kinds(frames)[-2:] == ["completed", "error"]
    assert frames[-1]["error"]["message"] == (
        "Responses websocket connection limit reached (60 minutes). Create a new websocket connection to continue."
    )
    assert peer.connection.close.code == 1001
    assert peer.create() == []


def test_an_idle_connection_is_closed_when_it_is_too_old(peer: Any) -> None:
    assert peer.tick(3599) == []
    assert codes(peer.tick(1)) == [("websocket_connection_limit_reached", None)]
    assert peer.connection.close.code == 1001


def test_draining_finishes_what_runs_refuses_the_rest_and_closes(peer: Any, new_peer: NewPeer) -> None:
    running = peer.create_id(stream_id="a")
    peer.create(stream_id="a")
    peer.connection.drain()
    assert codes(peer.create(stream_id="b")) == [("server_shutting_down", "b")]
    assert peer.connection.close is None
    frames = peer.finish(running, text="all of it")
    assert kinds(frames)[-2:] == ["completed", "error"]
    assert codes(frames) == [("server_shutting_down", "a")]
    assert peer.connection.close.code == 1001
    idle = new_peer()
    idle.connection.drain()
    assert idle.connection.close.code == 1001


def test_a_client_that_does_not_read_is_cut_off_and_costs_bounded_memory(new_peer: NewPeer, shared: Any) -> None:
    peer = new_peer(max_outbox_bytes=10_000)
    response_id = peer.create_id()
    for _ in range(30):
        peer.connection.receive_output(_step(response_id, "x" * 500))
    assert peer.connection.close.code == 1013
    assert not peer.connection.has_frames
    assert peer.read() == []
    assert peer.cancelled == [response_id]
    peer.finish(response_id, FinishReason.CANCELLED)
    assert shared.ledger.reasons == [FinishReason.CANCELLED]


def test_errors_count_against_a_client_that_does_not_read(new_peer: NewPeer) -> None:
    peer = new_peer(max_outbox_bytes=10_000)
    for _ in range(200):
        peer.connection.receive_text("{")
    assert peer.connection.close.code == 1013


def test_the_end_of_a_long_answer_is_no_overflow(new_peer: NewPeer) -> None:
    # The closing frames repeat the text four times; a client that reads must not be cut off for that.
    peer = new_peer(max_outbox_bytes=10_000)
    response_id = peer.create_id(stream_id="a")
    other = peer.create_id(stream_id="b")
    peer.output(response_id, "x" * 9_000)
    peer.connection.receive_output(_step(response_id, "", finish_reason=FinishReason.STOP))
    for _ in range(10):
        peer.connection.receive_output(_step(other, "y"))
    assert peer.connection.close is None
    assert "completed" in kinds(peer.read())


def _step(response_id: str, text: str, **fields: Any) -> Any:
    return StepOutput(response_id, tuple(map(ord, text)), text, **fields)
