"""An Outrider server of the benchmark's own: started with given options, stopped at the end."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Sequence

START_S = 600.0  # a model may have to be fetched

_COMMAND = "import sys; from outrider.server.cli.main import main; sys.exit(main())"
_ADDRESS = re.compile(r"ws://\S+")


class ServerDidNotStart(Exception):
    """The server ended before it was ready; the message is its last line."""


class OwnServer:
    """A process with ``outrider serve`` on a free port. ``ready`` is the line in which it says what it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.url = ""
        self.ready = ""
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=20)  # of what it logs
        self._logging = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, options: Sequence[str]) -> OwnServer:
        """Start it and wait until its model is loaded.

        Raises:
            ServerDidNotStart: the options are refused, or the model cannot be served.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _COMMAND, "serve", "--port", "0", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        server = cls(process)
        try:
            async with asyncio.timeout(START_S):
                await server._await_ready()
        except BaseException:
            await server.aclose()
            raise
        return server

    async def aclose(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(20):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._logging

    async def _await_ready(self) -> None:
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode():
            if not self.url and (address := _ADDRESS.search(line)):
                self.url = address[0].rstrip(";,")
            if line.startswith("Ready"):
                self.ready = line.strip()
                return
        await self._logging
        last = self._last_lines[-1] if self._last_lines else "it said nothing"
        raise ServerDidNotStart(f"outrider serve ended before it was ready: {last.removeprefix('outrider serve: ')}")

    async def _read_log(self) -> None:
        """All of it, or the server would stand still; only the end is kept."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if text := line.decode(errors="replace").strip():
                self._last_lines.append(text)
