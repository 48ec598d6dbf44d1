"""Input items to chat messages."""

from __future__ import annotations

from typing import Any, TypedDict

from outrider.server.protocol.errors import ErrorCode, ProtocolError, show
from outrider.server.protocol.fields import wrong_type, wrong_value

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class Message(TypedDict):
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


def parse_input(value: object, param: str = "input") -> tuple[Message, ...]:
    """The messages of ``input``: a string is one user message; a list holds message items.

    The text parts of one item are joined with newlines. ``developer`` becomes ``system``.

    Raises:
        ProtocolError: an item or part that is no text message; its path is named.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (Message(role="user", content=value),)
    if not isinstance(value, list):
        raise wrong_type(param, "a string or an array of items", value)
    return tuple(_parse_item(item, f"{param}[{index}]") for index, item in enumerate(value))


def _parse_item(item: Any, param: str) -> Message:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    kind = item.get("type", "message")
    if kind != "message":
        raise _unsupported(f"{param}.type", kind, "only items of type 'message' can be read")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_value(f"{param}.role", "one of assistant, developer, system, user", role)
    return Message(role=_ROLES[role], content=_parse_content(item.get("content"), f"{param}.content"))


def _parse_content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(param, "a string or an array of parts", content)
    return "\n".join(_parse_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _parse_part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, "an object", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise _unsupported(f"{param}.type", kind, "this model reads text: input_text, output_text or text")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{param}.text", "a string", text)
    return text


def _unsupported(param: str, value: object, why: str) -> ProtocolError:
    return ProtocolError(ErrorCode.UNSUPPORTED_VALUE, f"'{param}' is {show(value)}; {why}.", param)
