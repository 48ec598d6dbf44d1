"""What a connection is given: its limits, and what all connections share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.server.engine.request import ModelInfo
from outrider.server.protocol.metrics_block import ResponseObserver
from outrider.server.protocol.prompt import PromptBuilder
from outrider.server.protocol.store import ResponseStore


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_message_bytes: int = 4 * 2**20
    max_in_flight: int = 16  # responses handed to the engine; more wait
    max_queued: int = 64  # responses behind others of their lanes; more are refused
    max_streams: int = 32  # named lanes
    max_age_s: float = 3600.0
    keep_alive_s: float = 15.0  # of silence in a response, until its last snapshot is repeated
    max_outbox_bytes: int = 2**20  # waiting for a slow client; more ends the connection


@dataclass(frozen=True, slots=True)
class Surroundings:
    model: Callable[[], ModelInfo | None]  # None: the engine is not ready
    prompts: PromptBuilder
    store: ResponseStore
    observer: ResponseObserver
    clock: Callable[[], float]  # monotonic seconds
    wall_clock: Callable[[], float]  # seconds since 1970
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
