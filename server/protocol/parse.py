"""``response.create``, ``response.cancel`` and ``response.steer``, from decoded JSON to typed objects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from outrider.server.engine.request import ModelInfo
from outrider.server.protocol.errors import ErrorCode, ProtocolError, show
from outrider.server.protocol.fields import Fields, wrong_type, wrong_value
from outrider.server.protocol.frames import check_encodable
from outrider.server.protocol.items import Message, parse_input
from outrider.server.protocol.prediction import parse_prediction
from outrider.server.protocol.sampling import NAMES as SAMPLING_FIELDS
from outrider.server.protocol.sampling import parse_sampling
from outrider.verify.sampling_params import SamplingParams

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_DRAFT_TOKENS = "outrider.draft_tokens"

# Standard values that ask for parts of items this server never produces.
_IGNORED_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_READ = frozenset(
    {
        "type", "stream_id", "model", "input", "instructions", "include", "previous_response_id", "generate",
        "prompt_cache_options", "store", "metadata", "user", "service_tier", "truncation", "parallel_tool_calls",
        "tool_choice", "tools", "text", "background", "prediction",
    }
)  # fmt: skip
# Standard fields that cannot change the answer here: hints, caching keys, transport options, limits on tools.
_IGNORED = frozenset(
    {
        "access_programs", "background_options", "client_metadata", "max_tool_calls", "prompt_cache_key",
        "prompt_cache_retention", "reasoning", "safety_identifier", "stream", "stream_options",
    }
)  # fmt: skip
# Standard fields that would change the answer and are not built: refused unless empty.
_UNSUPPORTED = ("context_management", "conversation", "image", "moderation", "prompt", "tools")
_SERVICE_TIERS = frozenset({"auto", "default", "flex", "scale", "priority", "fast", "ultrafast"})
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512
_MAX_ECHOED = 512


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A valid ``response.create``. ``params.max_tokens`` is not yet cut to what the context leaves."""

    messages: tuple[Message, ...]  # the new input items only
    instructions: str | None
    previous_response_id: str | None
    params: SamplingParams
    generate: bool
    store: bool
    include_draft_tokens: bool
    prediction: str  # empty: none
    echo: dict[str, Any]  # what the response object repeats


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """``response.cancel``: one response, or without an id all of the lane's."""

    response_id: str | None


@dataclass(frozen=True, slots=True)
class SteerRequest:
    previous_response_id: str
    input: str | list[Any]


def parse_stream_id(event: dict[str, Any]) -> str | None:
    """The lane of a client event; None is the default lane."""
    stream_id = event.get("stream_id")
    if stream_id is None:
        return None
    if not isinstance(stream_id, str) or not _STREAM_ID.fullmatch(stream_id):
        raise ProtocolError(
            ErrorCode.INVALID_STREAM_ID,
            "The 'stream_id' field must be a non-empty string with at most 256 characters and may only contain "
            "letters, numbers, underscores, hyphens, and periods.",
            "stream_id",
        )
    return stream_id


def parse_create(event: dict[str, Any], model: ModelInfo, seed: int) -> CreateRequest:
    """Check a ``response.create``; ``seed`` is used when the client gives none.

    Raises:
        ProtocolError: the first thing that is wrong, with the field's name.
    """
    check_encodable(event)
    _refuse_unknown(event)
    fields = Fields(event)
    _refuse_unsupported(fields)
    _check_model(fields, model)
    include = _parse_include(fields)
    cache_options = fields.nested("prompt_cache_options")
    cache_options.choice("mode", {"implicit", "explicit"})
    prewarm = cache_options.boolean("prewarm") or False
    instructions = fields.string("instructions")
    previous_response_id = fields.string("previous_response_id", _MAX_ECHOED)
    messages = parse_input(fields.get("input"))
    if not messages and instructions is None and previous_response_id is None:
        message = "'input' is missing: send a string, message items, or a 'previous_response_id' to continue from."
        raise ProtocolError(ErrorCode.MISSING_REQUIRED_PARAMETER, message, "input")
    return CreateRequest(
        messages=messages,
        instructions=instructions,
        previous_response_id=previous_response_id,
        params=parse_sampling(fields, model, seed=seed, logprobs=INCLUDE_LOGPROBS in include),
        generate=fields.boolean("generate") is not False and not prewarm,
        store=fields.boolean("store") is not False,
        include_draft_tokens=INCLUDE_DRAFT_TOKENS in include,
        prediction=parse_prediction(fields.get("prediction")),
        echo=_parse_echo(fields, model),
    )


def parse_cancel(event: dict[str, Any]) -> CancelRequest:
    check_encodable(event)
    return CancelRequest(Fields(event).string("response_id"))


