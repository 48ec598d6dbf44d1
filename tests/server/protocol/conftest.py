"""A connection with a clock in hand, played against as client and as engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from outrider.server.engine.request import FinishReason, ModelInfo, Request, StepOutput
from outrider.server.protocol.actions import Cancel, Prepare, Submit
from outrider.server.protocol.connection import ResponsesConnection
from outrider.server.protocol.items import Message
from outrider.server.protocol.metrics_block import ResponseMetrics
from outrider.server.protocol.prompt import BuiltPrompt, PromptError
from outrider.server.protocol.store import ResponseStore
from outrider.server.protocol.surroundings import ConnectionLimits, Surroundings

STANDARD: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
MODEL = ModelInfo("m", 0x110000, 1000, "reference", "suffix", max_draft_tokens=3)

Frame = dict[str, Any]


class CharacterPrompts:
    """One token a character; a conversation reads ``role:content`` per line."""

    def build(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, "\n".join(f"{message['role']}:{message['content']}" for message in messages)))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class Ledger:
    """Notes what responses did."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.gaps: list[float | None] = []
        self.reasons: list[FinishReason] = []

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def step(self, output: StepOutput, seconds: float | None) -> None:
        self.gaps.append(seconds)

    def finished(self, reason: FinishReason, metrics: ResponseMetrics) -> None:
        self.reasons.append(reason)


class Shared:
    """What the connections of one server share, and the clock that moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.model: ModelInfo | None = MODEL
        self.store = ResponseStore(lambda: self.now)
        self.ledger = Ledger()
        self._ids = itertools.count(1)

    def surroundings(self) -> Surroundings:
        return Surroundings(
            model=lambda: self.model,
            prompts=CharacterPrompts(),
            store=self.store,
            observer=self.ledger,
            clock=lambda: self.now,
            wall_clock=lambda: 1_760_000_000.5,
            new_id=lambda: f"{next(self._ids):02}",
            new_seed=lambda: 7,
        )


class Peer:
    """Both ends of one connection. Prompts are built and requests admitted at once, unless told otherwise.

    Every frame it reads is checked against the OpenAI client's own types.
    """

    def __init__(self, shared: Shared, limits: ConnectionLimits | None = None, tenant: str = "") -> None:
        self.shared = shared
        self.connection = ResponsesConnection(shared.surroundings(), limits, tenant=tenant)
        self.prepare_at_once = True
        self.admit_at_once = True
        self.prepared: list[Prepare] = []
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []

    def send(self, **event: Any) -> list[Frame]:
        self.connection.receive_text(json.dumps(event))
        return self.read()

    def create(self, input: Any = "hi", **fields: Any) -> list[Frame]:
        return self.send(type="response.create", input=input, **fields)

    def create_id(self, input: Any = "hi", **fields: Any) -> str:
        """Create a response that starts at once; its id."""
        frames = self.create(input, **fields)
        assert [frame["type"] for frame in frames] == ["response.created", "response.in_progress"], frames
        return str(frames[0]["response"]["id"])

    def output(self, response_id: str, text: str = "", **fields: Any) -> list[Frame]:
        """One step's output, one token a character unless ``token_ids`` are given."""
        fields.setdefault("token_ids", tuple(map(ord, text)))
        self.connection.receive_output(StepOutput(response_id, text=text, **fields))
        return self.read()

    def finish(self, response_id: str, reason: FinishReason = FinishReason.STOP, text: str = "") -> list[Frame]:
        return self.output(response_id, text, finish_reason=reason)

    def answer(self, text: str, input: Any = "hi", **fields: Any) -> str:
        """A whole response; its id."""
        response_id = self.create_id(input, **fields)
        self.output(response_id, text)
        self.finish(response_id)
        return response_id

    def tick(self, seconds: float) -> list[Frame]:
        self.shared.now += seconds
        self.connection.tick()
        return self.read()

    def act(self) -> None:
        while (action := self.connection.next_action()) is not None:
            match action:
                case Prepare():
                    self.prepared.append(action)
                    if self.prepare_at_once:
                        self.build(action)
                case Submit(request):
                    self.submitted.append(request)
                    if self.admit_at_once:
                        self.connection.receive_admission(request.request_id)
                case Cancel(request_id):
                    self.cancelled.append(request_id)

    def build(self, action: Prepare) -> None:
        prompts = CharacterPrompts()
        prompt: BuiltPrompt | PromptError
        prompt = BuiltPrompt(prompts.build(action.messages), prompts.encode(action.prediction))
        if any("refuse me" in message["content"] for message in action.messages):
            prompt = PromptError("roles must alternate")
        self.connection.receive_prompt(action.response_id, prompt)

    def read(self) -> list[Frame]:
        self.act()
        frames = []
        while (text := self.connection.next_frame()) is not None:
            frame = json.loads(text)
            STANDARD.validate_python(frame, strict=True)
            frames.append(frame)
        return frames

    @property
    def prompts(self) -> list[str]:
        """The prompts that reached the engine, as text."""
        return ["".join(map(chr, request.prompt_token_ids)) for request in self.submitted]


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def peer(shared: Shared) -> Peer:
    return Peer(shared)


@pytest.fixture
def new_peer(shared: Shared) -> Callable[..., Peer]:
    """Another connection to the same server: ``new_peer(max_in_flight=2)`` or ``new_peer(tenant="b")``."""

    def make(tenant: str = "", **limits: Any) -> Peer:
        return Peer(shared, ConnectionLimits(**limits), tenant)

    return make
