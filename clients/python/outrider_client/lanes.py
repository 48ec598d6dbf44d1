"""Which lane a response runs on. Responses on one lane take turns; lanes run at the same time."""

from __future__ import annotations

import re

MAX_LANES = 32  # distinct names the server takes on one connection
NUM_AUTOMATIC_LANES = 16  # as many as it runs at once; the other names are left to the caller
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class Lanes:
    """Gives out lanes, each response its own while there are enough.

    A response that continues another goes to that one's lane if it is free, where the server has the
    dialogue at hand. Other responses take the lane that was used longest ago, so that what an idle
    dialogue left there lasts as long as possible.
    """

    def __init__(self) -> None:
        self._num_open: dict[str, int] = {}  # in the order of their last use, by name
        self._last_response_id: dict[str, str] = {}
        self._automatic = [f"auto-{i}" for i in range(NUM_AUTOMATIC_LANES)]

    def acquire(self, lane: str | None, previous_response_id: str | None) -> str:
        """The lane for a new response: the one asked for, or one chosen for it.

        Raises:
            ValueError: the name is not one the server accepts, or there are too many.
        """
        if lane is None:
            lane = self._choose(previous_response_id)
        elif not _LANE.fullmatch(lane):
            raise ValueError(f"a lane is 1 to 256 letters, digits or any of '_.-', not {lane!r}")
        if lane not in self._num_open and len(self._num_open) == MAX_LANES:
            raise ValueError(f"lane {lane!r} would be one more than the {MAX_LANES} of a connection; reuse one")
        self._num_open[lane] = self._num_open.pop(lane, 0) + 1
        return lane

    def release(self, lane: str, response_id: str | None) -> None:
        """A response on ``lane`` has ended."""
        self._num_open[lane] -= 1
        if response_id is not None:
            self._last_response_id[lane] = response_id

    def last_ended(self, lane: str | None) -> str | None:
        """The id of the response that ended last on ``lane``."""
        return None if lane is None else self._last_response_id.get(lane)

    def _choose(self, previous_response_id: str | None) -> str:
        if previous_response_id is not None:
            for lane, num_open in self._num_open.items():
                if not num_open and self._last_response_id.get(lane) == previous_response_id:
                    return lane
        age = {lane: i for i, lane in enumerate(self._num_open)}
        return min(self._automatic, key=lambda lane: (self._num_open.get(lane, 0), age.get(lane, -1)))
