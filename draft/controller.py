"""How far to guess: the draft lengths of a step that promise the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.controller_costs import DraftCosts, KnownCosts
from outrider.draft.controller_records import DraftRecords, confidences_of

MODEL = "model"  # the source whose guesses cost time, whether they are verified or not
_LONGEST_REST = 16  # steps without a draft after which one is tried again
_SMOOTHING = 0.1  # share of the newest step in what is averaged over steps


@dataclass(frozen=True, slots=True)
class DraftState:
    """A decoding sequence before a step. ``max_draft_tokens``: that it can use, and its request allows."""

    sequence_id: int
    max_draft_tokens: int
    num_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftLimit:
    """What to ask a drafter for: ``DraftRequest``'s ``max_draft_tokens`` and ``min_survival``."""

    limit: int
    min_survival: float = 0.0


@dataclass(slots=True)
class _Step:
    """What ``plan`` leaves for the calls after it."""

    states: Sequence[DraftState] = ()
    num_rows: int = 0  # without drafts
    max_draft_rows: int = 0
    fixed_ms: float = 0.0  # that no draft changes, beside the pass
    row_ms: float = 0.0  # of one draft row, for the tokens before it, on average
    price: float = 0.0  # tokens that a millisecond is worth
    usual_rows: int = 0  # of a pass with the other sequences' drafts


