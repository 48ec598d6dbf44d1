"""uvicorn's WebSocket protocol with back-pressure that can be seen and peers that can be dropped.

This subclasses a class that uvicorn does not promise to keep; the tests hold one canary for each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, MutableMapping
from typing import Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.http11 import Request

ABORT_EXTENSION = "outrider.abort"

_HIGH_WATER = 16 * 1024  # bytes in user space before a send waits
_NOT_SENT_LOW_WATER = 16 * 1024  # bytes in the kernel, not yet on the wire, before the socket counts as full
_MAX_UNREAD_PONGS = 256 * 1024  # bytes waiting at a peer that pings and does not read
_CLOSE_GRACE_S = 5.0


def abort_of(scope: MutableMapping[str, Any]) -> Callable[[int, str], None]:
    """The connection's ``abort(code, reason)``, which closes without waiting for the peer to read."""
    return cast("Callable[[int, str], None]", scope["extensions"][ABORT_EXTENSION])


def socket_protocol(unacknowledged_timeout_s: float) -> type[WebSocketsSansIOProtocol]:
    """The protocol class for uvicorn's ``ws``, which is made by uvicorn with no arguments of ours."""

    class SocketProtocol(_SocketProtocol):
        user_timeout_ms = int(unacknowledged_timeout_s * 1000)

    return SocketProtocol


class _SocketProtocol(WebSocketsSansIOProtocol):
    user_timeout_ms: int

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # By default the kernel and asyncio swallow megabytes: a whole answer, before a slow reader shows.
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        options = {
            "TCP_NODELAY": 1,  # or an event waits until the one before is acknowledged: 40 ms until the first token
            "TCP_NOTSENT_LOWAT": _NOT_SENT_LOW_WATER,
            "TCP_USER_TIMEOUT": self.user_timeout_ms,
        }
        for name, value in options.items():
            option = getattr(socket, name, None)  # not on every system
            if option is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # the handshake was in order: the scope stands, its task has not run yet
            cast("dict[str, Any]", self.scope["extensions"])[ABORT_EXTENSION] = self.abort

    def abort(self, code: int, reason: str) -> None:
        """Close now, whatever waits; give the peer a moment to read what it can."""
        if not self.close_sent and not self.transport.is_closing():
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            with contextlib.suppress(InvalidState):
                self.conn.send_close(code, reason)
                self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.transport.close()
        self.loop.call_later(_CLOSE_GRACE_S, self.transport.abort)

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_PONGS:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        # close() waits for a flush that a dead peer never allows.
        self.loop.call_later(_CLOSE_GRACE_S, self.transport.abort)

    async def send(self, message: Any) -> None:
        try:
            await super().send(message)
        except RuntimeError:
            if not self.close_sent:
                raise
            raise ClientDisconnected from None  # closed while the message waited for the socket
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # refused in good order; uvicorn would log it as an app's mistake
