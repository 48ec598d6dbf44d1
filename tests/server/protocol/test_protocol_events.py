"""The events of one response, from ``response.created`` to its one terminal event."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.protocol import errors, events
from outrider.server.protocol.metrics_block import ResponseMetrics
from outrider.verify.sampling_params import TokenLogprob

TEXT_EVENTS = [
    "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
    "output_text.done", "content_part.done", "output_item.done", "completed",
]  # fmt: skip


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["type"].removeprefix("response.") for frame in frames]


def whole_response(peer: Any, **fields: Any) -> list[dict[str, Any]]:
    frames = peer.create("hi", **fields)
    response_id = frames[0]["response"]["id"]
    for text in ("Hello", " world"):
        frames += peer.output(response_id, text)
    return frames + peer.finish(response_id)


def test_a_text_response_is_the_standard_sequence_numbered_from_zero(peer: Any) -> None:
    frames = whole_response(peer)
    assert kinds(frames) == TEXT_EVENTS
    assert [frame["sequence_number"] for frame in frames] == list(range(len(TEXT_EVENTS)))


def test_frames_have_the_shape_of_the_published_ones(peer: Any) -> None:
    # Written from the published event reference, not from this server's output.
    item = {"id": "msg_02", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    place = {"stream_id": "main", "item_id": "msg_02", "output_index": 0, "content_index": 0}
    expected = [
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "stream_id": "main",
            "output_index": 0,
            "item": item,
        },
        {"type": "response.content_part.added", "sequence_number": 3, "part": part, **place},
        {"type": "response.output_text.delta", "sequence_number": 4, "delta": "Hello", "logprobs": [], **place},
        {"type": "response.output_text.delta", "sequence_number": 5, "delta": " world", "logprobs": [], **place},
        {"type": "response.output_text.done", "sequence_number": 6, "text": "Hello world", "logprobs": [], **place},
        {"type": "response.content_part.done", "sequence_number": 7, "part": part | {"text": "Hello world"}, **place},
    ]
    frames = whole_response(peer, stream_id="main")
    assert frames[2:8] == expected
    done = item | {"status": "completed", "content": [part | {"text": "Hello world"}]}
    assert frames[8]["item"] == done
    assert frames[9]["response"]["output"] == [done]


def test_every_frame_of_a_named_lane_carries_its_stream_id_and_the_default_lane_none(peer: Any) -> None:
    assert {frame["stream_id"] for frame in whole_response(peer, stream_id="a.b-c_1")} == {"a.b-c_1"}
    assert not any("stream_id" in frame for frame in whole_response(peer))


def test_the_response_object_repeats_what_the_client_asked_for(peer: Any) -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 99, "metadata": {"k": "v"}, "user": "u",
        "service_tier": "flex", "parallel_tool_calls": False, "tool_choice": "none", "store": False,
    }  # fmt: skip
    response = whole_response(peer, **asked)[-1]["response"]
    assert {name: response[name] for name in asked} == asked
    assert (response["object"], response["created_at"], response["status"]) == ("response", 1_760_000_000, "completed")


def test_usage_counts_prompt_cached_written_and_output_tokens(peer: Any) -> None:
    response_id = peer.create_id("hello")  # the prompt is "user:hello", 10 tokens
    peer.output(response_id, "abc", num_cached_tokens=4)
    usage = peer.output(response_id, "d", token_ids=(1, 2), num_cached_tokens=4, finish_reason=FinishReason.STOP)
    assert usage[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 5,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "total_tokens": 15,
    }


@pytest.mark.parametrize(
    ("reason", "kind", "status", "details"),
    [
        (FinishReason.LENGTH, "incomplete", "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.CANCELLED, "incomplete", "cancelled", None),
    ],
)
def test_an_answer_cut_short_ends_incomplete_with_what_it_has(
    peer: Any, reason: FinishReason, kind: str, status: str, details: object
) -> None:
    response_id = peer.create_id()
    peer.output(response_id, "par")
    frames = peer.finish(response_id, reason)
    assert kinds(frames) == ["output_text.done", "content_part.done", "output_item.done", kind]
    response = frames[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "par"


def test_an_engine_error_fails_the_response_and_keeps_what_was_said(peer: Any) -> None:
    response_id = peer.create_id()
    peer.output(response_id, "par")
    response = peer.output(response_id, finish_reason=FinishReason.ERROR, error="The engine died.")[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "The engine died."}
    assert response["output"][0]["content"][0]["text"] == "par"


def test_an_answer_without_text_has_an_empty_message_and_a_cancelled_one_has_none(peer: Any) -> None:
    done = peer.finish(peer.create_id())
    assert done[-1]["response"]["output"][0]["content"][0]["text"] == ""
    cancelled = peer.finish(peer.create_id(), FinishReason.CANCELLED)
    assert kinds(cancelled) == ["incomplete"]
    assert cancelled[0]["response"]["output"] == []


def test_a_step_without_text_sends_no_delta(peer: Any) -> None:
    response_id = peer.create_id()
    assert peer.output(response_id, "", token_ids=(0xF0,)) == []
    assert [frame.get("delta") for frame in peer.output(response_id, "🐎", token_ids=(1, 2))] == [None, None, "🐎"]


def test_nothing_follows_the_terminal_event(peer: Any) -> None:
    response_id = peer.answer("a")
    assert peer.output(response_id, "late") == []
    assert peer.finish(response_id) == []


def test_generate_false_completes_without_output(peer: Any) -> None:
    for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}, "generate": True}):
        frames = peer.create("warm me", **fields)
        assert not peer.submitted[-1].generate
        frames += peer.finish(frames[0]["response"]["id"])
        assert kinds(frames) == ["created", "in_progress", "completed"]
        response = frames[-1]["response"]
        assert (response["status"], response["output"]) == ("completed", [])
        assert response["usage"]["input_tokens_details"]["cache_write_tokens"] == len("user:warm me")
        assert response["usage"]["output_tokens"] == 0


def test_logprobs_come_with_their_tokens_when_asked_for(peer: Any) -> None:
    response_id = peer.create_id(include=["message.output_text.logprobs"], top_logprobs=2)
    assert peer.submitted[0].params.logprobs == 2
    first = TokenLogprob(ord("H"), -0.5, ((ord("H"), -0.5), (ord("J"), -math.inf)))
    second = TokenLogprob(ord("é"), -1.0)
    # The first token's text is held back: its log-probability waits for it.
    assert peer.output(response_id, "", token_ids=(ord("H"),), logprobs=(first,)) == []
    delta = peer.output(response_id, "Hé", token_ids=(ord("é"),), logprobs=(second,))[-1]
    spelled = [
        {
            "token": "H", "bytes": [72], "logprob": -0.5,
            "top_logprobs": [
                {"token": "H", "bytes": [72], "logprob": -0.5},
                {"token": "J", "bytes": [74], "logprob": -9999.0},
            ],
        },
        {"token": "é", "bytes": [195, 169], "logprob": -1.0, "top_logprobs": []},
    ]  # fmt: skip
    assert delta["logprobs"] == spelled
    frames = peer.finish(response_id)
    assert frames[0]["logprobs"] == spelled
    assert frames[1]["part"]["logprobs"] == spelled
    assert frames[-1]["response"]["output"][0]["content"][0]["logprobs"] == spelled


def test_draft_tokens_are_counted_per_delta_for_those_who_ask(peer: Any) -> None:
    response_id = peer.create_id(include=["outrider.draft_tokens"])
    peer.output(response_id, "", token_ids=(1,), num_draft_tokens=1, num_accepted=0)
    delta = peer.output(response_id, "abc", num_draft_tokens=3, num_accepted=2)[-1]
    assert delta["outrider"] == {"num_tokens": 4, "num_draft_tokens": 4, "num_accepted": 2}
    plain = peer.create_id(stream_id="other")
    assert "outrider" not in peer.output(plain, "abc", num_draft_tokens=3, num_accepted=2)[-1]


def test_metrics_reconcile_with_the_steps(peer: Any, shared: Any) -> None:
    response_id = peer.create_id()
    for text, num_draft_tokens, num_accepted, seconds, source in (
        ("a", 0, 0, 0.5, ""), ("bcd", 3, 2, 0.1, "suffix"), ("e", 3, 0, 0.1, "model"), ("fg", 1, 1, 0.1, "model"),
        ("h", 0, 0, 0.1, ""),
    ):  # fmt: skip
        shared.now += seconds
        drafted = {"num_draft_tokens": num_draft_tokens, "num_accepted": num_accepted, "draft_source": source}
        peer.output(response_id, text, **drafted, draft_ms=0.25, verify_ms=10.5)
    metrics = peer.finish(response_id)[-1]["response"]["metrics"]
    assert metrics["time_to_first_token_ms"] == 500.0
    assert metrics["generation_time_ms"] == 400.0
    assert metrics["queue_time_ms"] == 0.0
    assert metrics["mean_itl_ms"] == pytest.approx(400 / 7, abs=1e-3)  # 8 tokens, 7 gaps
    assert metrics["tokens_per_second"] == pytest.approx(17.5)
    assert metrics["num_steps"] == 5
    assert metrics["speculative_decoding"] == {
        "num_spec_steps": 3,
        "num_spec_tokens": 3,
        "num_draft_tokens": 7,
        "num_accepted_draft_tokens": 3,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.4286,
        "acceptance_histogram": [1, 1, 1, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 1, 0]},
        "num_draft_tokens_per_pos": [3, 2, 2],
        "num_accepted_tokens_per_pos": [2, 1, 0],
        "by_source": {
            "model": {
                "num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 1,
                "mean_acceptance_length": 1.5, "draft_acceptance_rate": 0.25,
                "num_draft_tokens_per_pos": [2, 1, 1], "num_accepted_tokens_per_pos": [1, 0, 0],
            },
            "suffix": {
                "num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2,
                "mean_acceptance_length": 3.0, "draft_acceptance_rate": 0.6667,
                "num_draft_tokens_per_pos": [1, 1, 1], "num_accepted_tokens_per_pos": [1, 1, 0],
            },
        },
        "draft_time_ms": 1.25,
        "verify_time_ms": 52.5,
    }  # fmt: skip
    assert shared.ledger.first_tokens == [0.5]
    assert shared.ledger.gaps[0] is None
    assert shared.ledger.gaps[1:] == pytest.approx([0.1] * 4)
    assert shared.ledger.reasons == [FinishReason.STOP]


class Deaf:
    """An observer that nothing is wanted from."""

    def first_token(self, seconds: float) -> None: ...

    def step(self, output: StepOutput, seconds: float | None) -> None: ...

    def finished(self, reason: FinishReason, metrics: ResponseMetrics) -> None: ...


STEPS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from(["suffix", "model", "prediction", ""])), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, end=st.sampled_from(["bonus", "draft"]))
def test_tokens_are_steps_plus_accepted_and_all_sums_agree_wherever_the_answer_ends(
    steps: list[tuple[int, int, str]], end: str
) -> None:
    metrics = ResponseMetrics(0.0, 6, Deaf())
    num_tokens = 0
    for place, (num_draft_tokens, accepted, source) in enumerate(steps):
        num_accepted = min(accepted, num_draft_tokens)
        # Where the answer ends inside a draft, its last token is an accepted one and none follows.
        ends_in_draft = end == "draft" and place == len(steps) - 1 and num_accepted > 0
        kept = num_accepted + (not ends_in_draft)
        num_tokens += kept
        output = StepOutput("r", (7,) * kept, "", (), num_draft_tokens, num_accepted, draft_source=source)
        metrics.record(output, 1.0)
    block = metrics.block()
    drafts = block["speculative_decoding"]
    assert num_tokens == block["num_steps"] + drafts["num_accepted_draft_tokens"]
    histogram = drafts["acceptance_histogram"]
    assert sum(histogram) == drafts["num_spec_steps"] == sum(bool(drafted) for drafted, _, _ in steps)
    assert sum(i * n for i, n in enumerate(histogram)) == drafts["num_accepted_draft_tokens"]
    by_length = drafts["acceptance_histogram_by_draft_length"].values()
    assert [sum(row[i] for row in by_length if i < len(row)) for i in range(len(histogram))] == histogram
    for part in (drafts, *drafts["by_source"].values()):
        assert sum(part["num_draft_tokens_per_pos"]) == part["num_draft_tokens"]
        assert sum(part["num_accepted_tokens_per_pos"]) == part["num_accepted_draft_tokens"]
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert sum(part[name] for part in drafts["by_source"].values()) == drafts[name]
    assert set(drafts["by_source"]) == {source or "unknown" for drafted, _, source in steps if drafted}


def test_metrics_without_speculation_have_no_rates(peer: Any) -> None:
    peer.create_id(max_draft_tokens=0)
    metrics = peer.finish(peer.submitted[0].request_id)[-1]["response"]["metrics"]
    assert metrics["time_to_first_token_ms"] is None
    assert metrics["speculative_decoding"] | {"num_spec_steps": 0} == {
        "num_spec_steps": 0, "num_spec_tokens": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0,
        "mean_acceptance_length": None, "draft_acceptance_rate": None, "acceptance_histogram": [0],
        "acceptance_histogram_by_draft_length": {}, "num_draft_tokens_per_pos": [], "num_accepted_tokens_per_pos": [],
        "by_source": {}, "draft_time_ms": 0.0, "verify_time_ms": 0.0,
    }  # fmt: skip


def test_a_silent_response_repeats_where_it_stands(peer: Any) -> None:
    response_id = peer.create_id()
    assert peer.tick(14.9) == []
    assert [(frame["type"], frame["sequence_number"]) for frame in peer.tick(0.2)] == [("response.in_progress", 2)]
    peer.output(response_id, "a")
    assert peer.tick(14.9) == []
    repeated = peer.tick(0.2)
    assert kinds(repeated) == ["in_progress"]
    assert repeated[0]["response"]["output"] == []


def test_text_that_waits_for_the_socket_becomes_one_delta_without_a_gap_in_numbers(peer: Any) -> None:
    response_id = peer.create_id()
    peer.output(response_id, "a")
    connection = peer.connection
    for text in "bcd":
        connection.receive_output(_step(response_id, text))
    merged = peer.read()
    assert [(frame["delta"], frame["sequence_number"]) for frame in merged] == [("bcd", 5)]
    after = peer.output(response_id, "e")
    assert [(frame["delta"], frame["sequence_number"]) for frame in after] == [("e", 6)]
    assert peer.finish(response_id)[0]["text"] == "abcde"


def test_merging_keeps_lanes_apart_and_never_crosses_another_event(peer: Any, shared: Any) -> None:
    one, two = peer.create_id(stream_id="1"), peer.create_id(stream_id="2")
    peer.output(one, "a")
    peer.output(two, "A")
    for text in ("b", "c"):
        peer.connection.receive_output(_step(one, text))
        peer.connection.receive_output(_step(two, text.upper()))
    shared.now += 16
    peer.connection.tick()  # an in_progress between the deltas
    peer.connection.receive_output(_step(one, "d"))
    seen = [(frame["stream_id"], frame["sequence_number"], frame.get("delta")) for frame in peer.read()]
    assert seen == [("1", 5, "bc"), ("2", 5, "BC"), ("1", 6, None), ("2", 6, None), ("1", 7, "d")]


def test_merged_deltas_sum_their_draft_counts(peer: Any) -> None:
    response_id = peer.create_id(include=["outrider.draft_tokens"])
    peer.output(response_id, "a")
    peer.connection.receive_output(_step(response_id, "b", num_draft_tokens=2, num_accepted=0))
    peer.connection.receive_output(_step(response_id, "cd", num_draft_tokens=2, num_accepted=1))
    assert peer.read()[0]["outrider"] == {"num_tokens": 3, "num_draft_tokens": 4, "num_accepted": 1}


def test_text_is_not_escaped_and_survives_byte_for_byte(peer: Any) -> None:
    text = 'né "quoted" \\ \u2028 \x00 🐎'
    response_id = peer.create_id()
    peer.output(response_id, text)
    assert peer.finish(response_id)[0]["text"] == text


def test_every_code_of_the_table_makes_a_frame_of_both_shapes() -> None:
    standard: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
    for code, (status, kind) in errors.ERRORS.items():
        frame = errors.ProtocolError(code, "What is wrong.", "field", headers={"retry-after": "2"}).event("main")
        standard.validate_python(json.loads(json.dumps(frame)), strict=True)
        assert frame["status"] == status
        assert frame["error"] == {
            "type": kind, "code": code, "message": "What is wrong.", "param": "field", "headers": {"retry-after": "2"}
        }  # fmt: skip
        assert (frame["code"], frame["message"], frame["param"]) == (code, "What is wrong.", "field")
    assert set(errors.ERRORS) == set(errors.ErrorCode)


def test_a_number_stands_before_the_content_of_an_event() -> None:
    assert list(events.numbered({"type": "t", "x": 1}, 3, "s")) == ["type", "sequence_number", "stream_id", "x"]


def _step(response_id: str, text: str, **fields: Any) -> Any:
    return StepOutput(response_id, tuple(map(ord, text)), text, **fields)
