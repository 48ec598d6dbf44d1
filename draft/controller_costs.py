"""What drafting and verifying cost, as the controller sees it: milliseconds, from whoever measured them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _assumed_pass_ms(num_rows: int) -> float:
    return 10.0 + 0.5 * num_rows


def _assumed_draft_ms(num_sequences: int, num_steps: int) -> float:
    return (0.5 + 0.05 * num_sequences) * num_steps


def _no_attention(num_rows: int, num_context_tokens: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Functions that say what the parts of a step cost, in milliseconds; called at every step, so they are quick.

    ``pass_ms(num_rows)``: a pass of the target, with the logits of its rows, without what stands before them.
    ``draft_ms(num_sequences, num_steps)``: a draft model's chains of ``num_steps`` tokens for so many sequences.
    ``attention_ms(num_rows, num_context_tokens)``: what ``num_rows`` rows of one sequence take longer for the tokens
    before them.
    ``step_overhead_ms``: what every step costs beside its pass.
    What is not given is a guess at its proportion to the rest: only proportions matter.
    """

    pass_ms: Callable[[int], float] = _assumed_pass_ms
    draft_ms: Callable[[int, int], float] = _assumed_draft_ms
    attention_ms: Callable[[int, int], float] = _no_attention
    step_overhead_ms: float = 0.0


class KnownCosts:
    """``DraftCosts`` that are looked up once for each size: the costs of sizes are asked for many times a step."""

    _MAX_KEPT = 4096

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._passes: list[float] = []
        self._drafts: dict[tuple[int, int], float] = {}
        self._attention: dict[int, tuple[float, float]] = {}

    @property
    def step_overhead_ms(self) -> float:
        return self._costs.step_overhead_ms

    def passes(self, num_rows: int) -> list[float]:
        """[n]: a pass of n rows, for n up to at least ``num_rows``. Not to be changed."""
        while len(self._passes) <= num_rows:
            self._passes.append(self._costs.pass_ms(max(1, len(self._passes))))
        return self._passes

    def draft_ms(self, num_sequences: int, num_steps: int) -> float:
        if num_sequences < 1 or num_steps < 1:
            return 0.0
        key = (num_sequences, num_steps)
        if key not in self._drafts:
            if len(self._drafts) >= self._MAX_KEPT:
                self._drafts.clear()
            self._drafts[key] = self._costs.draft_ms(num_sequences, num_steps)
        return self._drafts[key]

    def attention_ms(self, num_context_tokens: int) -> tuple[float, float]:
        """What a sequence's first row takes longer for the tokens before it, and what each further one does."""
        key = num_context_tokens >> 6
        if key not in self._attention:
            if len(self._attention) >= self._MAX_KEPT:
                self._attention.clear()
            one = self._costs.attention_ms(1, num_context_tokens)
            self._attention[key] = (one, max(0.0, self._costs.attention_ms(2, num_context_tokens) - one))
        return self._attention[key]
