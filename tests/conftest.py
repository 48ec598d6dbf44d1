"""Models for the tests: a tiny one made on the spot, and the default one where it was pulled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, start_server

# Worker threads that spin while they wait starve each other when tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell starts what it puts in the background deaf to Ctrl-C, and so would be the commands that tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model, which `make test` pulls first."""
    from outrider.verify.checkpoint.source import resolve_source

    return resolve_source("default")


@pytest.fixture(scope="session")
def live_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The tiny model served by the console script, for all tests that leave it as they found it."""
    server = start_server(tiny_model, tmp_path_factory.mktemp("live_server") / "log", "--kv-cache-mib", "8")
    yield server
    assert server.stop() == 0
