"""A chat template, taken apart: what stands before, between and after the turns, as token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.verify.checkpoint.chat_template import ChatTemplate, ChatTemplateError
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer

# Words that no template writes itself, and that trimming leaves as they are.
_QUESTION, _ANSWER, _NEXT_QUESTION = "QUESTIONxONE", "ANSWERxONE", "QUESTIONxTWO"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """``before`` a first user turn; from a user turn ``to_answer``; from an answer ``to_question``.

    ``end_token_ids``: what ends a turn of either side.
    """

    before: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]
    end_token_ids: tuple[int, ...]

    def without_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A turn without the token that ended it, if one did."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.end_token_ids else token_ids

    def after_answer(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """An answer with its end, and what leads to the next user turn."""
        return self.without_end(token_ids) + self.to_question


def read_chat_frame(template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> ChatFrame:
    """Find the frame by rendering a dialogue of known words.

    Raises:
        UnsupportedCheckpoint: the template does not show the turns one after another, or there is none.
    """
    dialogue = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _NEXT_QUESTION},
    ]
    try:
        text = template.render(dialogue)
    except ChatTemplateError as error:
        raise UnsupportedCheckpoint(f"no dialogues can be sampled from this model: {error}") from error
    before, question, rest = text.partition(_QUESTION)
    to_answer, answer, rest = rest.partition(_ANSWER)
    to_question, next_question, _ = rest.partition(_NEXT_QUESTION)
    if not (question and answer and next_question):
        raise UnsupportedCheckpoint("the model's chat template does not show a dialogue's turns one after another")
    if not (before and to_answer.strip()):
        raise UnsupportedCheckpoint(
            "the model has no chat template, so it cannot be asked for questions; use a model made for dialogue"
        )
    first, second, third = (tuple(tokenizer.encode(part)) for part in (before, to_answer, to_question))
    controls = set(tokenizer.special_tokens.values())
    ends = {*eos_token_ids, *(part[0] for part in (second, third) if part and part[0] in controls)}
    return ChatFrame(first, second, third, tuple(sorted(ends)))
