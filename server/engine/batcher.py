"""The batcher: who runs in the next step, with how many rows, and who makes room when pages run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from outrider.draft.base import NO_DRAFT, Draft
from outrider.kvcache.pool import OutOfPages
from outrider.server.engine.cost_table import CostTable
from outrider.server.engine.sequence import Sequence

# How many times longer drafts may make a pass. A step that verified a draft gave 2.6 tokens (the suffix drafter's, on
# Spec-Bench), so a pass that costs more than this seldom pays.
MAX_DRAFT_COST = 2.5


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    max_running: int  # sequences with pages
    max_step_tokens: int  # rows of one pass
    max_draft_tokens: int  # a sequence and step


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """One sequence's part of a step: its next ``num_tokens`` uncached tokens, then its draft."""

    sequence: Sequence
    num_tokens: int
    draft: Draft

    @property
    def start(self) -> int:
        """The position of its first row."""
        return self.sequence.pages.num_cached_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def is_last_chunk(self) -> bool:
        """Whether the step reaches the end of the known tokens."""
        return self.num_tokens == self.sequence.num_uncached_tokens

    @property
    def predicts(self) -> bool:
        """Whether its last rows' logits are wanted."""
        return self.is_last_chunk and self.sequence.request.generate


Propose = Callable[[SequenceOf[Sequence], SequenceOf[int]], list[Draft]]


class Batcher:
    """Continuous batching: sequences join and leave at every step, prefill chunks and verify rows share it.

    ``running`` is in order of arrival. Decoding sequences come first, then prefill in order of arrival within
    the rows left over. Who arrived first never waits for a page: the latest arrivals are preempted (their
    pages given back, their tokens kept and computed again later), so the oldest always finishes.
    """

    def __init__(self, config: BatcherConfig, propose: Propose, cost_table: CostTable | None = None) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found
        self._config = config
        self._propose = propose
        self._cost_table = cost_table

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.pages.release()

    def plan(self) -> list[ScheduledRows]:
        """The next step, its pages reserved. Empty only if nothing is running or waiting."""
        budget = self._config.max_step_tokens
        scheduled: list[ScheduledRows] = []
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        for sequence, draft in zip(decoding, self._drafts(decoding, budget), strict=True):
            if (rows := self._schedule_decode(sequence, draft, scheduled)) is not None:
                scheduled.append(rows)
                budget -= rows.num_rows
        for sequence in [sequence for sequence in self.running if not sequence.is_decoding]:
            budget -= self._schedule_prefill(sequence, budget, scheduled)
        while budget > 0 and self._admit_next():
            budget -= self._schedule_prefill(self.running[-1], budget, scheduled)
        return scheduled

    def _drafts(self, decoding: SequenceOf[Sequence], budget: int) -> list[Draft]:
        """Drafts within ``budget`` that leave every decoding sequence its own row, and prefill half of all."""
        if self.waiting or len(decoding) < len(self.running):
            budget //= 2
        spare = max(0, budget - len(decoding))
        longest = self._longest_worthwhile_draft(len(decoding))
        limits = []
        for sequence in decoding:
            asked = sequence.request.params.max_draft_tokens
            limit = longest if asked is None else min(asked, longest)
            limit = max(0, min(limit, sequence.max_useful_draft_tokens, spare))
            spare -= limit
            limits.append(limit)
        return self._propose(decoding, limits)

    def _longest_worthwhile_draft(self, num_decoding: int) -> int:
        """How many tokens each sequence may draft before the pass costs ``MAX_DRAFT_COST`` times one without."""
        longest, table = self._config.max_draft_tokens, self._cost_table
        if table is None or num_decoding == 0:
            return longest
        limit_ms = MAX_DRAFT_COST * table.pass_ms(num_decoding)
        while longest > 0 and table.pass_ms(num_decoding * (1 + longest)) > limit_ms:
            longest -= 1
        return longest

    def _schedule_decode(
        self, sequence: Sequence, draft: Draft, scheduled: list[ScheduledRows]
    ) -> ScheduledRows | None:
        """Reserve its rows, without the draft if pages are short, at the latest arrivals' cost if need be."""
        if sequence not in self.running:  # preempted for the sake of an earlier one in this very plan
            return None
        if draft.token_ids and not sequence.pages.can_reserve(sequence.num_tokens + len(draft.token_ids)):
            draft = NO_DRAFT
        if not self._reserve(sequence, sequence.num_tokens + len(draft.token_ids), scheduled):
            return None
        return ScheduledRows(sequence, 1, draft)

    def _schedule_prefill(self, sequence: Sequence, budget: int, scheduled: list[ScheduledRows]) -> int:
        """Append the sequence's next chunk to ``scheduled``; the number of rows it takes."""
        num_tokens = min(sequence.num_uncached_tokens, budget)
        if num_tokens <= 0 or sequence not in self.running:
            return 0
        if not self._reserve(sequence, sequence.pages.num_cached_tokens + num_tokens, scheduled):
            return 0
        scheduled.append(ScheduledRows(sequence, num_tokens, NO_DRAFT))
        return num_tokens

    def _reserve(self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledRows]) -> bool:
        """Reserve pages, preempting later arrivals; False if the sequence itself had to give way."""
        while True:
            try:
                sequence.pages.reserve(num_tokens)
                return True
            except OutOfPages:
                latest = self.running[-1]
                assert latest is not sequence or len(self.running) > 1, "one sequence alone always fits the pool"
                self._preempt(latest)
                scheduled[:] = [rows for rows in scheduled if rows.sequence is not latest]
                if latest is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.pages.release()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit_next(self) -> bool:
        """Let the first waiting sequence run, if there is room for all its known tokens and one more."""
        if not self.waiting or len(self.running) >= self._config.max_running:
            return False
        sequence = self.waiting[0]
        pages = sequence.pages
        matched = pages.match_prefix(sequence.token_ids(0, sequence.num_tokens), sequence.num_tokens - 1)
        if self.running and not pages.can_reserve(sequence.num_tokens + 1):
            pages.release()
            return False
        if sequence.num_prefix_tokens is None:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += matched
        sequence.admitted(matched)
        self.running.append(self.waiting.popleft())
        return True
