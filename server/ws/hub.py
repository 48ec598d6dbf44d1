"""All connections of the server."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid

from starlette.websockets import WebSocket

from outrider.server.engine.client import EngineClient
from outrider.server.engine.request import ModelInfo
from outrider.server.protocol.connection import ResponsesConnection
from outrider.server.protocol.prompt import PromptBuilder
from outrider.server.protocol.store import ResponseStore
from outrider.server.protocol.surroundings import Surroundings
from outrider.server.ws.metrics import ServerMetrics
from outrider.server.ws.session import Session
from outrider.server.ws.settings import ServerSettings

_TICK_S = 1.0
_POLL_S = 0.05
_CANCEL_GRACE_S = 2.0  # for the engine to end what was cancelled at the end of a drain


class Hub:
    def __init__(self, engine: EngineClient, prompts: PromptBuilder, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(lambda: engine.status)
        self.draining = False
        self._prompts = prompts
        self._sessions: set[Session] = set()
        self._surroundings = Surroundings(
            model=self._model,
            prompts=prompts,
            store=ResponseStore(
                time.monotonic,
                max_responses=settings.store_max_responses,
                max_bytes=settings.store_max_bytes,
                max_age_s=settings.store_max_age_s,
            ),
            observer=self.metrics,
            clock=time.monotonic,
            wall_clock=time.time,
            new_id=lambda: uuid.uuid4().hex,
            new_seed=lambda: secrets.randbits(63),
        )

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one Responses WebSocket to its end."""
        connection = ResponsesConnection(self._surroundings, self.settings.limits)
        session = Session(websocket, connection, self.engine, self._prompts, self.metrics)
        self._sessions.add(session)
        self.metrics.connections.set(len(self._sessions))
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self.metrics.connections.set(len(self._sessions))

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for session in list(self._sessions):
                session.tick()

    async def drain(self) -> None:
        """Take nothing new, let running responses finish until the time is up, and close all connections."""
        self.draining = True
        for session in list(self._sessions):
            session.drain()
        await self._wait_until_empty(self.settings.drain_timeout_s)
        for session in list(self._sessions):
            session.cancel_all()
        await self._wait_until_empty(_CANCEL_GRACE_S)

    async def _wait_until_empty(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._sessions and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def _model(self) -> ModelInfo | None:
        return self.engine.status.model
