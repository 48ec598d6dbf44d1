"""The HTTP side: health, models, metrics, and clear refusals of everything else."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from outrider.server.engine.request import ModelInfo
from outrider.server.ws.hub import Hub

STALLED_S = 10.0  # without a step while there is work; the supervisor restarts an engine that stays so


def error_response(
    status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None, param: str | None = None
) -> JSONResponse:
    """An error in OpenAI's HTTP shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": param}}
    return JSONResponse(body, status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"There is nothing at {request.url.path}; this server has /v1/responses (WebSocket), /v1/models, "
        return error_response(404, "not_found", message + "/health and /metrics.")
    if error.status_code == 405:
        message = f"{request.url.path} does not answer {request.method}."
        return error_response(405, "method_not_allowed", message, headers=error.headers)
    return error_response(error.status_code, "http_error", error.detail, headers=error.headers)


def http_routes(hub: Hub) -> list[BaseRoute]:
    started_at = int(time.time())
    version = importlib.metadata.version("outrider")

    async def health(request: Request) -> Response:
        status = hub.engine.status
        stalled = (status.last_step_age_s or 0.0) > STALLED_S
        ready = status.state == "ready" and not hub.draining and not stalled
        problem = "draining" if hub.draining else "stalled" if stalled else "unavailable"
        body = {
            "status": "ready" if ready else problem,
            "engine": {
                "state": status.state,
                "num_restarts": status.num_restarts,
                "last_step_age_s": status.last_step_age_s,
                "message": status.message,
            },
            "model": status.model and status.model.name,
            "version": version,
        }
        return JSONResponse(body, 200 if ready else 503)

    async def models(request: Request) -> Response:
        model = hub.engine.status.model
        return JSONResponse({"object": "list", "data": [_model_object(model, started_at)] if model else []})

    async def model(request: Request) -> Response:
        served, name = hub.engine.status.model, request.path_params["name"]
        if served is None or served.name != name:
            return error_response(404, "model_not_found", f"The model {name!a} does not exist here.", param="model")
        return JSONResponse(_model_object(served, started_at))

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(hub.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/metrics", metrics),
        Route("/v1/responses", _NeedsWebSocket()),
    ]


class _NeedsWebSocket:
    """Plain HTTP on the WebSocket's path. An application and not a function, so that it gets every method."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = "/v1/responses is served over WebSocket only: connect to ws://<host>/v1/responses."
        response: ASGIApp
        if scope["method"] in ("GET", "HEAD"):
            headers = {"upgrade": "websocket", "connection": "upgrade"}
            response = error_response(426, "websocket_required", message, headers=headers)
        else:
            response = error_response(405, "websocket_required", message, headers={"allow": "GET"})
        await response(scope, receive, send)


def _model_object(model: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": model.max_context,
    }
