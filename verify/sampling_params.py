"""How a request wants its tokens chosen, and what it may hear about them. No torch: the server imports this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20


class InvalidParameter(ValueError):
    """A sampling parameter out of its range; ``name`` is the field, the message says what to do."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's choice of tokens. Checked when made.

    The order in which they act on a row of logits: ``logit_bias``, ``repetition_penalty``,
    ``presence_penalty`` and ``frequency_penalty``, ``min_tokens`` (bans every token that would end the
    answer), then ``temperature``, ``top_k``, ``top_p``, ``min_p``. Log-probabilities are the model's
    own, before all of them.

    Raises:
        InvalidParameter: a value is out of range.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: the likeliest token, always
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over the output, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives per token; None: no log-probabilities
    max_draft_tokens: int | None = None  # None: the server's own limit; 0: no speculation

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise InvalidParameter(name, f"{name} {message}, not {getattr(self, name)!r}")

        def finite(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            require(math.isfinite(value) and low <= value <= high, name, f"must be from {low} to {high}")

        require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be from 0 to max_tokens")
        finite("temperature", 0.0, 2.0)
        finite("top_p", 0.0, 1.0)
        require(self.top_p > 0.0, "top_p", "must be more than 0")
        require(self.top_k >= 0, "top_k", "must be 0 (all) or more")
        finite("min_p", 0.0, 1.0)
        require(0 <= self.seed <= MAX_SEED, "seed", f"must be from 0 to {MAX_SEED}")
        finite("repetition_penalty", 0.01, 100.0)
        finite("presence_penalty", -2.0, 2.0)
        finite("frequency_penalty", -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                message = f"logit_bias must hold biases from -100 to 100, not {bias} for token {token_id}"
                raise InvalidParameter("logit_bias", message)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"stop must be at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                message = f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters; one has {len(text)}"
                raise InvalidParameter("stop", message)
        require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"must be from 0 to {MAX_LOGPROBS}"
        )
        require(
            self.max_draft_tokens is None or self.max_draft_tokens >= 0, "max_draft_tokens", "must be 0 (off) or more"
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are drawn from the softmax at this temperature, none left out."""
        return not (self.is_greedy or self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def changes_logits(self) -> bool:
        """Whether a choice needs more than the model's own logits."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
        )

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse ids the model has no logits for.

        Raises:
            InvalidParameter: an id in ``logit_bias`` or ``stop_token_ids`` is outside ``0..vocab_size - 1``.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidParameter(
                        name, f"{name} names token {token_id}; this model has tokens 0 to {vocab_size - 1}"
                    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer, the model's own log-probability for it, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first, of equals the lowest id
