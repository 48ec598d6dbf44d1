"""``outrider serve`` as a user starts it: the console script, a free port, real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class LiveServer:
    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/responses"

    @property
    def engine_pid(self) -> int:
        """The engine process: the server's one child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def stop(self) -> int:
        """Stop it as a service manager would; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


def start_server(model: Path, log: Path, *options: str) -> LiveServer:
    """Start serving ``model`` and wait until the engine is ready; its log goes to ``log``."""
    command = [str(Path(sys.executable).with_name("outrider")), "serve", "--model", str(model), "--port", "0", *options]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    assert process.stdout is not None
    port = None
    for line in process.stdout:
        if match := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
            port = int(match[1])
        if line.startswith("Ready"):
            assert port is not None
            return LiveServer(process, port, log)
    process.wait(timeout=20)
    raise AssertionError(f"the server ended with {process.returncode}: {log.read_text()[-2000:]}")
