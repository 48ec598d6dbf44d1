"""The contract of a drafter: guess the next tokens; be wrong freely, never in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask for up to ``max_draft_tokens`` guesses after the tokens of sequence ``sequence_id`` so far."""

    sequence_id: int
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, the likeliest continuation first to last.

    ``draft_probs`` ``[num_draft_tokens, vocab_size]``: the distributions the guesses were *sampled* from,
    or None where the guesses were not sampled (each then counts as certain).
    """

    token_ids: tuple[int, ...] = ()
    draft_probs: Tensor | None = None


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Follows sequences token by token and guesses ahead.

    The engine calls ``begin`` once, then ``extend`` with every verified token (never with a rejected
    guess), ``propose`` before a step, ``release`` at the end. Whatever a drafter raises or returns, the
    engine goes on without a draft.
    """

    @property
    def name(self) -> str: ...

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None: ...

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, each of at most ``max_draft_tokens`` tokens."""

    def release(self, sequence_id: int) -> None: ...
