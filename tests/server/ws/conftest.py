"""A real server on a free port, over a tiny engine that echoes prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from outrider.server.engine.client import EngineOverloaded, EngineState, EngineStatus, EngineUnavailable, OutputSink
from outrider.server.engine.request import EngineStats, FinishReason, ModelInfo, Request, StepOutput
from outrider.server.protocol.items import Message
from outrider.server.protocol.prompt import PromptError
from outrider.server.ws.serve import DrainingServer, make_server
from outrider.server.ws.settings import ServerSettings
from outrider.verify.sampling_params import TokenLogprob

TOKENS_PER_STEP = 3


class CharacterPrompts:
    """One token a character; a conversation is its contents joined with ``|``."""

    def build(self, messages: Sequence[Message]) -> tuple[int, ...]:
        text = "|".join(message["content"] for message in messages)
        if "refuse me" in text:
            raise PromptError("it was asked to")
        if "break the template" in text:
            raise ZeroDivisionError("template bug")
        return tuple(ord(character) for character in text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(character) for character in text)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class EchoEngine:
    """Answers with its prompt, three tokens a step; a prompt that ends in ``forever`` is answered without end."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.state: EngineState = "ready"
        self.last_step_age_s: float | None = None
        self.overloaded = False
        self.running: dict[str, asyncio.Task[None]] = {}
        self.requests: list[Request] = []
        self._cancelled: set[str] = set()

    def submit(self, request: Request, sink: OutputSink) -> None:
        if self.overloaded:
            raise EngineOverloaded("100 requests are waiting; try again in 2 s.", 2.0)
        if self.state != "ready":
            raise EngineUnavailable("The engine has stopped.")
        self.requests.append(request)
        self.running[request.request_id] = asyncio.create_task(self._run(request, sink))

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self._cancelled.add(request_id)

    async def wait_ready(self) -> ModelInfo:
        if self.status.model is None:
            raise EngineUnavailable("The engine has stopped.")
        return self.status.model

    @property
    def status(self) -> EngineStatus:
        model = ModelInfo("echo", 0x110000, 20_000, "reference", "suffix", max_draft_tokens=4)
        stats = EngineStats(len(self.running), 0, 100, 60, 30, 2, 7, 50, 20, draft_s=0.5, verify_s=1.5)
        return EngineStatus(
            self.state, 1, self.last_step_age_s, model if self.state == "ready" else None, stats, "An echo."
        )

    async def _run(self, request: Request, sink: OutputSink) -> None:
        try:
            sink(await self._steps(request, sink))
        finally:
            del self.running[request.request_id]
            self._cancelled.discard(request.request_id)

    async def _steps(self, request: Request, sink: OutputSink) -> StepOutput:
        """Sends all outputs but the last, and returns that."""
        prompt = request.prompt_token_ids
        endless = "".join(map(chr, prompt)).endswith("forever")
        answer = prompt * (request.params.max_tokens // len(prompt) + 1) if endless else prompt
        answer = answer[: request.params.max_tokens] if request.generate else ()
        for start in range(0, len(answer), TOKENS_PER_STEP):
            await asyncio.sleep(self.step_s)
            if request.request_id in self._cancelled:
                return StepOutput(request.request_id, finish_reason=FinishReason.CANCELLED)
            tokens = answer[start : start + TOKENS_PER_STEP]
            text = "".join(map(chr, tokens))
            logprobs = (TokenLogprob(2**30, -1.0),) if text == "uns" else ()
            # the last answer of a step of one token ends at an accepted draft token
            drafted = {"num_draft_tokens": 4, "num_accepted": min(len(tokens), 2)}
            source = "prediction" if request.prediction_token_ids else "suffix"
            sink(StepOutput(request.request_id, tokens, text, logprobs, **drafted, draft_source=source))
        if "die" in "".join(map(chr, prompt)):
            return StepOutput(request.request_id, finish_reason=FinishReason.ERROR, error="The engine died.")
        cut = request.generate and len(answer) == request.params.max_tokens and answer != prompt
        return StepOutput(request.request_id, finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP)


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


Serve = Callable[..., AbstractAsyncContextManager[tuple[DrainingServer, int]]]


@pytest.fixture
def serve(engine: EchoEngine) -> Serve:
    """``async with serve(settings) as (server, port)``: a server in this loop, stopped at the end."""

    @contextlib.asynccontextmanager
    async def running(settings: ServerSettings | None = None) -> AsyncIterator[tuple[DrainingServer, int]]:
        settings = settings or ServerSettings(port=0, log_level="warning", drain_timeout_s=0.2)
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = make_server(
            engine, CharacterPrompts(), settings, on_started=lambda host, port: started.set_result(port)
        )
        serving = asyncio.create_task(server._serve())  # serve() would take the test's signal handlers
        port = await started
        try:
            yield server, port
        finally:
            if not serving.done():
                server.request_stop()
            await serving

    return running
