"""Generating a corpus: many dialogues side by side, until there are enough tokens or the time is up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping

from outrider.draft.distill.continuation import Continuation, Generate
from outrider.draft.distill.conversations import Conversation, ConversationSampler, Dialogue
from outrider.draft.distill.corpus import Corpus, distinct
from outrider.draft.distill.progress import Progress

MIN_CONVERSATIONS = 2  # one to learn from, one to be held out


class CorpusFailed(Exception):
    """The target cannot be brought to talk; the message says what was tried."""


class Tally:
    """The first conversations without a gap, that is, what counts whichever are finished first."""

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._next = 0
        self._asked: set[tuple[int, ...]] = set()
        self.kept: list[Conversation] = []
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        return self.num_tokens >= self._max_tokens and len(self.kept) >= MIN_CONVERSATIONS

    def extend(self, found: Mapping[int, Conversation]) -> None:
        """Count on from where the last call stopped, in conversations by index, up to the limit."""
        while not self.is_full and (conversation := found.get(self._next)) is not None:
            self._next += 1
            if conversation.token_ids and conversation.question not in self._asked:
                self._asked.add(conversation.question)
                self.kept.append(conversation)
                self.num_tokens += conversation.num_answer_tokens

    @property
    def num_passed(self) -> int:
        return self._next


class Generation:
    """Fills a corpus.

    With ``max_tokens`` (0: no limit) the result is the first conversations that hold so many answer tokens, in the
    order of their indices: it does not depend on which of them were finished first, nor on interruptions.
    ``max_seconds``: counted over all runs; what has come by then is the result, with at least ``MIN_CONVERSATIONS``.
    """

    def __init__(
        self, sampler: ConversationSampler, corpus: Corpus, max_tokens: int = 0, max_seconds: float = math.inf
    ) -> None:
        self._sampler = sampler
        self._corpus = corpus
        self._max_tokens = max_tokens or math.inf
        self._max_seconds = max_seconds
        self._tally = Tally(self._max_tokens)
        self._dialogues: dict[int, Dialogue] = {}
        self._unbegun = (index for index in itertools.count() if index not in corpus.conversations)
        self._begun_at = time.monotonic()
        self._seconds_before = corpus.seconds
        for conversation in corpus.conversations.values():
            if conversation.token_ids:
                sampler.note(conversation.question, conversation.index)

        self._tally.extend(corpus.conversations)

    def run(self, generate: Generate, report: Callable[[Progress], None]) -> None:
        """Go on until there is enough.

        Raises:
            CorpusFailed: hardly any conversation is worth keeping.
            OSError: they cannot be written.
        """
        while not self.is_finished:
            self._check_worth()
            while len(self._dialogues) < generate.num_parallel:
                self._begin(next(self._unbegun), generate)
            ended = [self._advance(key, continuation, generate) for key, continuation in generate.step()]
            if any(ended):
                self._tally.extend(self._corpus.conversations)
                report(self._progress())
        if not self._corpus.is_finished:
            self._corpus.finish(self._seconds)

    @property
    def conversations(self) -> list[Conversation]:
        """Those that count, by index."""
        return self._tally.kept if self._tally.is_full else list(distinct(self._corpus.conversations.values()))

    @property
    def is_finished(self) -> bool:
        if self._corpus.is_finished or self._tally.is_full:
            return True
        return self._seconds >= self._max_seconds and len(self.conversations) >= MIN_CONVERSATIONS

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._begun_at

    def _begin(self, index: int, generate: Generate) -> None:
        dialogue = self._sampler.dialogue(index)
        self._dialogues[index] = dialogue
        generate.submit(index, next(dialogue))

    def _advance(self, index: int, continuation: Continuation, generate: Generate) -> bool:
        """Let a dialogue go on; whether it ended."""
        try:
            generate.submit(index, self._dialogues[index].send(continuation))
        except StopIteration as end:
            del self._dialogues[index]
            self._corpus.append(end.value, self._seconds)
            return True
        return False

    def _check_worth(self) -> None:
        passed, kept = self._tally.num_passed, len(self._tally.kept)
        if passed > 50 * (kept + MIN_CONVERSATIONS):
            raise CorpusFailed(
                f"of {passed} questions that the model was let write, {kept} were new and long enough; "
                "it cannot be distilled from its own words"
            )

    def _progress(self) -> Progress:
        tally = self._tally
        done = max(tally.num_tokens / self._max_tokens, self._seconds / self._max_seconds)
        detail = f"{tally.num_tokens:,} answer tokens, {len(tally.kept):,} conversations"
        return Progress("generating", min(done, 1.0), detail)
