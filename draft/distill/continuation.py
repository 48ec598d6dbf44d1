"""The contract of who generates: prompts in, the target's continuations out, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is to continue, and how: until ``max_tokens``, an end-of-text token or a stop token.

    The continuation must depend on nothing but this and the target, whatever else runs beside it: then what a run
    makes does not depend on when it was killed.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float  # 0: the likeliest token, always
    seed: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens that followed, the one that ended them included; ``is_cut``: they ended at ``max_tokens``."""

    token_ids: tuple[int, ...]
    is_cut: bool


class Generate(Protocol):
    """Continues prompts side by side."""

    @property
    def num_parallel(self) -> int:
        """How many prompts are worth having at the same time."""

    def submit(self, key: int, prompt: Prompt) -> None:
        """Start one; ``key`` is free once its continuation has come."""

    def step(self) -> Sequence[tuple[int, Continuation]]:
        """Go on with all of them, and return those that ended. Called only while there are some."""
