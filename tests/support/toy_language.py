"""A language without a model: what follows a text is a function of the text, its temperature and its seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.draft.distill.continuation import Continuation, Prompt

END = 2  # the byte tokenizer's <|im_end|>


@dataclass
class ToyLanguage:
    """A ``Generate``: its prompts take turns that end after a few tokens, the later submitted often the sooner ended.

    ``num_questions``: how many different things there are to say; few make repetitions.
    """

    num_parallel: int = 4
    num_questions: int = 1000
    prompts: list[Prompt] = field(default_factory=list)
    running: dict[int, tuple[int, Prompt]] = field(default_factory=dict)
    left: float = float("inf")  # continuations until it is killed

    def submit(self, key: int, prompt: Prompt) -> None:
        assert key not in self.running, f"{key} is submitted twice"
        assert len(self.running) < self.num_parallel
        self.prompts.append(prompt)
        self.running[key] = (self._number(prompt) % 5, prompt)

    def step(self) -> Sequence[tuple[int, Continuation]]:
        assert self.running
        ended = [key for key, (left, _) in self.running.items() if left == 0]
        self.running = {key: (left - 1, prompt) for key, (left, prompt) in self.running.items()}
        if len(ended) > self.left:
            raise KeyboardInterrupt
        self.left -= len(ended)
        return [(key, self.continuation(self.running.pop(key)[1])) for key in ended]

    def continuation(self, prompt: Prompt) -> Continuation:
        number = self._number(prompt) % self.num_questions
        length = 3 + number % 9
        words = tuple(10 + (number * 31 + place * 7) % 200 for place in range(length))
        if length >= prompt.max_tokens:
            return Continuation(words[: prompt.max_tokens], is_cut=True)
        return Continuation((*words, END), is_cut=False)

    def _number(self, prompt: Prompt) -> int:
        text = repr((prompt.token_ids, prompt.temperature, prompt.seed)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4])
