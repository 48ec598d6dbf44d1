"""Finished responses that can be continued."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from outrider.server.protocol.items import Message

_MESSAGE_OVERHEAD = 256  # bytes of Python objects around one message's text, roughly


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that led to it, its own answer included; instructions are not inherited."""

    response_id: str
    messages: tuple[Message, ...]
    num_bytes: int  # of the whole conversation; shared parts count in each response that holds them

    @classmethod
    def following(
        cls, previous: StoredResponse | None, response_id: str, new_messages: tuple[Message, ...]
    ) -> StoredResponse:
        old_messages = previous.messages if previous else ()
        num_bytes = previous.num_bytes if previous else 0
        for message in new_messages:
            num_bytes += len(message["content"].encode()) + _MESSAGE_OVERHEAD
        return cls(response_id, old_messages + new_messages, num_bytes)


class ResponseStore:
    """All connections' responses with ``store: true``: least recently used first out, by count, bytes and age.

    Tenants are part of the key, so one never reads another's conversation.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_responses: int = 10_000,
        max_bytes: int = 256 * 2**20,
        max_age_s: float = 3600.0,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, tenant: str, response: StoredResponse) -> None:
        if response.num_bytes > self._max_bytes:
            return
        self._entries[tenant, response.response_id] = (response, self._clock())
        self._num_bytes += response.num_bytes
        while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        key = (tenant, response_id)
        entry = self._entries.get(key)
        if entry is None:
            return None
        response, stored_at = entry
        if self._clock() - stored_at > self._max_age_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return response

    def _drop(self, key: tuple[str, str]) -> None:
        response, _ = self._entries.pop(key)
        self._num_bytes -= response.num_bytes
