"""What a connection asks of whoever drives it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.server.engine.request import Request
from outrider.server.protocol.items import Message

GOING_AWAY = 1001
INTERNAL_ERROR = 1011
TRY_AGAIN_LATER = 1013


@dataclass(frozen=True, slots=True)
class Prepare:
    """Build this prompt, and the ids of the text that is predicted; report with ``receive_prompt``."""

    response_id: str
    messages: tuple[Message, ...]
    prediction: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Give this to the engine and report with ``receive_admission`` or ``receive_refusal``."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Have the engine end this request; its last output still comes."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close the socket once all frames are sent."""

    code: int
    reason: str


Action = Prepare | Submit | Cancel
