"""Every bad message gets an error that names the field, and harms nothing else."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types.responses.responses_client_event import ResponseCreate

from outrider.server.protocol import parse
from outrider.verify.sampling_params import SamplingParams


def error_of(frames: list[dict[str, Any]]) -> dict[str, Any]:
    assert [frame["type"] for frame in frames] == ["error"], frames
    return typing.cast("dict[str, Any]", frames[0]["error"])


def receive(peer: Any, text: str) -> list[dict[str, Any]]:
    peer.connection.receive_text(text)
    return typing.cast("list[dict[str, Any]]", peer.read())


MALFORMED = [
    "", "{", "nonsense", '{"type": "response.create"', "[1]", '"text"', "null", "5",
    '{"type":"response.create","temperature":NaN}',
    '{"type":"response.create","temperature":-Infinity}',
    '{"type":"response.create","temperature":1e999}',
    '{"type":"response.create","seed":' + "9" * 5000 + "}",
    '{"type":"response.create","input":"a","input":"b"}',
    '{"type":"response.create","input":[{"role":"user","role":"system","content":""}]}',
    "[" * 200_000,
    '{"a":' * 200_000,
    '{"type":"response.create","input":' + "[" * 64 + "]" * 64 + "}",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:50])
def test_what_is_not_one_clear_json_object_is_invalid_json(peer: Any, text: str) -> None:
    error = error_of(receive(peer, text))
    assert error["code"] == "invalid_json"
    assert len(error["message"]) < 400


def test_binary_messages_are_read_as_text(peer: Any) -> None:
    peer.connection.receive_bytes(json.dumps({"type": "response.create", "input": "hé"}).encode())
    assert peer.read()[0]["type"] == "response.created"
    peer.connection.receive_bytes(b"\xff\xfe")
    assert error_of(peer.read())["code"] == "invalid_json"


def test_a_message_over_the_limit_is_refused_and_one_at_the_limit_is_read(new_peer: Any) -> None:
    frame = json.dumps({"type": "response.create", "input": "é", "max_output_tokens": 5}, ensure_ascii=False)
    peer = new_peer(max_message_bytes=len(frame.encode()))
    assert receive(peer, frame)[0]["type"] == "response.created"
    error = error_of(receive(peer, frame + " "))
    assert error["code"] == "message_too_large"
    assert receive(peer, frame) == []  # queued in its lane: the connection lives


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({}, "missing_required_parameter"),
        ({"type": "response.run"}, "unknown_event_type"),
        ({"type": 5}, "unknown_event_type"),
        ({"type": {"a": 1}}, "unknown_event_type"),
        ({"type": "x" * 10_000, "stream_id": "a"}, "unknown_event_type"),
    ],
)
def test_an_event_of_no_known_type_is_refused(peer: Any, event: dict[str, Any], code: str) -> None:
    frames = peer.send(**event)
    error = error_of(frames)
    assert (error["code"], error["param"]) == (code, "type")
    assert len(error["message"]) < 300
    assert frames[0].get("stream_id") == event.get("stream_id")


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    # the field is of the wrong type
    ({"model": 5}, "invalid_type", "model"),
    ({"input": 5}, "invalid_type", "input"),
    ({"input": {"role": "user"}}, "invalid_type", "input"),
    ({"input": ["hi"]}, "invalid_type", "input[0]"),
    ({"input": [{"role": "user", "content": 5}]}, "invalid_type", "input[0].content"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "invalid_type", "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "invalid_type", "input[0].content[0].text"),
    ({"input": [{"role": "user"}]}, "invalid_type", "input[0].content"),
    ({"instructions": ["x"]}, "invalid_type", "instructions"),
    ({"previous_response_id": 5}, "invalid_type", "previous_response_id"),
    ({"max_output_tokens": True}, "invalid_type", "max_output_tokens"),
    ({"max_output_tokens": 2.5}, "invalid_type", "max_output_tokens"),
    ({"max_output_tokens": "5"}, "invalid_type", "max_output_tokens"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"temperature": "0"}, "invalid_type", "temperature"),
    ({"top_p": []}, "invalid_type", "top_p"),
    ({"seed": 1.0}, "invalid_type", "seed"),
    ({"ignore_eos": 1}, "invalid_type", "ignore_eos"),
    ({"generate": "no"}, "invalid_type", "generate"),
    ({"store": 0}, "invalid_type", "store"),
    ({"stop": [5]}, "invalid_type", "stop[0]"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stop_token_ids": ["5"]}, "invalid_type", "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "invalid_type", "stop_token_ids[0]"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "invalid_type", "logit_bias.5"),
    ({"include": "x"}, "invalid_type", "include"),
    ({"include": [5]}, "invalid_type", "include[0]"),
    ({"metadata": []}, "invalid_type", "metadata"),
    ({"metadata": {"k": 1}}, "invalid_type", "metadata.k"),
    ({"user": 5}, "invalid_type", "user"),
    ({"text": "plain"}, "invalid_type", "text"),
    ({"prompt_cache_options": True}, "invalid_type", "prompt_cache_options"),
    ({"prompt_cache_options": {"prewarm": 1}}, "invalid_type", "prompt_cache_options.prewarm"),
    # the value is out of its range
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": -1}, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": 2**63}, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": 10**4000}, "invalid_value", "max_output_tokens"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": 10**400}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.5}, "invalid_value", "top_p"),
    ({"top_k": -1}, "invalid_value", "top_k"),
    ({"min_p": 2}, "invalid_value", "min_p"),
    ({"seed": -1}, "invalid_value", "seed"),
    ({"seed": 2**64}, "invalid_value", "seed"),
    ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -3}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"min_output_tokens": -1}, "invalid_value", "min_output_tokens"),
    ({"min_output_tokens": 9, "max_output_tokens": 8}, "invalid_value", "min_output_tokens"),
    ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"max_draft_tokens": -1}, "invalid_value", "max_draft_tokens"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"stop": "x" * 100_000}, "invalid_value", "stop"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [0x110000]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [0] * 1025}, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {str(0x110000): 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"one": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"include": ["everything"]}, "invalid_value", "include[0]"),
    ({"service_tier": "gold"}, "invalid_value", "service_tier"),
    ({"user": "x" * 513}, "invalid_value", "user"),
    ({"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
    ({"metadata": {"k": "x" * 513}}, "invalid_value", "metadata.k"),
    ({"metadata": {"k" * 65: ""}}, "invalid_value", "metadata"),
    ({"input": [{"role": "wizard", "content": ""}]}, "invalid_value", "input[0].role"),
    ({"input": [{"role": ["user"], "content": ""}]}, "invalid_value", "input[0].role"),
    ({"input": "\ud800"}, "invalid_value", "input"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "ok \udc00"}]}]}, "invalid_value",
     "input[0].content[0].text"),
    ({"model": "\udfff"}, "invalid_value", "model"),
    ({"instructions": "a\ud83d"}, "invalid_value", "instructions"),
    ({"tempr\ud800": 1}, "invalid_value", None),
    # the server cannot do it: never ignored
    ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
    ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
    ({"moderation": {"model": "m"}}, "unsupported_parameter", "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "unsupported_parameter", "context_management"),
    ({"background": True}, "unsupported_parameter", "background"),
    ({"truncation": "auto"}, "unsupported_value", "truncation"),
    ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "unsupported_value", "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "unsupported_value", "text.format.type"),
    ({"text": {"verbosity": "low"}}, "unsupported_value", "text.verbosity"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_value", "input[0].type"),
    ({"input": ["ok", {"type": "function_call_output"}][1:]}, "unsupported_value", "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}, {"type": "input_image"}]}]},
     "unsupported_value", "input[0].content[1].type"),
    # there is no such thing
    ({"temprature": 0.5}, "unknown_parameter", "temprature"),
    ({"model": "gpt-9"}, "model_not_found", "model"),
    ({"input": None}, "missing_required_parameter", "input"),
    ({"input": []}, "missing_required_parameter", "input"),
    ({"input": "refuse me"}, "invalid_prompt", "input"),
    ({"input": "x" * 996}, "context_length_exceeded", "input"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name_and_harms_no_other_stream(
    peer: Any, fields: dict[str, Any], code: str, param: str | None
) -> None:
    healthy = peer.create_id("hello", stream_id="healthy")
    peer.output(healthy, "a")
    frames = peer.create(**({"input": "hi", "stream_id": "bad"} | fields))
    error = error_of(frames)
    assert (error["code"], error.get("param")) == (code, param)
    assert frames[0]["stream_id"] == "bad"
    assert (param or "name").split("[")[0].split(".")[0] in error["message"]
    assert len(error["message"]) < 600
    assert frames[0]["status"] == (404 if code == "model_not_found" else 400)
    assert len(peer.submitted) == 1
    assert peer.finish(healthy)[-1]["response"]["output"][0]["content"][0]["text"] == "a"
    peer.create_id(stream_id="bad")  # the lane goes on


def test_every_standard_field_is_known(peer: Any) -> None:
    for name in ResponseCreate.model_fields:
        assert name in parse._READ | parse._IGNORED | parse.SAMPLING_FIELDS or name in parse._UNSUPPORTED, name
    nulls = dict.fromkeys(set(ResponseCreate.model_fields) - {"type"})
    frames = peer.send(**(nulls | {"type": "response.create", "input": "hi"}))
    assert frames[0]["type"] == "response.created"


def test_harmless_fields_change_nothing(peer: Any) -> None:
    peer.create_id(
        "hi", stream=True, parallel_tool_calls=True, reasoning={"effort": "low"}, safety_identifier="s", tools=[],
        prompt_cache_key="k", prompt_cache_retention="24h", stream_options={"include_obfuscation": False},
        include=["reasoning.encrypted_content"], text={"format": {"type": "text"}, "verbosity": "medium"},
        truncation="disabled", tool_choice="auto", background=False, max_tool_calls=3, model="m",
    )  # fmt: skip
    plain = SamplingParams(max_tokens=1000 - len("user:hi"), seed=7)
    assert peer.submitted[0].params == plain


def test_sampling_fields_reach_the_engine(peer: Any) -> None:
    peer.create_id(
        max_output_tokens=20, min_output_tokens=2, temperature=0, top_p=0.5, top_k=40, min_p=0.1, seed=2**64 - 1,
        repetition_penalty=1.1, presence_penalty=1, frequency_penalty=-1, logit_bias={"65": -100}, stop=["a", "b"],
        stop_token_ids=[1, 2], ignore_eos=True, max_draft_tokens=2, top_logprobs=3,
    )  # fmt: skip
    assert peer.submitted[0].params == SamplingParams(
        max_tokens=20, min_tokens=2, temperature=0.0, top_p=0.5, top_k=40, min_p=0.1, seed=2**64 - 1,
        repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={65: -100.0},
        stop=("a", "b"), stop_token_ids=(1, 2), ignore_eos=True, max_draft_tokens=2, logprobs=3,
    )  # fmt: skip


def test_the_answer_is_cut_to_what_the_context_leaves(peer: Any) -> None:
    peer.create_id("x" * 990, max_output_tokens=100_000, min_output_tokens=50)  # a prompt of 995 in 1000
    params = peer.submitted[0].params
    assert (params.max_tokens, params.min_tokens) == (5, 5)
    peer.create_id("x" * 994, stream_id="b")
    assert peer.submitted[1].params.max_tokens == 1
    peer.create_id("x" * 995, stream_id="c", generate=False)  # a warm-up needs no room for an answer


def test_all_roles_and_text_parts_are_read(peer: Any) -> None:
    peer.create_id(
        [
            {"type": "message", "role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "3", "annotations": [], "logprobs": []}]},
            {"role": "system", "content": "s"},
        ]
    )  # fmt: skip
    assert peer.prompts == ["system:d\nuser:1\n2\nassistant:3\nsystem:s"]


def test_steering_fails_as_unsupported_and_gives_the_input_back(peer: Any) -> None:
    steer = {"previous_response_id": "resp_x", "input": [{"type": "message", "role": "user", "content": "wait"}]}
    frame = peer.send(type="response.steer", stream_id="a", **steer)[0]
    assert (frame["type"], frame["sequence_number"], frame["stream_id"]) == ("response.steer.failed", 0, "a")
    assert frame["error"]["code"] == "steering_not_supported"
    assert frame["steer"] == steer
    running = peer.create_id(stream_id="b")
    frame = peer.send(type="response.steer", previous_response_id=running, input="wait")[0]
    assert (frame["sequence_number"], frame["stream_id"]) == (2, "b")
    assert peer.finish(running)[0]["sequence_number"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x"}, "previous_response_id"),
        ({"previous_response_id": "r"}, "input"),
        ({"previous_response_id": "r", "input": [{"role": "system", "content": "x"}]}, "input[0].role"),
    ],
)
def test_a_malformed_steer_names_the_field(peer: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(peer.send(type="response.steer", **fields))["param"] == param
