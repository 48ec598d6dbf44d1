"""``prediction``: what the client expects the answer to be (OpenAI's predicted outputs)."""

from __future__ import annotations

from typing import Any

from outrider.server.protocol.errors import ErrorCode, ProtocolError, show
from outrider.server.protocol.fields import wrong_type

MAX_PREDICTION_CHARS = 2**20


def parse_prediction(value: Any) -> str:
    """The text of ``{"type": "content", "content": …}``, its parts end to end; empty if there is none.

    Raises:
        ProtocolError: another type, parts that are no text, or more than ``MAX_PREDICTION_CHARS``.
    """
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise wrong_type("prediction", 'an object such as {"type": "content", "content": "..."}', value)
    for name in value:
        if name not in ("type", "content"):
            message = f"'prediction' has the unknown field {show(name)}; it takes 'type' and 'content'."
            raise ProtocolError(ErrorCode.UNKNOWN_PARAMETER, message, "prediction")
    if value.get("type") != "content":
        message = f"'prediction.type' can only be 'content', not {show(value.get('type'))}."
        raise ProtocolError(ErrorCode.UNSUPPORTED_VALUE, message, "prediction.type")
    text = _parse_content(value.get("content"))
    if len(text) > MAX_PREDICTION_CHARS:
        message = (
            f"'prediction.content' has {len(text)} characters; at most {MAX_PREDICTION_CHARS} are read. "
            "Send the part that the answer begins with."
        )
        raise ProtocolError(ErrorCode.INVALID_VALUE, message, "prediction.content")
    return text


def _parse_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type("prediction.content", "a string or an array of text parts", content)
    return "".join(_parse_part(part, f"prediction.content[{index}]") for index, part in enumerate(content))


def _parse_part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, "an object", part)
    if part.get("type") != "text":
        message = f"'{param}.type' can only be 'text', not {show(part.get('type'))}."
        raise ProtocolError(ErrorCode.UNSUPPORTED_VALUE, message, f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"{param}.text", "a string", part.get("text"))
    return str(part["text"])
