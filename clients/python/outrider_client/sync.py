"""The client for programs without an event loop: the same names, over a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from .client import AsyncClient, Input
from .conversation import Conversation
from .errors import ClientClosed
from .events import Event, Metrics, Response, TextDelta, Usage
from .stream import ResponseStream

T = TypeVar("T")


class _LoopThread:
    """An event loop that runs in the background until closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and hand back the result; an interrupt here cancels the work there."""
        if self._loop.is_closed():
            work.close()
            raise ClientClosed
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncResponseStream:
    """As :class:`~outrider_client.ResponseStream`, with ``for`` and ``with``."""

    def __init__(self, stream: ResponseStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def id(self) -> str:
        return self._stream.id

    @property
    def response(self) -> Response:
        return self._stream.response

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def metrics(self) -> Metrics | None:
        return self._stream.metrics

    def __iter__(self) -> Iterator[TextDelta]:
        return self._iterate(self._stream.__aiter__())

    def events(self) -> Iterator[Event]:
        return self._iterate(self._stream.events())

    def text(self) -> str:
        return self._loop.run(self._stream.text())

    def result(self) -> Response:
        return self._loop.run(self._stream.result())

    def cancel(self) -> None:
        self._loop.run(self._stream.aclose())

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> SyncResponseStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while True:
                try:
                    item = self._loop.run(items.__anext__())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._loop.run(items.aclose())


class SyncConversation:
    """As :class:`~outrider_client.Conversation`."""

    def __init__(self, conversation: Conversation, loop: _LoopThread) -> None:
        self._conversation = conversation
        self._loop = loop

    def respond(self, input: str | Sequence[Mapping[str, Any]], **fields: Any) -> SyncResponseStream:
        return SyncResponseStream(self._loop.run(self._conversation.respond(input, **fields)), self._loop)


class Client:
    """As :class:`~outrider_client.AsyncClient`, for code that is not asynchronous.

    ::

        with Client("ws://127.0.0.1:8800/v1/responses") as client:
            for delta in client.respond("Hello"):
                print(delta.text, end="")

    Streams may be read from different threads, each by one. Takes the arguments of ``AsyncClient``.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = options

    def connect(self) -> Client:
        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(self._connect())
        except BaseException:
            self._loop.close()
            raise
        return self

    async def _connect(self) -> AsyncClient:
        return await AsyncClient(self._url, **self._options).connect()

    def respond(self, input: Input = (), **fields: Any) -> SyncResponseStream:
        return SyncResponseStream(self._loop.run(self._client.respond(input, **fields)), self._loop)

    def prewarm(self, input: Input = (), **fields: Any) -> Response:
        return self._loop.run(self._client.prewarm(input, **fields))

    def conversation(self, **fields: Any) -> SyncConversation:
        return SyncConversation(self._client.conversation(**fields), self._loop)

    def close(self) -> None:
        try:
            self._loop.run(self._client.aclose())
        except ClientClosed:
            return  # closed before
        self._loop.close()

    def __enter__(self) -> Client:
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
