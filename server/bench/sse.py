"""OpenAI's Chat Completions over Server-Sent Events, as the records of ``streams``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from outrider.server.bench.speculation import Speculation, speculation_of
from outrider.server.bench.streams import (
    Ask,
    CannotConnect,
    Chunk,
    Ending,
    Json,
    Record,
    Sent,
    StreamFailed,
)


class ChatConnection:
    """OpenAI's Chat Completions over Server-Sent Events."""

    def __init__(self, url: str, model: str | None, timeout_s: float | None) -> None:
        self._url = url
        self._model = model
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10), trust_env=False)

    async def stream(self, ask: Ask) -> AsyncGenerator[Record, None]:
        try:
            body = await self._body(ask)
            yield Sent(time.perf_counter())
            async with self._client.stream("POST", self._url, json=body) as answer:
                if answer.status_code != 200:
                    detail = (await answer.aread()).decode(errors="replace")
                    raise StreamFailed(f"{self._url} answered HTTP {answer.status_code}: {detail[:300]}")
                ending: Json = {}
                async for now, event in _server_sent_events(answer.aiter_raw()):
                    kept = {name: event[name] for name in ("model", "usage", "metrics", "timings") if event.get(name)}
                    ending = {**ending, **kept}
                    for choice in event.get("choices", ()):
                        if text := _delta_text(choice.get("delta") or {}):
                            yield Chunk(now, text, event)
                        if choice.get("finish_reason"):
                            ending = {**ending, "finish_reason": choice["finish_reason"]}
            if "finish_reason" not in ending:
                raise StreamFailed(f"{self._url} ended the stream without a finish_reason")
            yield _chat_ending(time.perf_counter(), ending)
        except httpx.TimeoutException as error:
            raise StreamFailed(f"{self._url} was silent too long ({type(error).__name__})") from error
        except httpx.ConnectError as error:
            raise CannotConnect(f"cannot connect to {self._url}: {error}") from error
        except httpx.HTTPError as error:
            raise StreamFailed(f"{self._url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StreamFailed(f"{self._url} sent something that is no chunk of this protocol: {error!r}") from error

    async def cancel(self) -> None:
        await self._client.aclose()  # closing the connection is the only way this protocol has

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _body(self, ask: Ask) -> Json:
        if self._model is None:
            self._model = await self._served_model()
        fields = {
            "model": self._model,
            "messages": list(ask.messages),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "max_draft_tokens": ask.max_draft_tokens,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {name: value for name, value in fields.items() if value is not None}

    async def _served_model(self) -> str:
        url = self._url.removesuffix("/chat/completions") + "/models"
        answer = await self._client.get(url)
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise StreamFailed(f"{url} names no model; give its name on the command line") from None


async def _server_sent_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[float, Json]]:
    """The JSON objects of a stream, up to ``[DONE]``, with the time their bytes were there."""
    rest = b""
    async for piece in pieces:
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if event.get("error"):
                error = event["error"]
                raise StreamFailed(str(error.get("message", error) if isinstance(error, dict) else error))
            yield now, event


def _delta_text(delta: Json) -> str:
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _chat_ending(now: float, fields: Json) -> Ending:
    usage = fields.get("usage") or {}
    timings = fields.get("timings") or {}
    speculation = speculation_of(fields.get("metrics") or {})
    if speculation is None and timings.get("draft_n"):
        # llama.cpp counts no steps: each gave one token beside what it accepted.
        accepted = timings["draft_n_accepted"]
        speculation = Speculation(timings["predicted_n"] - accepted, timings["draft_n"], accepted)
    return Ending(
        now,
        "incomplete" if fields["finish_reason"] == "length" else "completed",
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        speculation,
        model=fields.get("model"),
    )
