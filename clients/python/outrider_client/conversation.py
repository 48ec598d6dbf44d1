"""A dialogue of many turns on one connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import PreviousResponseNotFound
from .stream import ResponseStream

if TYPE_CHECKING:
    from .client import AsyncClient

Item = Mapping[str, Any]


class Conversation:
    """Turns that continue one another.

    ::

        conversation = client.conversation(instructions="Be brief.")
        async for delta in await conversation.respond("Who wrote Faust?"): ...
        async for delta in await conversation.respond("When was he born?"): ...

    Only the new message is sent; where the server no longer has the dialogue, all of it. An answer that
    was cancelled stays in the dialogue as far as it came; one that failed does not.
    """

    def __init__(self, client: AsyncClient, fields: Mapping[str, Any]) -> None:
        self._client = client
        self._fields = dict(fields)
        self._items: list[Item] = []  # the dialogue so far, as input items
        self._previous_response_id: str | None = None
        self._turn: tuple[list[Item], ResponseStream] | None = None  # what was asked last, not yet in _items

    async def respond(self, input: str | Sequence[Item], **fields: Any) -> ResponseStream:
        """The next turn; waits for the answer before it to end. ``fields`` go before the conversation's own.

        Raises:
            RequestRefused: the server refused this turn; the dialogue is as it was before.
            ConnectionLost: there is no connection any more.
        """
        await self._settle()
        items: list[Item] = [message("user", input)] if isinstance(input, str) else list(input)
        fields = {**self._fields, **fields}
        try:
            stream = await self._client.respond(items, previous_response_id=self._previous_response_id, **fields)
        except PreviousResponseNotFound:
            stream = await self._client.respond([*self._items, *items], **fields)
        self._turn = (items, stream)
        return stream

    async def _settle(self) -> None:
        """Take the turn before into the dialogue, once its answer has ended."""
        if self._turn is None:
            return
        items, stream = self._turn
        await stream._ended()
        self._turn = None
        if stream.response.status in ("completed", "incomplete", "cancelled"):
            self._items += [*items, message("assistant", stream.response.output_text)]
            self._previous_response_id = stream.id


def message(role: str, text: str) -> Item:
    """A message as an input item."""
    return {"type": "message", "role": role, "content": text}
