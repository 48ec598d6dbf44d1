"""The asynchronous client: a WebSocket around :class:`~outrider_client.protocol.ClientProtocol`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from .conversation import Conversation
from .errors import ClientClosed, ConnectionFailed, ConnectionLost, OutriderError, ProtocolError
from .events import Response
from .protocol import ClientProtocol, Exchange
from .stream import ResponseStream

Input = str | Sequence[Mapping[str, Any]]  # a user message, or items as in OpenAI's Responses API
MAX_FRAME_BYTES = 64 * 2**20
PING_TIMEOUT_S = 60  # a pong may wait behind a large frame


class AsyncClient:
    """A connection to an Outrider server, for any number of answers at once.

    ::

        async with AsyncClient("ws://127.0.0.1:8800/v1/responses") as client:
            async for delta in await client.respond("Hello"):
                print(delta.text, end="")

    Args:
        url: where the server's Responses endpoint is, ``ws://`` or ``wss://``.
        token: sent as ``Authorization: Bearer …``.
        headers: more headers for the handshake.
        max_buffer: characters of events kept for a stream that is read slowly. A stream that lags further
            behind is cancelled and raises ``SlowConsumer``; other streams never wait for it.
        open_timeout: seconds to wait for the connection.

    Raises (on entering, or from ``connect``):
        ConnectionFailed: there is no server, or it refused.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_buffer: int = 2**20,
        open_timeout: float = 10.0,
    ) -> None:
        self._url = url
        self._headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        self._open_timeout = open_timeout
        self._protocol = ClientProtocol(max_buffer)
        self._streams: dict[Exchange, ResponseStream] = {}
        self._frames_waiting = asyncio.Event()
        self._socket: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: Callable[[], OutriderError] | None = None  # makes the error that says why

    async def connect(self) -> AsyncClient:
        try:
            self._socket = await connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=self._open_timeout,
                close_timeout=5,
                ping_timeout=PING_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
                compression=None,  # a delta is too small to gain by it
            )
        except InvalidStatus as error:
            status = error.response.status_code
            reason = error.response.body.decode(errors="replace").strip() if error.response.body else ""
            raise ConnectionFailed(f"{self._url} answered HTTP {status} {reason[:500]}".rstrip(), status) from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise ConnectionFailed(f"cannot connect to {self._url}: {error or type(error).__name__}") from error
        self._tasks = [asyncio.create_task(self._read(self._socket)), asyncio.create_task(self._write(self._socket))]
        return self

    async def respond(
        self,
        input: Input = (),
        *,
        instructions: str | None = None,
        previous_response_id: str | None = None,
        max_output_tokens: int | None = None,
        prediction: str | Mapping[str, Any] | None = None,
        lane: str | None = None,
        **fields: Any,
    ) -> ResponseStream:
        """Ask for an answer; returns once the server has accepted the request.

        Args:
            input: a user message, or a list of items.
            instructions: the system message. It is not inherited from the previous response.
            previous_response_id: the response to continue from.
            max_output_tokens: where to cut the answer.
            prediction: text that the answer is expected to hold, such as a file that is to be edited. It makes the
                answer come sooner where it is right and never changes it; ``stream.usage`` says how much was.
            lane: responses of one lane take turns, in order. Normally each response gets a lane of its own.
            **fields: anything else ``response.create`` takes: ``temperature``, ``top_p``, ``seed``,
                ``stop``, ``max_draft_tokens``, ``include``, …

        Raises:
            RequestRefused: the server refused; the message says why.
            ConnectionLost: there is no connection any more.
        """
        stream = self._ask(
            {
                "input": input,
                "instructions": instructions,
                "previous_response_id": previous_response_id,
                "max_output_tokens": max_output_tokens,
                "prediction": {"type": "content", "content": prediction} if isinstance(prediction, str) else prediction,
                **fields,
            },
            lane,
        )
        try:
            await stream._accepted()
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    async def prewarm(self, input: Input = (), **fields: Any) -> Response:
        """Have the server read a prompt ahead, without answering.

        The result's id is a ``previous_response_id`` for the request that follows; pass ``instructions`` there
        again. Takes the arguments of :meth:`respond`.
        """
        return await (await self.respond(input, generate=False, **fields)).result()

    def conversation(self, **fields: Any) -> Conversation:
        """A dialogue of many turns; ``fields`` (of :meth:`respond`) hold for every turn."""
        return Conversation(self, fields)

    async def aclose(self) -> None:
        """Close the connection; streams still open raise ``ClientClosed``."""
        self._end(ClientClosed)
        if self._socket is not None:
            await self._socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _ask(self, fields: Mapping[str, Any], lane: str | None) -> ResponseStream:
        if self._socket is None:
            raise ConnectionLost("the client is not connected; use 'async with' or await connect() first")
        if self._ended is not None:
            raise self._ended()
        exchange = self._protocol.create(fields, lane)
        stream = self._streams[exchange] = ResponseStream(exchange, self._cancel)
        self._frames_waiting.set()
        return stream

    def _cancel(self, exchange: Exchange) -> None:
        self._protocol.cancel(exchange)
        self._frames_waiting.set()

    async def _read(self, socket: ClientConnection) -> None:
        """Every frame that comes, until the connection ends, whoever reads its stream or does not."""
        try:
            async for frame in socket:
                self._wake(self._protocol.receive(frame))
                self._frames_waiting.set()  # a cancel that waited for the response's id
        except ConnectionClosed:
            pass
        except ProtocolError as error:
            message = str(error)
            self._end(lambda: ProtocolError(message))
            await socket.close(1002)
        finally:
            self._end(lambda: _connection_lost(socket))

    async def _write(self, socket: ClientConnection) -> None:
        try:
            while True:
                await self._frames_waiting.wait()
                self._frames_waiting.clear()
                for frame in self._protocol.frames_to_send():
                    await socket.send(frame)
        except ConnectionClosed:
            pass  # the reader sees it too, after the frames that came before

    def _wake(self, exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            self._streams[exchange]._wake()
            if exchange.is_done:
                del self._streams[exchange]

    def _end(self, make_error: Callable[[], OutriderError]) -> None:
        """No more events will come. The first reason counts."""
        if self._ended is None:
            self._ended = make_error
            self._wake(self._protocol.connection_lost(make_error))


def _connection_lost(socket: ClientConnection) -> ConnectionLost:
    code = socket.close_code or 1006
    reason = f": {socket.close_reason}" if socket.close_reason else ""
    return ConnectionLost(f"the connection to the server ended (code {code}{reason})", code)
