"""Running the application under uvicorn, and stopping it without losing what runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from outrider.server.engine.client import EngineClient
from outrider.server.protocol.prompt import PromptBuilder
from outrider.server.ws.app import Lifespan, create_app
from outrider.server.ws.hub import Hub
from outrider.server.ws.settings import ServerSettings
from outrider.server.ws.socket_protocol import socket_protocol

_FORCED_CLOSE_S = 3  # for clients that answer no close frame


def make_server(
    engine: EngineClient,
    prompts: PromptBuilder,
    settings: ServerSettings,
    *,
    lifespan: Lifespan | None = None,
    on_started: Callable[[str, int], None] | None = None,
) -> DrainingServer:
    """The server, not yet running: ``run()`` serves until SIGTERM or SIGINT, of which the first drains.

    Args:
        lifespan: as in ``create_app``.
        on_started: called with host and port once the server listens; the port is the real one where 0 was asked.
    """
    app = create_app(engine, prompts, settings, lifespan=lifespan)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http="h11",  # httptools has no limit on the size of headers
        ws=socket_protocol(settings.unacknowledged_timeout_s),
        ws_max_size=settings.max_frame_bytes,
        ws_ping_interval=settings.ping_interval_s,
        ws_ping_timeout=settings.ping_timeout_s,
        ws_per_message_deflate=False,
        lifespan="on",
        log_level=settings.log_level,
        access_log=settings.access_log,
        server_header=False,
        timeout_graceful_shutdown=_FORCED_CLOSE_S,
    )
    return DrainingServer(config, app.state.hub, on_started)


class DrainingServer(uvicorn.Server):
    """uvicorn's server; the first signal lets running responses finish before the sockets close.

    uvicorn itself would close every WebSocket at once. The listener stays open while draining, so that
    clients and probes read 503 and not a refused connection.
    """

    def __init__(self, config: uvicorn.Config, hub: Hub, on_started: Callable[[str, int], None] | None) -> None:
        super().__init__(config)
        self._hub = hub
        self._on_started = on_started
        self._stop_requested = False
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_started is not None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_started(host, port)

    def request_stop(self) -> None:
        """Drain and exit; called again, exit at once."""
        if self._stop_requested:
            self.should_exit = self.force_exit = True
        self._stop_requested = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not noted for uvicorn to raise again: a drained server has ended well, and exits with 0.
        if self._stop_requested:
            self._captured_signals.append(sig)
        self.request_stop()

    async def on_tick(self, counter: int) -> bool:
        if self._stop_requested and self._drain is None:
            self._drain = asyncio.create_task(self._hub.drain())
            self._drain.add_done_callback(self._exit)
        return await super().on_tick(counter)

    def _exit(self, _: asyncio.Task[None]) -> None:
        self.should_exit = True