class DraftController:
    """Decides, every step, how many tokens each sequence drafts, and which of them are verified.

    A step emits one token for each of B sequences, and of every drafted token its survival: the probability that it
    and all before it in its draft are accepted. It costs a pass of all rows, and what drafting took. The goal is the
    most expected tokens per millisecond. For any number of rows the best are the most likely ones, over all
    sequences together; since a token never survives more often than the one before it, these are always beginnings
    of drafts. So one sort and one walk over the row count find the best choice exactly (``trim``).

    Survivals are the drafters' confidences as ``Calibration`` corrects them, by source, for all sequences together
    and for each by itself. What is not verified is not learned from: a source of a sequence that gets no rows is
    tried again after 1, 2, 4, up to 16 steps, for as long as that does not help.

    The order of calls in a step: ``plan``, then the drafter's ``propose``, ``trim``, the pass, and ``record`` for
    each sequence. Sequences are known from ``begin`` (or their first ``plan``) to ``release``.
    """

    def __init__(self, costs: DraftCosts | None = None, max_draft_tokens: int = 8) -> None:
        self._costs = KnownCosts(costs or DraftCosts())
        self._max_draft_tokens = max_draft_tokens
        self._records = DraftRecords()
        self._gain = 1.5  # how many times the tokens per millisecond of no drafts, smoothed
        self._draft_rows = 2.0  # of a sequence and step, smoothed
        self._step = _Step()

    @property
    def num_followed(self) -> int:
        return len(self._records)

    def begin(self, sequence_id: int, sampled: bool = False) -> None:
        """Start to follow a sequence. ``sampled``: its temperature is above 0, where guesses come true less often."""
        self._records.begin(sequence_id, sampled)

    def release(self, sequence_id: int) -> None:
        """Forget a sequence, if it is known."""
        self._records.release(sequence_id)

    def plan(
        self, states: Sequence[DraftState], num_other_rows: int = 0, max_draft_rows: int | None = None
    ) -> list[DraftLimit]:
        """How far each sequence's drafter may go, in order.

        ``num_other_rows``: rows of the same pass that are not of these sequences (prefill).
        ``max_draft_rows``: that all drafts together may take; None: as many as the sequences want.
        """
        if not states:
            self._step = _Step()
            return []
        limits = [max(0, min(state.max_draft_tokens, self._max_draft_tokens)) for state in states]
        most = sum(limits) if max_draft_rows is None else max(0, min(max_draft_rows, sum(limits)))
        num_rows = len(states) + num_other_rows
        attention = [self._costs.attention_ms(state.num_context_tokens) for state in states]
        step = self._step = _Step(states, num_rows, most)
        step.fixed_ms = self._costs.step_overhead_ms + sum(first for first, _ in attention)
        step.row_ms = sum(further for _, further in attention) / len(states)
        passes = self._costs.passes(num_rows + most)
        step.price = self._gain * len(states) / max(1e-9, step.fixed_ms + passes[num_rows])
        step.usual_rows = num_rows + min(most, round(self._draft_rows * (len(states) - 1)))
        for state in states:
            self._records.sequence(state.sequence_id).step += 1
        longest = min(most, max(limits))
        # A chain goes on where one more token promises more than the row and the draft's own step are worth.
        num_chain = min(longest, 1 + round(self._draft_rows))
        row_ms = self._row_ms(num_chain) / max(1, num_chain)
        drafted = self._costs.draft_ms(len(states), 2) - self._costs.draft_ms(len(states), 1)
        min_survival = min(0.9, step.price * (row_ms + drafted / len(states)))
        return [
            DraftLimit(min(limit, most), min_survival ** (1 / self._records.shared(state.sequence_id, MODEL).sharpness))
            for state, limit in zip(states, limits, strict=True)
        ]

    def value(self, sequence_id: int, draft: Draft) -> float:
        """Tokens that the best beginning of a draft gains in the planned step, less what its rows cost."""
        best = gained = 0.0
        for num_tokens, survival in enumerate(self._records.survivals(sequence_id, draft), 1):
            gained += survival
            best = max(best, gained - self._step.price * self._row_ms(num_tokens))
        return best

    def model_pays(self, sequence_id: int, other_value: float) -> bool:
        """Whether a draft model should guess for a sequence that has a draft of ``other_value`` without it.

        It should where it gained more, of late, than the time was worth; otherwise now and then, to see.
        """
        source = self._records.source(sequence_id, MODEL)
        if source.value > other_value:
            return True
        shared = self._records.shared(sequence_id, MODEL)
        source.value += 0.02 * (shared.value - source.value)
        return source.is_due(self._longest_rest)

    def model_guessed(self, sequence_id: int, draft: Draft, num_sequences: int) -> float:
        """Learn what a draft model's guess was worth, its time included; the ``value`` of the draft.

        ``num_sequences``: that it guessed for at once.
        """
        value = self.value(sequence_id, draft)
        draft_ms = self._costs.draft_ms(num_sequences, len(draft.token_ids) + 1) / num_sequences
        net = value - self._step.price * draft_ms
        source, shared = self._records.source(sequence_id, MODEL), self._records.shared(sequence_id, MODEL)
        source.value += 0.2 * (net - source.value)
        shared.value += 0.02 * (net - shared.value)
        if source.value > 0:
            source.used()
        if draft.token_ids and not draft.parents:
            shared.compare(confidences_of(draft), self._records.survivals(sequence_id, draft)[-1])
        return value

    def trim(self, drafts: Sequence[Draft], draft_ms: float = 0.0) -> list[Draft]:
        """The part of the drafts that is worth verifying, in the order of ``plan``'s sequences.

        ``draft_ms``: what drafting took.

        Raises:
            ValueError: there are not as many drafts as sequences were planned.
        """
        step = self._step
        if len(drafts) != len(step.states):
            raise ValueError(f"{len(drafts)} drafts for {len(step.states)} planned sequences; plan and trim the same")
        ranked = []
        for index, (state, draft) in enumerate(zip(step.states, drafts, strict=True)):
            if draft.token_ids:
                survivals = self._records.survivals(state.sequence_id, draft)[: state.max_draft_tokens]
                ranked += [(-survival, index, token) for token, survival in enumerate(survivals)]
        ranked.sort()  # of equal ones the earlier first, so what a token follows comes before it
        num_draft_rows = self._best_num_rows([-entry[0] for entry in ranked[: step.max_draft_rows]], draft_ms)
        kept: list[list[int]] = [[] for _ in drafts]
        for _, index, token in ranked[:num_draft_rows]:
            kept[index].append(token)
        self._probe(drafts, kept, step.max_draft_rows - num_draft_rows)
        return [_part(draft, tokens) for draft, tokens in zip(drafts, kept, strict=True)]

    def record(self, sequence_id: int, draft: Draft, num_accepted: int, path: Sequence[int] = ()) -> None:
        """Learn from what became of a draft, as ``trim`` gave it.

        ``num_accepted``: of its tokens, found right, also where the answer ended before.
        ``path``: for a tree, the indices of those that were accepted, first to last.
        """
        if draft.token_ids:
            self._records.observe(sequence_id, draft, num_accepted, path)

    @property
    def _longest_rest(self) -> int:
        """All sequences of a step pay for one's probe, so that they are no more often than one in four steps."""
        return max(_LONGEST_REST, 4 * len(self._step.states))

    def _row_ms(self, num_draft_tokens: int) -> float:
        """What a sequence's draft adds to the planned pass."""
        step = self._step
        passes = self._costs.passes(step.usual_rows + num_draft_tokens)
        return passes[step.usual_rows + num_draft_tokens] - passes[step.usual_rows] + step.row_ms * num_draft_tokens

    def _best_num_rows(self, survivals: Sequence[float], draft_ms: float) -> int:
        """How many of the likeliest tokens make the most tokens per millisecond."""
        step = self._step
        if not step.states:
            return 0
        passes = self._costs.passes(step.num_rows + len(survivals))
        tokens, fixed_ms = float(len(step.states)), step.fixed_ms + draft_ms
        best, best_count = tokens / max(1e-9, fixed_ms + passes[step.num_rows]), 0
        for count, survival in enumerate(survivals, 1):
            tokens += survival
            rate = tokens / max(1e-9, fixed_ms + passes[step.num_rows + count] + step.row_ms * count)
            if rate > best:
                best, best_count = rate, count
        none = len(step.states) / max(1e-9, step.fixed_ms + passes[step.num_rows])
        self._gain += _SMOOTHING * (best / none - self._gain)
        self._draft_rows += _SMOOTHING * (best_count / len(step.states) - self._draft_rows)
        return best_count

    def _probe(self, drafts: Sequence[Draft], kept: Sequence[list[int]], num_spare_rows: int) -> None:
        """Give the first token of one draft without rows a row, if its source has gone without for long enough."""
        for state, draft, tokens in zip(self._step.states, drafts, kept, strict=True):
            if not draft.token_ids:
                continue
            source = self._records.source(state.sequence_id, draft.source)
            if tokens:
                source.used()
            elif num_spare_rows > 0 and state.max_draft_tokens > 0 and source.is_due(self._longest_rest):
                tokens.append(0)
                num_spare_rows = 0


def _part(draft: Draft, tokens: list[int]) -> Draft:
    """The draft with these of its tokens alone; each comes with what it follows."""
    if len(tokens) == len(draft.token_ids):
        return draft
    if not tokens:
        return NO_DRAFT
    tokens.sort()
    renamed = {-1: -1} | {old: new for new, old in enumerate(tokens)}
    confidences = confidences_of(draft)
    return replace(
        draft,
        token_ids=tuple([draft.token_ids[token] for token in tokens]),
        draft_probs=None if draft.draft_probs is None else draft.draft_probs[tokens],
        confidences=tuple([confidences[token] for token in tokens]),
        parents=tuple([renamed[draft.parents[token]] for token in tokens]) if draft.parents else (),
    )
