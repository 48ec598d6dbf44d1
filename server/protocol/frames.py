"""JSON text frames: strict when read, compact when written."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Never

from outrider.server.protocol.errors import ErrorCode, ProtocolError, json_type, show

_MAX_DEPTH = 64


def decode(text: str) -> dict[str, Any]:
    """Read one client event. Its strings are not yet known to be encodable; see ``check_encodable``.

    Raises:
        ProtocolError: not a JSON object, nested too deeply, or JSON that readers disagree about (repeated
            names, NaN, numbers out of range).
    """
    try:
        event = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_object_without_repeats
        )
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        message = f"The message is not valid JSON: {error.msg} at character {error.pos}."
        raise ProtocolError(ErrorCode.INVALID_JSON, message) from None
    except ValueError:
        # json.loads turns a number of more than 4300 digits into a plain ValueError.
        message = "The message holds an integer with too many digits; send a smaller one."
        raise ProtocolError(ErrorCode.INVALID_JSON, message) from None
    if not isinstance(event, dict):
        message = f"A message must be a JSON object with a 'type', not {json_type(event)}."
        raise ProtocolError(ErrorCode.INVALID_JSON, message)
    _check_depth(event)
    return event


def encode(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> Never:
    raise ProtocolError(ErrorCode.INVALID_JSON, f"The message holds {name}, which is not JSON; send a finite number.")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ProtocolError(ErrorCode.INVALID_JSON, f"The message holds the number {digits[:40]}, which is too large.")
    return value


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        message = f"The message gives the field {show(repeated)} twice in one object; send it once."
        raise ProtocolError(ErrorCode.INVALID_JSON, message)
    return values


def check_encodable(event: dict[str, Any]) -> None:
    """Find strings that are not text: an escape can bring half a surrogate pair, which no tokenizer takes.

    Raises:
        ProtocolError: with the path of the first such string.
    """
    try:
        encode(event).encode()
    except UnicodeEncodeError:
        path = _path_of_half_pair(event)
        where = f"'{path}'" if path else "The name of a field"
        message = f"{where} has half of a surrogate pair, which is not text; send both halves or neither."
        raise ProtocolError(ErrorCode.INVALID_VALUE, message, path) from None


def _path_of_half_pair(event: dict[str, Any]) -> str | None:
    """Where the half pair is; None if in a field's name."""
    pending: list[tuple[str, Any]] = [("", event)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and not _is_encodable(value):
            return path
        if isinstance(value, list):
            pending.extend((f"{path}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            pending.extend(
                (f"{path}.{key}" if path else key, item) for key, item in value.items() if _is_encodable(key)
            )
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_depth(event: dict[str, Any]) -> None:
    level: list[Any] = [event]
    for _ in range(_MAX_DEPTH):
        children = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ProtocolError:
    message = f"The message is nested too deeply; at most {_MAX_DEPTH} levels are read."
    return ProtocolError(ErrorCode.INVALID_JSON, message)