def parse_steer(event: dict[str, Any]) -> SteerRequest:
    check_encodable(event)
    fields = Fields(event)
    previous_response_id = fields.string("previous_response_id")
    if previous_response_id is None:
        message = "'previous_response_id' is missing: name the response to steer."
        raise ProtocolError(ErrorCode.MISSING_REQUIRED_PARAMETER, message, "previous_response_id")
    steering = fields.get("input")
    if not isinstance(steering, str | list):
        raise wrong_type("input", "a string or an array of items", steering)
    for index, item in enumerate(parse_input(steering)):
        if item["role"] != "user":
            raise wrong_value(f"input[{index}].role", "user: only the user steers", item["role"])
    return SteerRequest(previous_response_id, steering)


def _refuse_unknown(event: dict[str, Any]) -> None:
    known = _READ | _IGNORED | SAMPLING_FIELDS
    for name in event:
        if name not in known and name not in _UNSUPPORTED:
            message = f"Unknown parameter: {show(name)}. Check the spelling or leave it out."
            raise ProtocolError(ErrorCode.UNKNOWN_PARAMETER, message, name[:80])


def _refuse_unsupported(fields: Fields) -> None:
    for name in _UNSUPPORTED:
        if fields.get(name) not in (None, [], {}):
            message = f"'{name}' is not supported by this server; leave it out."
            raise ProtocolError(ErrorCode.UNSUPPORTED_PARAMETER, message, name)
    if fields.boolean("background"):
        message = "'background' responses are not supported over WebSocket; leave it out."
        raise ProtocolError(ErrorCode.UNSUPPORTED_PARAMETER, message, "background")
    _only(fields, "truncation", "disabled", "the server never drops input on its own")
    if fields.get("tool_choice") not in (None, "auto", "none"):
        message = "'tool_choice' can only be 'auto' or 'none': this server calls no tools."
        raise ProtocolError(ErrorCode.UNSUPPORTED_VALUE, message, "tool_choice")
    text = fields.nested("text")
    _only(text.nested("format"), "type", "text", "structured output is not supported")
    _only(text, "verbosity", "medium", "the model has no such dial")


def _only(fields: Fields, name: str, supported: str, why: str) -> None:
    value = fields.string(name)
    if value is not None and value != supported:
        param = fields.param(name)
        message = f"'{param}' can only be '{supported}', not {show(value)}: {why}."
        raise ProtocolError(ErrorCode.UNSUPPORTED_VALUE, message, param)


def _check_model(fields: Fields, model: ModelInfo) -> None:
    name = fields.string("model")
    if name is not None and name != model.name:
        message = f"The model {show(name)} does not exist here; this server serves '{model.name}'."
        raise ProtocolError(ErrorCode.MODEL_NOT_FOUND, message, "model")


def _parse_include(fields: Fields) -> frozenset[str]:
    include = fields.array("include")
    known = _IGNORED_INCLUDES | {INCLUDE_LOGPROBS, INCLUDE_DRAFT_TOKENS}
    for index, value in enumerate(include):
        if not isinstance(value, str):
            raise wrong_type(f"include[{index}]", "a string", value)
        if value not in known:
            raise wrong_value(f"include[{index}]", "one of " + ", ".join(sorted(known)), value)
    return frozenset(include)


def _parse_echo(fields: Fields, model: ModelInfo) -> dict[str, Any]:
    """Small fields only: every snapshot of the response repeats them, so instructions are left out."""
    temperature, top_p = fields.number("temperature"), fields.number("top_p")
    return {
        "model": model.name,
        "parallel_tool_calls": fields.boolean("parallel_tool_calls") is not False,
        "tool_choice": fields.string("tool_choice") or "auto",
        "tools": [],
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "max_output_tokens": fields.get("max_output_tokens"),
        "previous_response_id": fields.get("previous_response_id"),
        "metadata": _parse_metadata(fields),
        "service_tier": fields.choice("service_tier", _SERVICE_TIERS) or "default",
        "store": fields.boolean("store") is not False,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "user": fields.string("user", _MAX_ECHOED),
    }


def _parse_metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.mapping("metadata")
    if len(metadata) > _MAX_METADATA:
        raise wrong_value("metadata", f"at most {_MAX_METADATA} pairs", len(metadata))
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY:
            raise wrong_value("metadata", f"keys of at most {_MAX_METADATA_KEY} characters", key)
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{key}", "a string", value)
        if len(value) > _MAX_METADATA_VALUE:
            raise wrong_value(f"metadata.{key}", f"at most {_MAX_METADATA_VALUE} characters", value)
    return metadata
