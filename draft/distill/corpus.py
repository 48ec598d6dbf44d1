"""The file of conversations: appended to one by one, readable after any interruption."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.draft.distill.conversations import Conversation, Turn


class Corpus:
    """Conversations as JSON lines, each with the seconds of generating that had passed when it came.

    A line that a kill cut off is dropped when the file is opened again. ``is_finished``: no more are to come.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        self._file.truncate(whole)
        self.conversations: dict[int, Conversation] = {}  # by index, in the order they came
        self.seconds = 0.0
        self.is_finished = False
        for line in content[:whole].splitlines():
            fields = json.loads(line)
            self.seconds = fields["seconds"]
            if "index" not in fields:
                self.is_finished = True
                break
            turns = tuple(Turn(*turn) for turn in fields["turns"])
            conversation = Conversation(fields["index"], tuple(fields["token_ids"]), turns)
            self.conversations[conversation.index] = conversation

    def __enter__(self) -> Corpus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, conversation: Conversation, seconds: float) -> None:
        """Keep one more.

        Raises:
            OSError: it cannot be written.
        """
        fields = {
            "index": conversation.index,
            "seconds": round(seconds, 3),
            "turns": [[turn.start, turn.stop, turn.is_answer, turn.temperature] for turn in conversation.turns],
            "token_ids": conversation.token_ids,
        }
        self._write(fields)
        self.conversations[conversation.index] = conversation
        self.seconds = seconds

    def finish(self, seconds: float) -> None:
        """Note that no more are to come.

        Raises:
            OSError: it cannot be written.
        """
        self._write({"seconds": round(seconds, 3)})
        self.seconds, self.is_finished = seconds, True

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def distinct(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """Those with tokens, in the order of their indices, without those whose question came before."""
    asked = set()
    for conversation in sorted(conversations, key=lambda conversation: conversation.index):
        if conversation.token_ids and conversation.question not in asked:
            asked.add(conversation.question)
            yield conversation
