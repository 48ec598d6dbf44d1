"""The fields that choose tokens: the standard ones and ours, which are named as vLLM names them."""

from __future__ import annotations

import re
from typing import Any

from outrider.server.engine.request import ModelInfo
from outrider.server.protocol.errors import ErrorCode, ProtocolError
from outrider.server.protocol.fields import Fields, as_number, wrong_type, wrong_value
from outrider.verify.sampling_params import MAX_LOGPROBS, MAX_SEED, InvalidParameter, SamplingParams

_MAX_COUNT = 2**31 - 1
_MAX_IDS = 1024
_MAX_MESSAGE = 300  # characters of an error message that may repeat the client's value

# Our own top-level fields beside the standard max_output_tokens, temperature, top_p and top_logprobs.
EXTENSIONS = frozenset(
    {
        "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "min_output_tokens", "stop", "stop_token_ids", "ignore_eos", "max_draft_tokens",
    }
)  # fmt: skip
NAMES = EXTENSIONS | {"max_output_tokens", "temperature", "top_p", "top_logprobs"}
# SamplingParams' name: the client's name, where they differ.
_WIRE_NAMES = {"max_tokens": "max_output_tokens", "min_tokens": "min_output_tokens", "logprobs": "top_logprobs"}
_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


def parse_sampling(fields: Fields, model: ModelInfo, *, seed: int, logprobs: bool) -> SamplingParams:
    """Sampling parameters of a request; without ``max_output_tokens`` they end with the context.

    Args:
        seed: used when the client gives none.
        logprobs: whether log-probabilities were asked for by ``include``; ``top_logprobs`` asks too.

    Raises:
        ProtocolError: a value of the wrong type or out of its range.
    """
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    given: dict[str, Any] = {
        "max_tokens": fields.integer("max_output_tokens", 1, _MAX_COUNT),
        "min_tokens": fields.integer("min_output_tokens", 0, _MAX_COUNT),
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k", 0, _MAX_COUNT),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed", 0, MAX_SEED),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _parse_logit_bias(fields),
        "stop": _parse_stop(fields),
        "stop_token_ids": _parse_token_ids(fields, "stop_token_ids"),
        "ignore_eos": fields.boolean("ignore_eos"),
        "logprobs": (top_logprobs or 0) if logprobs or top_logprobs else None,
        "max_draft_tokens": fields.integer("max_draft_tokens", 0, _MAX_COUNT),
    }
    chosen = {"max_tokens": _MAX_COUNT, "seed": seed} | {
        name: value for name, value in given.items() if value is not None
    }
    try:
        params = SamplingParams(**chosen)
        params.check_token_ids(model.vocab_size)
    except InvalidParameter as error:
        wire_name = _WIRE_NAMES.get(error.name, error.name)
        message = str(error)
        for name, on_the_wire in {**_WIRE_NAMES, error.name: wire_name}.items():
            message = re.sub(rf"\b{name}\b", f"'{on_the_wire}'", message)
        message = message[:_MAX_MESSAGE] + "."
        raise ProtocolError(ErrorCode.INVALID_VALUE, message, wire_name) from None
    return params


def _parse_logit_bias(fields: Fields) -> dict[int, float]:
    biases = fields.mapping("logit_bias")
    _check_length("logit_bias", len(biases))
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise wrong_value("logit_bias", 'an object whose keys are token ids such as "42"', key)
    return {int(key): as_number(f"logit_bias.{key}", value) for key, value in biases.items()}


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    if isinstance(stop, str):
        return (stop,)
    strings = fields.array("stop")
    for index, value in enumerate(strings):
        if not isinstance(value, str):
            raise wrong_type(f"stop[{index}]", "a string", value)
    return tuple(strings)


def _parse_token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.array(name)
    _check_length(name, len(ids))
    for index, value in enumerate(ids):
        if type(value) is not int:
            raise wrong_type(f"{name}[{index}]", "an integer", value)
    return tuple(ids)


def _check_length(name: str, length: int) -> None:
    if length > _MAX_IDS:
        raise wrong_value(name, f"at most {_MAX_IDS} entries", length)
