"""One WebSocket: a task that always reads, a task that writes, and the connection's actions in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from outrider.server.engine.client import EngineClient, EngineOverloaded, EngineUnavailable
from outrider.server.engine.request import Request, StepOutput
from outrider.server.protocol.actions import INTERNAL_ERROR, TRY_AGAIN_LATER, Cancel, Prepare, Submit
from outrider.server.protocol.connection import ResponsesConnection
from outrider.server.protocol.errors import ErrorCode, ProtocolError
from outrider.server.protocol.prompt import BuiltPrompt, PromptBuilder, PromptError
from outrider.server.ws.metrics import ServerMetrics
from outrider.server.ws.socket_protocol import abort_of

logger = logging.getLogger("outrider.ws")

_MAX_INLINE_CHARS = 8192  # of prompt and prediction; a longer one is tokenised in a thread, so that no stream stutters
_FRAMES_PER_TURN = 16  # sent before other tasks run: an open socket never suspends the writer


class Session:
    """Drives a ``ResponsesConnection``. Everything runs in the event loop; nothing here waits but the two tasks."""

    def __init__(
        self,
        websocket: WebSocket,
        connection: ResponsesConnection,
        engine: EngineClient,
        prompts: PromptBuilder,
        metrics: ServerMetrics,
    ) -> None:
        self._websocket = websocket
        self._connection = connection
        self._engine = engine
        self._prompts = prompts
        self._metrics = metrics
        self._wake_writer = asyncio.Event()
        self._preparing: set[asyncio.Task[None]] = set()
        self._dropped = False

    async def run(self) -> None:
        """Serve until either side closes; then cancel all that is left."""
        await self._websocket.accept()
        self._perform()
        tasks = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connection.connection_lost()
            self._perform()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def tick(self) -> None:
        with self._contained():
            self._connection.tick()

    def drain(self) -> None:
        with self._contained():
            self._connection.drain()

    def cancel_all(self) -> None:
        with self._contained():
            self._connection.cancel_all()

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """For calls from outside: a fault of ours ends this connection, and neither the caller nor the others."""
        try:
            yield
            self._perform()
        except Exception:
            logger.exception("a connection failed")
            self._drop(INTERNAL_ERROR, "internal error")

    async def _read(self) -> None:
        if self._engine.status.model is None:  # the server has just started: requests wait, seconds at most
            with contextlib.suppress(EngineUnavailable):  # each request will be told why
                await self._engine.wait_ready()
        # Unread messages stop uvicorn from reading on: it would miss pongs, cancels and the end.
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is not None:
                self._connection.receive_text(text)
            else:
                self._connection.receive_bytes(message["bytes"])
            self._perform()
            await asyncio.sleep(0)  # a client that sends many messages at once takes its turn

    async def _write(self) -> None:
        try:
            while True:
                await self._wake_writer.wait()
                self._wake_writer.clear()
                num_sent = 0
                while (frame := self._connection.next_frame()) is not None:
                    await self._websocket.send_text(frame)
                    num_sent += 1
                    if num_sent % _FRAMES_PER_TURN == 0:
                        await asyncio.sleep(0)
                close = self._connection.close
                if close is not None and not self._dropped:
                    await self._websocket.close(close.code, close.reason)
                    return
        except (WebSocketDisconnect, WebSocketDisconnected):
            pass  # the reading task sees the end too, and cleans up

    def _perform(self) -> None:
        """Do what the connection asks for, and wake the writer."""
        while (action := self._connection.next_action()) is not None:
            match action:
                case Prepare():
                    self._prepare(action)
                case Submit(request):
                    self._submit(request)
                case Cancel(request_id):
                    self._engine.cancel(request_id)
        self._wake_writer.set()
        close = self._connection.close
        if close is not None and close.code == TRY_AGAIN_LATER and not self._dropped:
            self._metrics.slow_consumers.inc()
            self._drop(close.code, close.reason)  # the writer is stuck

    def _drop(self, code: int, reason: str) -> None:
        self._dropped = True
        abort_of(self._websocket.scope)(code, reason)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request, self._receive_output)
        except EngineOverloaded as error:
            headers = {"retry-after": f"{error.retry_after_s:g}"}
            refusal = ProtocolError(ErrorCode.SERVER_OVERLOADED, str(error), headers=headers)
            self._connection.receive_refusal(request.request_id, refusal)
        except EngineUnavailable as error:
            refusal = ProtocolError(ErrorCode.ENGINE_UNAVAILABLE, str(error))
            self._connection.receive_refusal(request.request_id, refusal)
        else:
            self._connection.receive_admission(request.request_id)

    def _receive_output(self, output: StepOutput) -> None:
        with self._contained():
            self._connection.receive_output(output)

    def _prepare(self, action: Prepare) -> None:
        num_chars = len(action.prediction) + sum(len(message["content"]) for message in action.messages)
        if num_chars <= _MAX_INLINE_CHARS:
            self._connection.receive_prompt(action.response_id, self._build(action))
            return
        task = asyncio.create_task(self._prepare_in_thread(action))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare_in_thread(self, action: Prepare) -> None:
        prompt = await asyncio.to_thread(self._build, action)
        with self._contained():
            self._connection.receive_prompt(action.response_id, prompt)

    def _build(self, action: Prepare) -> BuiltPrompt | PromptError:
        try:
            token_ids = self._prompts.build(action.messages)
            return BuiltPrompt(token_ids, self._prompts.encode(action.prediction) if action.prediction else ())
        except PromptError as error:
            return error
        except Exception:
            # A tokenizer is data from a checkpoint: whatever it raises must end this request only.
            logger.exception("the prompt of %s could not be built", action.response_id)
            return PromptError("the model's tokenizer failed on it; the server's log says how")
