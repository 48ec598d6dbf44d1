"""The lanes of one connection: responses of one ``stream_id`` come one after another, lanes run side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.server.engine.request import Request
from outrider.server.protocol.errors import ErrorCode, ProtocolError
from outrider.server.protocol.parse import CreateRequest
from outrider.server.protocol.response_stream import ResponseStream
from outrider.server.protocol.store import StoredResponse


class TurnState(Enum):
    """``QUEUED → PREPARING → [WAITING →] SUBMITTED → RUNNING``; a turn that has ended has left its lane."""

    QUEUED = auto()  # behind another turn of its lane
    PREPARING = auto()  # its prompt is being built
    WAITING = auto()  # for one of the connection's places in flight
    SUBMITTED = auto()  # the engine has been asked
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class Turn:
    """One ``response.create`` on its way: either ``content``, or the ``refusal`` that waits for its place."""

    lane: Lane
    response_id: str
    previous_response_id: str | None
    content: tuple[CreateRequest, ResponseStream] | None = None
    refusal: ProtocolError | None = None
    state: TurnState = TurnState.QUEUED
    cancelled: bool = False
    previous: StoredResponse | None = None
    request: Request | None = None

    @property
    def create(self) -> CreateRequest:
        assert self.content is not None
        return self.content[0]

    @property
    def stream(self) -> ResponseStream:
        assert self.content is not None
        return self.content[1]


@dataclass(slots=True, eq=False)
class Lane:
    stream_id: str | None  # None: the default lane
    turns: deque[Turn] = field(default_factory=deque)  # the first is the active one
    latest: StoredResponse | None = None  # the most recent response, whatever its ``store``


class Lanes:
    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._lanes: dict[str | None, Lane] = {None: Lane(None)}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def get(self, stream_id: str | None) -> Lane | None:
        return self._lanes.get(stream_id)

    def open(self, stream_id: str | None) -> Lane:
        """The lane of this id, made at its first use.

        Raises:
            ProtocolError: one named lane too many.
        """
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) > self._max_streams:
                raise ProtocolError(
                    ErrorCode.STREAM_LIMIT_REACHED,
                    "This WebSocket connection has reached its maximum number of distinct stream IDs "
                    f"({self._max_streams}). Reuse an existing stream_id or open a new WebSocket connection.",
                    "stream_id",
                )
            lane = self._lanes[stream_id] = Lane(stream_id)
        return lane

    @property
    def num_queued(self) -> int:
        """Turns behind the active one of their lane."""
        return sum(max(len(lane.turns) - 1, 0) for lane in self)

    @property
    def idle(self) -> bool:
        return not any(lane.turns for lane in self)

    def latest(self, response_id: str) -> StoredResponse | None:
        """The most recent response of any lane, by its id."""
        for lane in self:
            if lane.latest is not None and lane.latest.response_id == response_id:
                return lane.latest
        return None
