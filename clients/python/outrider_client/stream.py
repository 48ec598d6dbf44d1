"""One answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from .events import Event, Metrics, Response, TextDelta, Usage
from .protocol import Exchange


class ResponseStream:
    """An answer being generated, to be iterated over once.

    ::

        async for delta in stream:
            print(delta.text, end="")

    Leaving the loop before the end, by ``break`` or by an exception, cancels this response on the server
    and no other; so does leaving ``async with stream:``. An answer cut short (by ``max_output_tokens``, by
    a cancel) just ends: ``stream.response.status`` says how.

    Raises (while iterating):
        ResponseFailed: the server could not finish the answer.
        ConnectionLost: the connection ended before the answer did.
        SlowConsumer: too much waited unread; see ``AsyncClient(max_buffer=…)``.
    """

    def __init__(self, exchange: Exchange, cancel: Callable[[Exchange], None]) -> None:
        self._exchange = exchange
        self._cancel = cancel
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def response(self) -> Response:
        """The response as last reported; complete once the stream has ended."""
        assert self._exchange.response is not None, "a stream is handed out once its response was created"
        return self._exchange.response

    @property
    def usage(self) -> Usage | None:
        """Token counts; None until the stream has ended."""
        return self.response.usage

    @property
    def metrics(self) -> Metrics | None:
        """Times and acceptance as the server measured them; None until the stream has ended."""
        return self.response.metrics

    async def __aiter__(self) -> AsyncGenerator[TextDelta, None]:
        """The pieces of text, one per step of the model."""
        try:
            while (event := await self._next()) is not None:
                if isinstance(event, TextDelta):
                    yield event
        finally:
            self.cancel()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event of this response, instead of the text alone."""
        try:
            while (event := await self._next()) is not None:
                yield event
        finally:
            self.cancel()

    async def text(self) -> str:
        """The text that is still to come, all of it."""
        return "".join([delta.text async for delta in self])

    async def result(self) -> Response:
        """Wait for the end, letting go what was not read; returns the complete response."""
        try:
            while await self._next() is not None:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.response

    def cancel(self) -> None:
        """Stop the response. Nothing more is read from it; :meth:`result` waits for its partial answer."""
        self._cancel(self._exchange)

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> ResponseStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _wake(self) -> None:
        self._changed.set()

    async def _accepted(self) -> None:
        """Wait until the server has created the response.

        Raises:
            OutriderError: it was refused, or the connection ended first.
        """
        while self._exchange.response is None:
            if self._exchange.error is not None:
                raise self._exchange.error
            await self._change()

    async def _ended(self) -> None:
        """Wait until the response has ended, however it went."""
        while not self._exchange.is_done:
            await self._change()

    async def _next(self) -> Event | None:
        """The next event; None at the end."""
        while (event := self._exchange.take()) is None:
            if self._exchange.error is not None:
                raise self._exchange.error
            if self._exchange.is_done:
                return None
            await self._change()
        return event

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
