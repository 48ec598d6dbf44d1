"""From verified tokens to text: incremental, in order, and it knows where the answer ends."""

from __future__ import annotations

import codecs
from collections import deque
from typing import Protocol

from outrider.server.engine.request import FinishReason
from outrider.verify.sampling_params import SamplingParams, TokenLogprob

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What a tokenizer must say about itself for its tokens to become text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to an answer; empty for special tokens. May be part of a character."""

    @property
    def leading_space_stripped(self) -> bool:
        """Whether a text loses the space it starts with (SentencePiece puts one there when encoding)."""


class StopString:
    """Looks for one string in a text that comes character by character.

    Knuth, Morris and Pratt (1977), "Fast pattern matching in strings": amortised constant time a character.
    """

    __slots__ = ("_fallback", "_pattern", "num_matched")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._fallback = [0] * (len(pattern) + 1)  # [n]: the longest border of the pattern's first n characters
        self.num_matched = 0  # the longest proper prefix of the pattern that the text ends with
        for n in range(2, len(pattern) + 1):
            self._fallback[n] = self._longer_match(self._fallback[n - 1], pattern[n - 1])

    def __len__(self) -> int:
        return len(self._pattern)

    def _longer_match(self, num_matched: int, char: str) -> int:
        while num_matched and self._pattern[num_matched] != char:
            num_matched = self._fallback[num_matched]
        return num_matched + (self._pattern[num_matched] == char)

    def push(self, char: str) -> bool:
        """Whether the text, with this character, ends with the whole pattern."""
        self.num_matched = self._longer_match(self.num_matched, char)
        if self.num_matched < len(self._pattern):
            return False
        self.num_matched = self._fallback[self.num_matched]
        return True


class TextStream:
    """One answer's text. ``push`` every verified token, ``take`` once a step what may be sent.

    The text is exactly ``bytes.decode("utf-8", "replace")`` of all the tokens' bytes (less a leading space
    where the tokenizer strips it), cut before the stop string that is complete first (of several that end at
    one character, before the longest), whatever the token and step boundaries. A stop string counts only if
    the token that completes it is at least the ``min_tokens``-th. Whether a token may end the answer by its id
    below ``min_tokens`` is the sampler's matter.

    A token's log-probability goes out with the first character the token had a part in or completed, hence
    never without one unless the answer ends first. A stop string takes with it the log-probabilities of tokens
    that had a part in no character before it. The token that ends an answer by its id has neither.

    Time is linear in the length of the text, memory in the longest stop string.
    """

    def __init__(
        self, tokenizer: TokenBytes, params: SamplingParams, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._stops = tuple(StopString(stop) for stop in params.stop)
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._decoder = _Utf8Decoder("replace")
        self._strip_space = tokenizer.leading_space_stripped  # of the next text, the answer's first
        self._num_tokens = 0
        self._num_chars = 0  # decoded so far
        self._num_taken = 0  # of these, given out
        self._untaken: list[str] = []  # decoded pieces, not given out
        self._num_held = 0  # last characters that could still become a stop string
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # (index of the token's first character, entry)
        self._ended = False

    def push(self, token_id: int, logprob: TokenLogprob | None) -> FinishReason | None:
        """Add the next token; the reason if the answer ends with it, else None.

        After a reason, ``take`` gives all the rest and nothing more may be pushed.
        """
        assert not self._ended, "a token came after the end of the answer"
        self._num_tokens += 1
        if token_id in self._stop_token_ids:
            self.finish()
            return FinishReason.STOP
        if logprob is not None:
            self._logprobs.append((self._num_chars, logprob))
        if self._append(self._decoder.decode(self._tokenizer.token_bytes(token_id))):
            return FinishReason.STOP
        if self._num_tokens < self._max_tokens:
            return None
        return FinishReason.STOP if self.finish() else FinishReason.LENGTH

    def take(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The text and log-probabilities that may be sent now and were not given out before."""
        text = "".join(self._untaken)
        num_ready = len(text) - self._num_held
        self._untaken = [text[num_ready:]] if self._num_held else []
        self._num_taken += num_ready
        logprobs = []
        while self._logprobs and (self._ended or self._logprobs[0][0] < self._num_taken):
            logprobs.append(self._logprobs.popleft()[1])
        return text[:num_ready], tuple(logprobs)

    def finish(self) -> bool:
        """End the answer here, for whatever reason: ``take`` then gives what was held back.

        Half a character becomes one U+FFFD; True if that completed a stop string. Harmless when already ended.
        """
        if self._ended:
            return False
        if self._append(self._decoder.decode(b"", final=True)):
            return True
        self._num_held = 0
        self._ended = True
        return False

    def _append(self, text: str) -> bool:
        """Add decoded text up to the first complete stop string; whether there was one."""
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        if not text:
            return False
        self._untaken.append(text)
        if not self._stops:
            self._num_chars += len(text)
            return False
        for char in text:
            self._num_chars += 1
            complete = [len(stop) for stop in self._stops if stop.push(char)]
            if complete and self._num_tokens >= self._min_tokens:
                self._cut(self._num_chars - max(complete))
                return True
        self._num_held = max(stop.num_matched for stop in self._stops)
        return False

    def _cut(self, num_chars: int) -> None:
        """End the answer after its first ``num_chars`` characters, none of which a ``take`` went beyond."""
        self._untaken = ["".join(self._untaken)[: num_chars - self._num_taken]]
        while self._logprobs and self._logprobs[-1][0] >= num_chars:
            self._logprobs.pop()
        self._num_chars = num_chars
        self._num_held = 0
        self._ended = True
