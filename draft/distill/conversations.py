"""Dialogues that the target holds with itself: questions sampled from the user's place, answers to them.

A chat model that is given its template up to where a user speaks goes on as a user (Magpie, Xu et al. 2024,
2406.08464). All that is left to chance in conversation ``n`` is drawn from (seed, n), so a conversation is the same
whenever and beside whatever it is made.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from outrider.draft.distill.chat_frame import ChatFrame
from outrider.draft.distill.continuation import Continuation, Prompt
from outrider.draft.distill.openings import NO_OPENING_SHARE, OPENINGS
from outrider.draft.distill.settings import DistillSettings
from outrider.verify.checkpoint.tokenizer import Tokenizer

QUESTION_TEMPERATURES = (0.6, 0.8, 0.9)
ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.3, 0.7, 0.7, 1.0)  # what users ask for, mostly the likeliest
SECOND_TURN_SHARE = 0.35
MIN_QUESTION_TOKENS = 4
_KEY_TOKENS = 40  # questions that begin with the same so many are the same question


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``start .. stop - 1`` of a conversation that the target wrote, as the user or as itself."""

    start: int
    stop: int
    is_answer: bool
    temperature: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """All tokens of dialogue ``index``, the template's too; without tokens, it was not worth keeping."""

    index: int
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def num_answer_tokens(self) -> int:
        return sum(turn.stop - turn.start for turn in self.turns if turn.is_answer)

    @property
    def question(self) -> tuple[int, ...]:
        """The start of the first user turn, by which repetitions are found."""
        return self.token_ids[self.turns[0].start : self.turns[0].stop][:_KEY_TOKENS] if self.turns else ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """What the target read before its first answer."""
        return self.token_ids[: self.turns[1].start]


Dialogue = Generator[Prompt, Continuation, Conversation]
"""Yields what is to be continued, is sent the continuation, and returns the conversation."""


class ConversationSampler:
    """Makes the dialogues of one run, and knows which questions have been asked."""

    def __init__(self, frame: ChatFrame, tokenizer: Tokenizer, settings: DistillSettings) -> None:
        self._frame = frame
        self._openings = [tuple(tokenizer.encode(text, allow_special=False)) for text in OPENINGS]
        self._settings = settings
        self._first_asked: dict[tuple[int, ...], int] = {}  # by question, the first conversation with it

    def note(self, question: tuple[int, ...], index: int) -> bool:
        """Remember that conversation ``index`` asks this; whether none before it does."""
        first = min(self._first_asked.get(question, index), index)
        self._first_asked[question] = first
        return first == index

    def dialogue(self, index: int) -> Dialogue:
        """Conversation ``index``. One whose question an earlier one asked too ends without tokens."""
        draw = np.random.default_rng([self._settings.seed, index])
        frame = self._frame
        opening: tuple[int, ...] = ()
        if draw.random() >= NO_OPENING_SHARE:
            opening = self._openings[draw.integers(len(self._openings))]
        context, turns = frame.before, list[Turn]()
        finished: tuple[int, ...] = ()
        for number in range(2 if draw.random() < SECOND_TURN_SHARE else 1):
            start = len(context)
            prompt = self._question_prompt(context + opening, draw)
            question = yield prompt
            words = opening + frame.without_end(question.token_ids)
            if len(words) < MIN_QUESTION_TOKENS or (number == 0 and not self.note(words[:_KEY_TOKENS], index)):
                break
            context += words
            turns.append(Turn(start, len(context), False, prompt.temperature))
            context += frame.to_answer
            start = len(context)
            prompt = self._answer_prompt(context, draw)
            answer = yield prompt
            finished = context + answer.token_ids
            context += frame.after_answer(answer.token_ids)
            turns.append(Turn(start, len(finished), True, prompt.temperature))
            opening = ()
        return Conversation(index, finished, tuple(turns))

    def _question_prompt(self, context: tuple[int, ...], draw: np.random.Generator) -> Prompt:
        limit = self._settings.max_turn_tokens
        return Prompt(
            context,
            max_tokens=int(draw.choice([limit // 4, limit // 2, limit])),
            temperature=float(draw.choice(QUESTION_TEMPERATURES)),
            seed=int(draw.integers(2**63)),
            stop_token_ids=self._frame.end_token_ids,
        )

    def _answer_prompt(self, context: tuple[int, ...], draw: np.random.Generator) -> Prompt:
        limit = self._settings.max_answer_tokens
        return Prompt(
            context,
            max_tokens=int(draw.choice([limit // 2, limit])),
            temperature=float(draw.choice(ANSWER_TEMPERATURES)),
            seed=int(draw.integers(2**63)),
            stop_token_ids=self._frame.end_token_ids,
        )
