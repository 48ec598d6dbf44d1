"""transformers' ``generate`` in float32 as a contender, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.server.bench.measures import Measurement, Pass
from outrider.server.bench.prompts import Prompt

MAX_LINE_BYTES = 16 * 2**20


class BaselineUnavailable(Exception):
    """The baseline cannot run; the message says what to do."""


class Transformers:
    """Greedy, at most ``max_tokens`` a prompt. Concurrent prompts run as one padded batch, its own way to do several.

    What the process measures is generation alone, tokenising included: no socket, no server.
    """

    name = "transformers"

    def __init__(self, process: asyncio.subprocess.Process, model: Path, max_tokens: int) -> None:
        self.model: str | None = model.name
        self.versions: dict[str, Any] = {}
        self._process = process
        self._max_tokens = max_tokens

    @classmethod
    async def start(cls, model: Path, *, max_tokens: int) -> Transformers:
        """Load the model, a GGUF file or a Hugging Face directory. Takes up to a minute.

        Raises:
            BaselineUnavailable: transformers or accelerate is missing, or the model cannot be loaded.
        """
        worker = "outrider.server.bench.transformers_worker"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", worker, str(model)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
        )
        baseline = cls(process, model, max_tokens)
        try:
            baseline.versions = (await baseline._answer())["ready"]
        except BaseException:
            await baseline.aclose()
            raise
        return baseline

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> Pass:
        wall_s, measurements = 0.0, []
        for start in range(0, len(prompts), concurrency):
            batch = prompts[start : start + concurrency]
            await self._ask({"batch": [prompt.messages for prompt in batch], "max_tokens": self._max_tokens})
            answer = await self._answer()
            wall_s += answer["seconds"]
            measurements += [_measurement(prompt, row) for prompt, row in zip(batch, answer["rows"], strict=True)]
        return Pass(wall_s, tuple(measurements))

    async def aclose(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def _ask(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise BaselineUnavailable(f"the baseline's process ended (exit code {await self._process.wait()})")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise BaselineUnavailable(message["error"])
        return message


def _measurement(prompt: Prompt, row: dict[str, Any]) -> Measurement:
    """Each token counts as a piece of text: ``generate`` streams nothing, so this is the most it could show."""
    times_s = tuple(row["token_times_s"])
    return Measurement(prompt.line, times_s, times_s[-1], row["num_input_tokens"], row["num_output_tokens"])
