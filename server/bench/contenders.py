"""What is measured: a server on the wire, or transformers in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

from outrider.server.bench.measures import Measurement, Pass
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.streams import Ask, Chunk, Connection, Ending, Sent, StreamFailed, open_connection


class Contender(Protocol):
    """Something that answers prompts."""

    name: str
    model: str | None  # that answers; None: not known yet

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> Pass:
        """Answer all prompts, at most ``concurrency`` at a time. A prompt that fails says so in its measurement."""
        ...

    async def aclose(self) -> None: ...


class Server:
    """A server at a URL. Each concurrent stream has a connection of its own, as different users would.

    ``takes_seeds``: above temperature 0, each prompt has a seed of its own, the same every time.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        max_tokens: int,
        temperature: float,
        max_draft_tokens: int | None = None,
        takes_seeds: bool = False,
        model: str | None = None,
        timeout_s: float,
    ) -> None:
        self.name = name
        self._url = url
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._max_draft_tokens = max_draft_tokens
        self._takes_seeds = takes_seeds
        self.model = self._asked_model = model
        self._timeout_s = timeout_s
        self._connections: list[Connection] = []
        self._open()

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> Pass:
        while len(self._connections) < concurrency:
            self._open()
        waiting = iter(prompts)
        measurements: list[Measurement] = []

        async def user(connection: Connection) -> None:
            for prompt in waiting:
                measurements.append(await self._measure(connection, prompt))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as users:
            for connection in self._connections[:concurrency]:
                users.create_task(user(connection))
        wall_s = time.perf_counter() - start
        return Pass(wall_s, tuple(sorted(measurements, key=lambda measurement: measurement.line)))

    async def aclose(self) -> None:
        for connection in self._connections:
            await connection.aclose()

    def _open(self) -> None:
        self._connections.append(open_connection(self._url, model=self._asked_model, timeout_s=self._timeout_s))

    async def _measure(self, connection: Connection, prompt: Prompt) -> Measurement:
        seed = prompt.line if self._takes_seeds and self._temperature else None
        ask = Ask(prompt.messages, self._max_tokens, self._temperature, self._max_draft_tokens, seed)
        sent_at, text_times_s, ending = 0.0, [], None
        digest = hashlib.sha256()
        try:
            async for record in connection.stream(ask):
                match record:
                    case Sent(at):
                        sent_at = at
                    case Chunk(at, text):
                        if text:
                            text_times_s.append(at - sent_at)
                            digest.update(text.encode())
                    case Ending():
                        ending = record
        except StreamFailed as error:
            return Measurement(prompt.line, tuple(text_times_s), None, error=str(error))
        assert ending is not None, "a stream that does not fail ends"
        self.model = ending.model or self.model
        return Measurement(
            prompt.line,
            tuple(text_times_s),
            ending.at - sent_at,
            ending.num_input_tokens,
            ending.num_output_tokens,
            ending.speculation,
            text_digest=digest.hexdigest()[:16],
        )
