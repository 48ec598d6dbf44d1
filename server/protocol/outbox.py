"""What waits to be sent on one connection: bounded, and merging text while the socket is busy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from outrider.server.protocol.frames import encode

_DELTA_ENVELOPE = 256  # bytes of a delta frame around its text, at least


@dataclass(slots=True)
class _Frame:
    text: str
    num_bytes: int


@dataclass(slots=True)
class _DeltaFrame:
    """A pure text delta that has not been sent: encoded late, so that text can still join it."""

    event: dict[str, Any]
    num_bytes: int


class Outbox:
    """Frames in the order they are to be sent.

    Adjacent text deltas of one response become one frame for as long as the first has not been taken: the
    text is the same, and a slow client gets fewer, longer frames. Nothing is dropped.

    ``overflowed`` tells that a frame came while more than ``max_bytes`` were waiting. The frames that close a
    response do not count: they repeat text that has counted as deltas, four times at most, so memory stays
    bounded by about five times ``max_bytes``, and a long answer's end is no offence.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[_Frame | _DeltaFrame] = deque()
        self._open_deltas: dict[str, _DeltaFrame] = {}  # by item id
        self.num_bytes = 0  # waiting, without the closing frames
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, event: dict[str, Any], *, closing: bool = False) -> None:
        text = encode(event)
        self._append(_Frame(text, 0 if closing else len(text.encode())))

    def put_delta(self, event: dict[str, Any]) -> None:
        """Queue a text delta without log-probabilities, which later ones may join."""
        frame = _DeltaFrame(event, _DELTA_ENVELOPE + len(event["delta"].encode()))
        self._open_deltas[event["item_id"]] = frame
        self._append(frame)

    def join_delta(self, item_id: str, text: str, draft_counts: dict[str, int] | None) -> bool:
        """Add to the item's last delta if that still waits; False if it has gone."""
        frame = self._open_deltas.get(item_id)
        if frame is None:
            return False
        self._note_overflow()
        frame.event["delta"] += text
        if draft_counts is not None:
            counts = frame.event["outrider"]
            frame.event["outrider"] = {name: counts[name] + value for name, value in draft_counts.items()}
        num_bytes = len(text.encode())
        frame.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return True

    def seal(self, item_id: str) -> None:
        """No more text may join the item's deltas: another frame of its response follows."""
        self._open_deltas.pop(item_id, None)

    def pop(self) -> str | None:
        """The next frame's text, or None."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self.num_bytes -= frame.num_bytes
        if isinstance(frame, _Frame):
            return frame.text
        item_id = frame.event["item_id"]
        if self._open_deltas.get(item_id) is frame:
            del self._open_deltas[item_id]
        return encode(frame.event)

    def clear(self) -> None:
        self._frames.clear()
        self._open_deltas.clear()
        self.num_bytes = 0

    def _append(self, frame: _Frame | _DeltaFrame) -> None:
        self._note_overflow()
        self._frames.append(frame)
        self.num_bytes += frame.num_bytes

    def _note_overflow(self) -> None:
        if self.num_bytes > self._max_bytes:
            self.overflowed = True
