"""From messages to token ids, and from token ids to what a client reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.server.protocol.items import Message
from outrider.verify.checkpoint.chat_template import ChatTemplate, ChatTemplateError
from outrider.verify.checkpoint.tokenizer import Tokenizer


class PromptError(Exception):
    """There is no prompt for these messages; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """What a request takes along to the engine."""

    token_ids: tuple[int, ...]
    prediction_token_ids: tuple[int, ...] = ()


class PromptBuilder(Protocol):
    """Builds prompts and spells tokens. ``build`` and ``encode`` may run in a thread beside the event loop."""

    def build(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation that the model is to continue.

        Raises:
            PromptError: the messages do not fit the model's chat template.
        """

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a plain text, nothing added."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class TemplatePromptBuilder:
    """The checkpoint's chat template and tokenizer. Control tokens spelled out in a message stay text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def build(self, messages: Sequence[Message]) -> tuple[int, ...]:
        try:
            return tuple(self._template.encode(messages, self._tokenizer))
        except ChatTemplateError as error:
            raise PromptError(str(error)) from error

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, allow_special=False))

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)
