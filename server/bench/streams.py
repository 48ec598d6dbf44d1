"""Two wire protocols, one kind of record: what was sent, each piece of text, the end, all with their times.

``ws://…/v1/responses`` is our own server, or any that speaks OpenAI's Responses WebSocket mode;
``http://…/v1/chat/completions`` is any OpenAI-compatible server that streams Server-Sent Events.
Times are of ``time.perf_counter``, in seconds, taken when a frame has been read from the socket.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.protocol import State

from outrider.server.bench.speculation import Speculation, speculation_of

Json = Mapping[str, Any]
MAX_FRAME_BYTES = 64 * 2**20


class StreamFailed(Exception):
    """The request did not come to its end; the message says why, ``code`` is the server's word for it."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class CannotConnect(StreamFailed):
    """There is no server at this URL, or it does not take us."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. None leaves a choice to the server."""

    messages: Sequence[Mapping[str, str]]
    max_tokens: int | None = None
    temperature: float | None = None
    max_draft_tokens: int | None = None
    seed: int | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    include: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    at: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that arrived in one piece; ``fields`` is the event that brought it."""

    at: float
    text: str
    fields: Json


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer. Token counts are the server's own; None where it gives none."""

    at: float
    status: str  # completed, incomplete or cancelled
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    speculation: Speculation | None = None
    response_id: str | None = None
    model: str | None = None  # that answered


Record = Sent | Chunk | Ending


class Connection(Protocol):
    """One client's connection; it is kept open from one answer to the next. One answer at a time."""

    def stream(self, ask: Ask) -> AsyncGenerator[Record, None]:
        """``Sent``, any number of ``Chunk``, one ``Ending``.

        Raises:
            StreamFailed: the server cannot be reached, refuses, fails or goes away.
        """
        ...

    async def cancel(self) -> None:
        """Ask the server to end the running answer early; its ``Ending`` still comes."""
        ...

    async def aclose(self) -> None: ...


def open_connection(url: str, *, model: str | None = None, timeout_s: float | None = None) -> Connection:
    """The connection for a URL; it connects with the first request.

    Args:
        model: the name to ask for; None takes what the server serves.
        timeout_s: the longest silence of the server.

    Raises:
        ValueError: neither of the two protocols.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("ws", "wss"):
        return ResponsesConnection(url, model, timeout_s)
    if scheme in ("http", "https"):
        from outrider.server.bench.sse import ChatConnection  # httpx takes its time to import

        return ChatConnection(url, model, timeout_s)
    raise ValueError(f"the URL must be ws://…/v1/responses or http://…/v1/chat/completions, not {url!r}")


class ResponsesConnection:
    """OpenAI's Responses API over a WebSocket."""

    def __init__(self, url: str, model: str | None, timeout_s: float | None) -> None:
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._socket: ClientConnection | None = None

    async def connect(self) -> None:
        """Connect, unless it stands.

        Raises:
            CannotConnect: there is no server, or it refuses.
        """
        if self._socket is not None and self._socket.state is State.OPEN:
            return
        try:
            self._socket = await connect(
                self._url, compression=None, max_size=MAX_FRAME_BYTES, ping_interval=None, close_timeout=2
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise CannotConnect(f"cannot connect to {self._url}: {error or type(error).__name__}") from error

    async def stream(self, ask: Ask) -> AsyncGenerator[Record, None]:
        is_ended = False
        try:
            await self.connect()
            yield Sent(time.perf_counter())
            await self._send(self._create_event(ask))
            while not is_ended:
                async with asyncio.timeout(self._timeout_s):
                    record = await self._receive()
                if record is not None:
                    is_ended = isinstance(record, Ending)
                    yield record
        except TimeoutError:
            raise StreamFailed(f"{self._url} was silent for {self._timeout_s} s") from None
        except ConnectionClosed as error:
            raise StreamFailed(f"{self._url} closed the connection: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StreamFailed(f"{self._url} sent something that is no event of this protocol: {error!r}") from error
        finally:
            if not is_ended:
                await self.aclose()  # what is still to come must not be taken for the next answer

    async def cancel(self) -> None:
        await self._send({"type": "response.cancel"})

    async def aclose(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()

    def _create_event(self, ask: Ask) -> Json:
        fields = {
            "type": "response.create",
            "model": self._model,
            "input": list(ask.messages),
            "max_output_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "max_draft_tokens": ask.max_draft_tokens,
            "seed": ask.seed,
            "instructions": ask.instructions,
            "previous_response_id": ask.previous_response_id,
            "include": list(ask.include) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    async def _send(self, fields: Json) -> None:
        if self._socket is not None:
            await self._socket.send(json.dumps(fields))

    async def _receive(self) -> Record | None:
        """The next record; None for an event that brings neither text nor the end."""
        assert self._socket is not None
        frame = await self._socket.recv()
        now = time.perf_counter()
        event = json.loads(frame)
        match event["type"]:
            case "response.output_text.delta":
                return Chunk(now, event["delta"], event)
            case "response.completed" | "response.incomplete":
                return _responses_ending(now, event["response"])
            case "response.failed":
                raise StreamFailed((event["response"].get("error") or {}).get("message", "the response failed"))
            case "error":
                error = event.get("error", event)
                raise StreamFailed(error.get("message", "the server reported an error"), error.get("code"))
        return None


def _responses_ending(now: float, response: Json) -> Ending:
    usage = response.get("usage") or {}
    return Ending(
        now,
        response.get("status", "completed"),
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        speculation_of(response.get("metrics") or {}),
        response.get("id"),
        response.get("model"),
    )
