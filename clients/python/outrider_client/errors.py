"""What can go wrong, as a tree.

* :exc:`OutriderError`
    * :exc:`ConnectionFailed`: the server could not be reached, or refused the handshake.
    * :exc:`ConnectionLost`: the connection ended while it was needed; every open stream raises this.
        * :exc:`ClientClosed`: the client itself was closed.
    * :exc:`ProtocolError`: the server sent something that is not an event.
    * :exc:`RequestRefused`: the server answered a request with an error frame.
        * :exc:`PreviousResponseNotFound`: the response to continue from is gone; send the whole dialogue.
        * :exc:`ConnectionLimitReached`: the connection is too old; open a new one and ask again.
    * :exc:`ResponseFailed`: the response started and then failed; ``response`` holds what there is of it.
    * :exc:`SlowConsumer`: the stream was read too slowly and its response was cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import Response


class OutriderError(Exception):
    """Base of everything this package raises."""


class ConnectionFailed(OutriderError):
    """No connection came about. ``status`` is the HTTP status, if the server answered at all."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ConnectionLost(OutriderError):
    """The connection ended. ``code`` is the WebSocket close code (1006: it ended without one)."""

    def __init__(self, message: str, code: int = 1006) -> None:
        super().__init__(message)
        self.code = code


class ClientClosed(ConnectionLost):
    """The client was closed, by ``aclose()`` or by leaving its ``with`` block."""

    def __init__(self) -> None:
        super().__init__("the client is closed; open a new one", 1000)


class ProtocolError(OutriderError):
    """The server does not speak this protocol."""


class RequestRefused(OutriderError):
    """An error frame. ``param`` names the field at fault, ``status`` the HTTP status it stands for."""

    def __init__(
        self, message: str, *, code: str | None, type: str | None, param: str | None, status: int | None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.type = type
        self.param = param
        self.status = status


class PreviousResponseNotFound(RequestRefused):
    """``previous_response_id`` names nothing the server still has."""


class ConnectionLimitReached(RequestRefused):
    """The server gives a connection only so long to live."""


class ResponseFailed(OutriderError):
    """``response.failed``: ``response.error`` says why."""

    def __init__(self, response: Response) -> None:
        error = response.error or {}
        super().__init__(str(error.get("message") or "the response failed and the server gave no reason"))
        self.response = response
        self.code = error.get("code")


class SlowConsumer(OutriderError):
    """More of a response waited unread than the client may keep."""


_BY_CODE: dict[str, type[RequestRefused]] = {
    "previous_response_not_found": PreviousResponseNotFound,
    "websocket_connection_limit_reached": ConnectionLimitReached,
}


def refusal(frame: Mapping[str, Any]) -> RequestRefused:
    """The exception for an ``error`` frame, whether its fields are nested under ``error`` or flat."""
    nested = frame.get("error")
    fields: Mapping[str, Any] = nested if isinstance(nested, Mapping) else frame
    code = fields.get("code")
    status = frame.get("status")
    return _BY_CODE.get(str(code), RequestRefused)(
        str(fields.get("message") or "the server refused the request and gave no reason"),
        code=code if isinstance(code, str) else None,
        type=str(fields.get("type")) if nested is fields and fields.get("type") else None,
        param=str(fields["param"]) if fields.get("param") is not None else None,
        status=status if isinstance(status, int) else None,
    )
