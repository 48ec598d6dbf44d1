"""Typed access to the fields of a client event; every refusal names the field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.server.protocol.errors import ErrorCode, ProtocolError, json_type, show


def wrong_type(param: str, expected: str, value: object) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_TYPE, f"'{param}' must be {expected}, not {json_type(value)}.", param)


def wrong_value(param: str, must: str, value: object) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_VALUE, f"'{param}' must be {must}, not {show(value)}.", param)


class Fields:
    """The fields of one JSON object. A field that is absent or null has its default.

    Args:
        values: the decoded object.
        path: what stands before a field's name in an error, such as ``"text."``.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def param(self, name: str) -> str:
        return self._path + name

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise wrong_type(self.param(name), "true or false", value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is not int:  # a bool is an int to Python, not to the client
            raise wrong_type(self.param(name), "an integer", value)
        if not low <= value <= high:
            raise wrong_value(self.param(name), f"from {low} to {high}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        return None if value is None else as_number(self.param(name), value)

    def string(self, name: str, max_length: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong_type(self.param(name), "a string", value)
        if max_length is not None and len(value) > max_length:
            must = f"'{self.param(name)}' must be at most {max_length} characters long, not {len(value)}."
            raise ProtocolError(ErrorCode.INVALID_VALUE, must, self.param(name))
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self.string(name)
        if value is not None and value not in choices:
            raise wrong_value(self.param(name), "one of " + ", ".join(sorted(choices)), value)
        return value

    def array(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong_type(self.param(name), "an array", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong_type(self.param(name), "an object", value)
        return value

    def nested(self, name: str) -> Fields:
        return Fields(self.mapping(name), self.param(name) + ".")


def as_number(param: str, value: object) -> float:
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise wrong_value(param, "a number in the range of a double", value) from None
    if isinstance(value, float):
        return value
    raise wrong_type(param, "a number", value)
