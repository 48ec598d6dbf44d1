"""The batcher: who runs in the next step, with how many rows, and who makes room when pages run out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.controller import DraftController, DraftState
from outrider.kvcache.pool import OutOfPages
from outrider.server.engine.drafting import GuardedDrafter
from outrider.server.engine.sequence import Sequence


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


class Batcher:
    """Continuous batching: sequences join and leave at every step, prefill chunks and verify rows share it.

    ``running`` is in order of arrival. Decoding sequences come first, then prefill in order of arrival within
    the rows left over. Who arrived first never waits for a page: the latest arrivals are preempted (their
    pages given back, their tokens kept and computed again later), so the oldest always finishes.

    ``controller`` decides how far to draft; without one every sequence drafts as far as it may.
    """

    def __init__(
        self, config: BatcherConfig, drafter: GuardedDrafter, controller: DraftController | None = None
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found
        self._config = config
        self._drafter = drafter
        self._controller = controller

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
        if self._controller is not None:
            self._controller.release(sequence.sequence_id)

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
        if not decoding:
            return []
        num_other_rows = 0
        if self.waiting or len(decoding) < len(self.running):
            num_other_rows = self._num_prefill_rows(budget - budget // 2)
            budget //= 2
        spare = max(0, budget - len(decoding))
        longest = [self._longest_draft(sequence) for sequence in decoding]
        controller = self._controller
        if controller is None:
            limits = []
            for wanted in longest:
                limits.append(min(wanted, spare))
                spare -= limits[-1]
            self._reserve_ahead(decoding, limits)
            return self._drafter.propose(decoding, limits)
        states = [
            DraftState(sequence.sequence_id, wanted, sequence.num_tokens)
            for sequence, wanted in zip(decoding, longest, strict=True)
        ]
        planned = controller.plan(states, num_other_rows, spare)
        limits = [plan.limit for plan in planned]
        self._reserve_ahead(decoding, limits)
        started = time.perf_counter()
        drafts = self._drafter.propose(decoding, limits, [plan.min_survival for plan in planned])
        return controller.trim(drafts, (time.perf_counter() - started) * 1000)

    def _longest_draft(self, sequence: Sequence) -> int:
        """How many tokens a sequence may draft at most."""
        longest, asked = self._config.max_draft_tokens, sequence.request.params.max_draft_tokens
        return max(0, min(longest if asked is None else min(asked, longest), sequence.max_useful_draft_tokens))

    def _num_prefill_rows(self, at_most: int) -> int:
        """Roughly, how many rows of prompts share the next pass."""
        uncached = sum(sequence.num_uncached_tokens for sequence in self.running if not sequence.is_decoding)
        if self.waiting and len(self.running) < self._config.max_running:
            uncached += sum(sequence.num_tokens for sequence in self.waiting)
        return min(uncached, at_most)

    def _reserve_ahead(self, decoding: SequenceOf[Sequence], limits: SequenceOf[int]) -> None:
        """Slots for what a paged drafter computes while it drafts, where there are any: at nobody's cost.

        First for the row that each sequence computes in any case, so that no draft takes it from a later one.
        """
        if not self._drafter.is_paged:
            return
        for sequence in decoding:
            if sequence.pages.can_reserve(sequence.num_tokens):
                sequence.pages.reserve(sequence.num_tokens)
        for sequence, limit in zip(decoding, limits, strict=True):
            if limit > 0 and sequence.pages.can_reserve(sequence.num_tokens + limit):
                sequence.pages.reserve(sequence.num_tokens + limit)

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
        sequence.pages = sequence.pages.fork()  # an empty set of its own, told from the one whose content is lost
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
            if self._controller is not None:
                self._controller.begin(sequence.sequence_id, sampled=not sequence.request.params.is_greedy)
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += matched
        sequence.admitted(matched)
        self.running.append(self.waiting.popleft())
        return True
