"""The ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from outrider.server.engine.client import EngineClient
from outrider.server.protocol.prompt import PromptBuilder
from outrider.server.ws.hub import Hub
from outrider.server.ws.origin import origin_is_allowed
from outrider.server.ws.routes import error_response, http_error, http_routes
from outrider.server.ws.settings import ServerSettings

RESPONSES_PATH = "/v1/responses"

Lifespan = Callable[[], AbstractAsyncContextManager[object]]


def create_app(
    engine: EngineClient,
    prompts: PromptBuilder,
    settings: ServerSettings,
    *,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """The server's application, for ``make_server``: it needs its socket protocol. ``app.state.hub`` is its ``Hub``.

    Args:
        lifespan: entered in the event loop before the first request and left after the last, such as the
            engine's start and stop.
    """
    hub = Hub(engine, prompts, settings)

    @contextlib.asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        async with lifespan() if lifespan is not None else contextlib.nullcontext():
            ticking = asyncio.create_task(hub.tick_forever())
            try:
                yield
            finally:
                ticking.cancel()

    async def responses(websocket: WebSocket) -> None:
        refusal = _refusal(websocket, hub)
        if refusal is None:
            await hub.serve(websocket)
        else:
            await websocket.send_denial_response(refusal)

    async def elsewhere(websocket: WebSocket) -> None:
        # Without this route the client would read 403, which tells nothing.
        message = f"There is no WebSocket at {websocket.url.path}; connect to {RESPONSES_PATH}."
        await websocket.send_denial_response(error_response(404, "not_found", message))

    app = Starlette(
        routes=[
            *http_routes(hub),
            WebSocketRoute(RESPONSES_PATH, responses),
            WebSocketRoute("/{path:path}", elsewhere),
        ],
        exception_handlers={HTTPException: http_error},
        lifespan=run,
    )
    app.state.hub = hub
    return app


def _refusal(websocket: WebSocket, hub: Hub) -> Response | None:
    """Why this client may not connect, or None."""
    headers = websocket.headers
    for origin in headers.getlist("origin"):
        if not origin_is_allowed(origin, headers.get("host", ""), hub.settings.allow_origins):
            message = f"Pages from {origin[:200]!a} may not connect; start the server with --allow-origin to let them."
            return error_response(403, "origin_not_allowed", message)
    if hub.draining:
        message = "The server is shutting down; connect again in a moment."
        return error_response(503, "server_shutting_down", message, headers={"retry-after": "1"})
    return None
