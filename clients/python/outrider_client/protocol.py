"""The client's side of the protocol, without I/O: frames in, events out, frames to send.

Whoever owns the socket calls :meth:`ClientProtocol.receive` with each frame, sends what
:meth:`ClientProtocol.frames_to_send` returns, and reads the :class:`Exchange` objects that changed.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .errors import OutriderError, ProtocolError, ResponseFailed, SlowConsumer, refusal
from .events import TERMINAL, Event, Response, ResponseEvent, parse_event
from .lanes import Lanes

logger = logging.getLogger("outrider_client")


class Exchange:
    """One request and its answer.

    Read it by :meth:`take` until that gives None; then ``error`` says whether it went wrong and
    ``is_done`` whether anything more can come.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.response: Response | None = None  # as of the last event that told; None: not accepted yet
        self.error: OutriderError | None = None
        self.is_done = False
        self.is_cancelled = False
        self._waiting: deque[tuple[Event, int]] = deque()
        self._num_waiting_chars = 0

    def take(self) -> Event | None:
        """The next event, or None if none waits."""
        if not self._waiting:
            return None
        event, num_chars = self._waiting.popleft()
        self._num_waiting_chars -= num_chars
        return event

    def _put(self, event: Event, num_chars: int, max_chars: int) -> bool:
        """Keep an event for the reader; False if there is no room."""
        if self._num_waiting_chars + num_chars > max_chars and event.type not in TERMINAL:
            return False
        self._waiting.append((event, num_chars))
        self._num_waiting_chars += num_chars
        return True

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._num_waiting_chars = 0


class ClientProtocol:
    """All exchanges of one connection.

    ``max_buffer`` bounds, in characters of JSON, what an exchange keeps for a reader that lags behind.
    Beyond it that response alone is cancelled and its reader gets :exc:`SlowConsumer`: the lanes share
    one socket, so leaving it unread would stop the others too.
    """

    def __init__(self, max_buffer: int = 2**20) -> None:
        self._max_buffer = max_buffer
        self._lanes = Lanes()
        self._open: list[Exchange] = []  # in the order asked
        self._cancel_when_created: set[Exchange] = set()
        self._frames: list[str] = []

    def create(self, fields: Mapping[str, Any], lane: str | None = None) -> Exchange:
        """Ask for a response. ``fields`` are those of ``response.create``; those that are None are left out.

        Raises:
            ValueError: the lane is not usable, or a field cannot be written as JSON.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        json.dumps(given, allow_nan=False)  # raises before a lane is taken
        lane = self._lanes.acquire(lane, given.get("previous_response_id"))
        self._send({"type": "response.create", **given, "stream_id": lane})
        exchange = Exchange(lane)
        self._open.append(exchange)
        return exchange

    def cancel(self, exchange: Exchange) -> None:
        """Stop a response and let its waiting events go. Its terminal event is still to come."""
        if exchange.is_done or exchange.is_cancelled:
            return
        exchange.is_cancelled = True
        exchange._drop_waiting()
        self._send_cancel(exchange)

    def receive(self, frame: str | bytes) -> list[Exchange]:
        """Take a frame in; returns the exchanges that changed.

        Raises:
            ProtocolError: the frame is not a JSON object with a type, or lacks what its type must have.
        """
        try:
            fields = json.loads(frame)
        except ValueError as error:
            raise ProtocolError(f"the server sent a frame that is not JSON: {frame[:80]!r}") from error
        if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
            raise ProtocolError(f"the server sent a frame that is no event: {frame[:80]!r}")
        if fields["type"] == "error":
            return self._receive_error(fields)
        event = parse_event(fields)
        exchange = self._addressee(event)
        if exchange is None:
            logger.debug("no open response for %s", frame)
            return []
        if isinstance(event, ResponseEvent):
            self._follow(exchange, event.response)
        if not exchange.is_cancelled and exchange.error is None:
            self._keep(exchange, event, len(frame))
        if isinstance(event, ResponseEvent) and event.type in TERMINAL:
            if event.type == "response.failed" and exchange.error is None:
                exchange.error = ResponseFailed(event.response)
            self._finish(exchange)
        return [exchange]

    def connection_lost(self, make_error: Callable[[], OutriderError]) -> list[Exchange]:
        """End every open exchange, each with an error of its own; returns them."""
        lost = list(self._open)
        for exchange in lost:
            exchange.error = exchange.error or make_error()
            self._finish(exchange)
        return lost

    def frames_to_send(self) -> list[str]:
        frames, self._frames = self._frames, []
        return frames

    def _send(self, fields: Mapping[str, Any]) -> None:
        self._frames.append(json.dumps(fields, separators=(",", ":"), allow_nan=False))

    def _send_cancel(self, exchange: Exchange) -> None:
        """By id, which names one response for sure; before there is one, wait for it."""
        if exchange.response is None:
            self._cancel_when_created.add(exchange)
        else:
            fields = {"type": "response.cancel", "response_id": exchange.response.id, "stream_id": exchange.lane}
            self._send(fields)

    def _keep(self, exchange: Exchange, event: Event, num_chars: int) -> None:
        if exchange._put(event, num_chars, self._max_buffer):
            return
        exchange.error = SlowConsumer(
            f"more than {self._max_buffer} characters of response {exchange.response and exchange.response.id} "
            "waited unread, so it was cancelled; read faster or give the client a larger max_buffer"
        )
        exchange.is_cancelled = True
        self._send_cancel(exchange)

    def _addressee(self, event: Event) -> Exchange | None:
        candidates = self._on_lane(event.raw.get("stream_id"))
        if not isinstance(event, ResponseEvent):
            return next((e for e in candidates if e.response is not None), None)
        for exchange in candidates:
            if exchange.response is not None and exchange.response.id == event.response.id:
                return exchange
        if self._lanes.last_ended(event.raw.get("stream_id")) == event.response.id:
            return None  # "response.failed" after the "error" that has ended it already
        return next((e for e in candidates if e.response is None), None)

    def _on_lane(self, lane: Any) -> list[Exchange]:
        """The open exchanges a frame can be about. A server without lanes names none: then the only one."""
        if lane is None:
            return self._open if len(self._open) == 1 else []
        return [e for e in self._open if e.lane == lane]

    def _receive_error(self, frame: Mapping[str, Any]) -> list[Exchange]:
        """A refusal belongs to the oldest request of its lane that was not accepted, else to the running one."""
        error = refusal(frame)
        candidates = self._on_lane(frame.get("stream_id"))
        exchange = next((e for e in candidates if e.response is None), candidates[0] if candidates else None)
        if exchange is None:
            logger.warning("the server reports: %s", error)
            return []
        exchange.error = exchange.error or error
        self._finish(exchange)
        return [exchange]

    def _follow(self, exchange: Exchange, response: Response) -> None:
        exchange.response = response
        if exchange in self._cancel_when_created:
            self._cancel_when_created.discard(exchange)
            self._send_cancel(exchange)

    def _finish(self, exchange: Exchange) -> None:
        exchange.is_done = True
        self._open.remove(exchange)
        self._cancel_when_created.discard(exchange)
        self._lanes.release(exchange.lane, exchange.response.id if exchange.response else None)
