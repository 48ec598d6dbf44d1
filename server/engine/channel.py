"""Frames over the socket between the server and the engine process: four bytes of length, then a message.

The engine's side is synchronous and never blocks a step: what the socket does not take is kept and sent
later. That cannot grow for ever, as the server's side always reads, whatever its clients do, and bounds the
number of open requests. The server's side is an asyncio protocol.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Self

from outrider.server.engine.messages import Message, MessageError, decode, encode

MAX_FRAME_BYTES = 64 * 1024 * 1024  # a prompt of twelve million tokens
_RECEIVE_BYTES = 256 * 1024
_HEADER = struct.Struct(">I")


class ChannelClosed(Exception):
    """The other process is gone."""


def encode_frame(message: Message) -> bytes:
    """Raises:
    MessageError: the message cannot be encoded or is too large.
    """
    payload = encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise MessageError(f"a message of {len(payload)} bytes is too large; the limit is {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with this data, in order.

        Raises:
            MessageError: the other side does not speak this protocol; the channel is of no more use.
        """
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise MessageError(f"a frame of {size} bytes is too large; the limit is {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(decode(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages


class EngineChannel:
    """The engine's side."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = FrameDecoder()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Send without waiting. Raises ``ChannelClosed``."""
        self._unsent += encode_frame(message)
        self._flush()

    def receive_pending(self) -> list[Message]:
        """All messages that have arrived; empty if none has. Raises ``ChannelClosed``."""
        self._flush()
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            messages += self._decoder.feed(data)

    def wait(self) -> list[Message]:
        """Block until messages arrive and return them. Raises ``ChannelClosed``."""
        while not (messages := self.receive_pending()):
            self._poll(select.POLLIN, None)
        return messages

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, or for so long. Raises ``ChannelClosed``."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            self._poll(0, left)
            self._flush()

    def close(self) -> None:
        self._socket.close()

    def _poll(self, events: int, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, events | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if timeout_s is None else timeout_s * 1000)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed from error


class ServerChannel(asyncio.Protocol):
    """The server's side. ``on_message`` is called in the event loop for every message, in order."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self.closed: asyncio.Future[MessageError | None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[Message], None]) -> Self:
        """Take over a connected socket."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(on_message), sock=sock)
        return channel

    def send_frame(self, frame: bytes) -> None:
        """Send without waiting; lost if the other side is gone, which ``closed`` tells."""
        assert self._transport is not None
        self._transport.write(frame)

    def abort(self) -> None:
        """Close at once; no message comes after this."""
        self._end(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except MessageError as error:
            self._end(error)
            return
        for message in messages:
            if self.closed.done():
                return
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    def _end(self, error: MessageError | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)
        if self._transport is not None:
            self._transport.abort()
