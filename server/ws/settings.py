"""How the server listens and what it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.server.protocol.surroundings import ConnectionLimits


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Every default of the server stands here; the command line reads them."""

    host: str = "127.0.0.1"
    port: int = 8800
    allow_origins: tuple[str, ...] = ()  # beside the server's own host and loopback; "*" allows all
    drain_timeout_s: float = 10.0  # for running responses after SIGTERM
    max_frame_bytes: int = 32 * 2**20  # larger messages end the connection (1009); see limits.max_message_bytes
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 60.0  # long: a pong can be stuck behind a large message
    unacknowledged_timeout_s: float = 30.0  # TCP_USER_TIMEOUT: sent data that the peer's kernel never takes
    store_max_responses: int = 10_000
    store_max_bytes: int = 256 * 2**20
    store_max_age_s: float = 3600.0
    access_log: bool = False
    log_level: str = "info"
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 (any free one) to 65535, not {self.port}")
        for name in ("drain_timeout_s", "ping_interval_s", "ping_timeout_s", "unacknowledged_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "drain_timeout_s"))):
                raise ValueError(f"{name} must be a number of seconds above 0, not {value}")
        if self.max_frame_bytes < self.limits.max_message_bytes:
            raise ValueError(
                f"max_frame_bytes ({self.max_frame_bytes}) must not be less than "
                f"limits.max_message_bytes ({self.limits.max_message_bytes})"
            )
