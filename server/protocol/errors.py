"""Every error a client can get, and the frame that carries it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    INVALID_JSON = "invalid_json"
    MESSAGE_TOO_LARGE = "message_too_large"
    UNKNOWN_EVENT_TYPE = "unknown_event_type"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    UNSUPPORTED_VALUE = "unsupported_value"
    INVALID_PROMPT = "invalid_prompt"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    INVALID_STREAM_ID = "invalid_stream_id"
    STREAM_LIMIT_REACHED = "websocket_stream_limit_reached"
    CONNECTION_LIMIT_REACHED = "websocket_connection_limit_reached"
    QUEUE_FULL = "websocket_queue_full"
    SERVER_OVERLOADED = "server_overloaded"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    SERVER_SHUTTING_DOWN = "server_shutting_down"
    SERVER_ERROR = "server_error"


INVALID_REQUEST = "invalid_request_error"

# code: (HTTP-like status, error type)
ERRORS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_JSON: (400, INVALID_REQUEST),
    ErrorCode.MESSAGE_TOO_LARGE: (413, INVALID_REQUEST),
    ErrorCode.UNKNOWN_EVENT_TYPE: (400, INVALID_REQUEST),
    ErrorCode.INVALID_TYPE: (400, INVALID_REQUEST),
    ErrorCode.INVALID_VALUE: (400, INVALID_REQUEST),
    ErrorCode.MISSING_REQUIRED_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNKNOWN_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_PARAMETER: (400, INVALID_REQUEST),
    ErrorCode.UNSUPPORTED_VALUE: (400, INVALID_REQUEST),
    ErrorCode.INVALID_PROMPT: (400, INVALID_REQUEST),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID_REQUEST),
    ErrorCode.MODEL_NOT_FOUND: (404, INVALID_REQUEST),
    ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND: (400, INVALID_REQUEST),
    ErrorCode.RESPONSE_NOT_FOUND: (404, INVALID_REQUEST),
    ErrorCode.INVALID_STREAM_ID: (400, INVALID_REQUEST),
    ErrorCode.STREAM_LIMIT_REACHED: (400, INVALID_REQUEST),
    ErrorCode.CONNECTION_LIMIT_REACHED: (400, INVALID_REQUEST),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.SERVER_OVERLOADED: (503, "server_error"),
    ErrorCode.ENGINE_UNAVAILABLE: (503, "server_error"),
    ErrorCode.SERVER_SHUTTING_DOWN: (503, "server_error"),
    ErrorCode.SERVER_ERROR: (500, "server_error"),
}


class ProtocolError(Exception):
    """What a client did wrong, or what it has to know: a code of the table, a sentence, the field's name."""

    def __init__(
        self, code: ErrorCode, message: str, param: str | None = None, *, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def status(self) -> int:
        return ERRORS[self.code][0]

    def body(self) -> dict[str, Any]:
        """The ``error`` object, as HTTP answers carry it too."""
        body: dict[str, Any] = {"type": ERRORS[self.code][1], "code": str(self.code), "message": self.message}
        if self.param is not None:
            body["param"] = self.param
        if self.headers is not None:
            body["headers"] = self.headers
        return body

    def event(self, stream_id: str | None) -> dict[str, Any]:
        """The ``error`` frame. The nested object is the standard; the flat copies serve clients of the older shape."""
        event: dict[str, Any] = {"type": "error", "status": self.status}
        if stream_id is not None:
            event["stream_id"] = stream_id
        event["error"] = self.body()
        event["code"] = str(self.code)
        event["message"] = self.message
        if self.param is not None:
            event["param"] = self.param
        return event


def show(value: object, limit: int = 80) -> str:
    """A client's value, short and printable, for an error message."""
    text = json_type(value) if isinstance(value, dict | list) else ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def json_type(value: object) -> str:
    """The JSON name of a decoded value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")
