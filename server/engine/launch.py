"""Starting the engine process. Imports next to nothing, so that it can be the first thing a server does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """A running engine process and the server's end of the channel to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def kill(self) -> None:
        """End the process at once and reap it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def launch(settings: Mapping[str, object], engine: str | None = None) -> EngineWorker:
    """Start an engine process and return at once; it says ``Ready`` when its model is loaded.

    Call it from the main thread: on Linux the process is killed with the thread that started it. A plain
    subprocess is up in 36 ms here, multiprocessing's spawn in 61 ms, and needs no importable main module.

    Args:
        settings: what the engine is made from, of JSON types.
        engine: ``module:callable`` that takes the settings and returns the engine; None: Outrider's own.

    Raises:
        OSError: the system has no process, memory or file descriptor left.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "outrider.server.engine.worker"]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += ["--settings", json.dumps(dict(settings))]
        if engine is not None:
            command += ["--engine", engine]
        try:
            # Kernel threads that spin long while they wait starve each other as soon as anything else wants a
            # core. Measured, ms a pass, quiet and beside a busy process: 50,000 turns 72 and 641; 2,000 turns
            # 73 and 111; no spinning at all 81 and 106.
            environment = {"GOMP_SPINCOUNT": "2000", **os.environ}
            # Standard output belongs to the command line; what the engine prints goes to standard error.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
            )
        except BaseException:
            ours.close()
            raise
    return EngineWorker(process, ours)
