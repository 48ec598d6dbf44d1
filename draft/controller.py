"""How far to guess: the draft lengths of a step that promise the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.calibration import UNKNOWN_CONFIDENCE, Calibration, Turn
from outrider.draft.controller_costs import DraftCosts, KnownCosts

COSTLY_SOURCE = "model"  # the source whose guesses cost time whether they are verified or not
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


class _SourceOfSequence:
    """What one source's guesses were worth for one sequence."""

    __slots__ = ("expected", "idle", "probed", "rest", "turn")

    def __init__(self, expected: float) -> None:
        self.turn = Turn()
        self.expected = expected  # of a token before it is drafted: how likely it is right where all before it are
        self.rest = 1  # steps to go without before a probe
        self.idle = 0  # steps gone without
        self.probed = False  # the draft under way is a probe


@dataclass(slots=True)
class _FollowedSequence:
    sampled: bool = False
    step: int = 0
    sources: dict[str, _SourceOfSequence] = field(default_factory=dict)


@dataclass(slots=True)
class _SharedSource:
    calibration: Calibration = field(default_factory=Calibration)
    expected: float = 0.6


@dataclass(slots=True)
class _Step:
    """What ``plan`` leaves for ``trim``."""

    states: Sequence[DraftState] = ()
    num_other_rows: int = 0
    max_draft_rows: int = 0
    fixed_ms: float = 0.0  # that no draft changes, beside the pass
    row_ms: float = 0.0  # of one draft row, for the tokens before it, on average
    price: float = 0.0  # tokens that a millisecond is worth


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
        self._shared: dict[tuple[str, bool], _SharedSource] = {}
        self._sequences: dict[int, _FollowedSequence] = {}
        self._gain = 1.5  # how many times the tokens per second of no drafts, smoothed
        self._step = _Step()

    @property
    def num_followed(self) -> int:
        return len(self._sequences)

    def begin(self, sequence_id: int, sampled: bool = False) -> None:
        """Start to follow a sequence. ``sampled``: its temperature is above 0, where guesses come true less often."""
        self._sequences[sequence_id] = _FollowedSequence(sampled)

    def release(self, sequence_id: int) -> None:
        """Forget a sequence, if it is known."""
        self._sequences.pop(sequence_id, None)

    def plan(
        self, states: Sequence[DraftState], num_other_rows: int = 0, max_draft_rows: int | None = None
    ) -> list[DraftLimit]:
        """How far each sequence's drafter may go, in order.

        ``num_other_rows``: rows of the same pass that are not of these sequences (prefill).
        ``max_draft_rows``: that all drafts together may take; None: as many as the sequences want.
        """
        num_rows = len(states) + num_other_rows
        limits = [min(state.max_draft_tokens, self._max_draft_tokens) for state in states]
        if max_draft_rows is None:
            max_draft_rows = sum(limits)
        passes = self._costs.passes(num_rows + min(max_draft_rows, sum(limits)))
        attention = [self._costs.attention_ms(state.num_context_tokens) for state in states]
        fixed_ms = self._costs.step_overhead_ms + sum(first for first, _ in attention)
        row_ms = sum(further for _, further in attention) / max(1, len(states))
        base_ms = fixed_ms + passes[num_rows]
        price = self._gain * len(states) / base_ms if base_ms > 0 else 0.0
        self._step = _Step(states, num_other_rows, max_draft_rows, fixed_ms, row_ms, price)
        # The cheapest row that can be added, at its price: what is worth less is never verified.
        end = min(len(passes) - 1, num_rows + max(1, max_draft_rows))
        cheapest = min(
            ((passes[end_row] - passes[num_rows]) / (end_row - num_rows) for end_row in range(num_rows + 1, end + 1)),
            default=0.0,
        )
        min_survival = min(0.9, price * (cheapest + row_ms))
        for state in states:
            self._sequence(state.sequence_id).step += 1
        return [DraftLimit(max(0, min(limit, max_draft_rows)), min_survival) for limit in limits]

    def trim(self, drafts: Sequence[Draft], draft_ms: float = 0.0) -> list[Draft]:
        """The part of the drafts that is worth verifying, in the order of ``plan``'s sequences.

        ``draft_ms``: what drafting took.
        """
        states, price_rows = self._step.states, self._step.max_draft_rows
        if len(drafts) != len(states):
            raise ValueError(f"{len(drafts)} drafts for {len(states)} sequences; plan() and trim() take the same ones")
        ranked = []
        for index, (state, draft) in enumerate(zip(states, drafts, strict=True)):
            survivals = self.survivals(state.sequence_id, draft)[: state.max_draft_tokens]
            ranked += [(-survival, index, token) for token, survival in enumerate(survivals)]
        ranked.sort()  # of equal ones the earlier first, so what a token follows comes before it
        num_rows = self._best_num_rows([-entry[0] for entry in ranked[:price_rows]], draft_ms)
        kept: list[list[int]] = [[] for _ in states]
        for _, index, token in ranked[:num_rows]:
            kept[index].append(token)
        spare = price_rows - num_rows
        for state, draft, tokens in zip(states, drafts, kept, strict=True):
            if draft.token_ids and self._probes(state.sequence_id, draft.source, bool(tokens), spare > 0):
                tokens.append(0)
                spare = 0  # one probe a step: they are paid by all
        return [_part(draft, tokens) for draft, tokens in zip(drafts, kept, strict=True)]

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Of each token, the probability that it and all before it in its draft are accepted."""
        sequence = self._sequence(sequence_id)
        calibration = self._shared_source(sequence, draft.source).calibration
        turn = self._source(sequence, draft.source).turn
        turn.advance(sequence.step)
        if not draft.parents:
            return calibration.survivals(_confidences(draft), turn)
        survivals: list[float] = []
        for confidence, parent, depth in zip(_confidences(draft), draft.parents, _depths(draft), strict=True):
            before = survivals[parent] if parent >= 0 else 1.0
            survivals.append(before * calibration.probability(confidence, depth, turn))
        return survivals

    def record(self, sequence_id: int, draft: Draft, num_accepted: int, path: Sequence[int] = ()) -> None:
        """Learn from what became of a draft, as ``trim`` gave it.

        ``num_accepted``: of its tokens, found right, also where the answer ended before.
        ``path``: for a tree, the indices of those that were accepted, first to last.
        """
        sequence = self._sequence(sequence_id)
        source = self._source(sequence, draft.source)
        calibration = self._shared_source(sequence, draft.source).calibration
        source.turn.advance(sequence.step)
        confidences = _confidences(draft)
        if draft.parents:
            accepted, depths = set(path), _depths(draft)
            for index, parent in enumerate(draft.parents):
                if parent < 0 or parent in accepted:
                    calibration.observe(confidences[index], depths[index], source.turn, index in accepted)
        else:
            for position in range(min(num_accepted + 1, len(confidences))):
                calibration.observe(confidences[position], position, source.turn, position < num_accepted)
        if num_accepted > 0:
            source.rest = 1

    def _best_num_rows(self, survivals: Sequence[float], draft_ms: float) -> int:
        """How many of the likeliest tokens make the most tokens per millisecond."""
        step = self._step
        num_rows = len(step.states) + step.num_other_rows
        passes = self._costs.passes(num_rows + len(survivals))
        tokens, fixed_ms, row_ms = float(len(step.states)), step.fixed_ms, step.row_ms
        none = tokens / max(1e-9, fixed_ms + passes[num_rows])
        fixed_ms += draft_ms
        best = tokens / max(1e-9, fixed_ms + passes[num_rows])
        best_count = 0
        for count, survival in enumerate(survivals, 1):
            tokens += survival
            rate = tokens / max(1e-9, fixed_ms + passes[num_rows + count] + row_ms * count)
            if rate > best:
                best, best_count = rate, count
        if states_gain := none and best / none:
            self._gain += _SMOOTHING * (states_gain - self._gain)
        return best_count

    def _probes(self, sequence_id: int, name: str, has_rows: bool, has_room: bool) -> bool:
        """Whether a source without rows in this step is due to be tried."""
        source = self._source(self._sequence(sequence_id), name)
        if has_rows:
            source.idle = 0
            return False
        source.idle += 1
        if source.idle <= source.rest or not has_room:
            return False
        source.idle = 0
        source.rest = min(2 * source.rest, max(_LONGEST_REST, 4 * len(self._step.states)))
        return True

    def _source(self, sequence: _FollowedSequence, name: str) -> _SourceOfSequence:
        source = sequence.sources.get(name)
        if source is None:
            expected = self._shared_source(sequence, name).expected
            source = sequence.sources[name] = _SourceOfSequence(expected)
        return source

    def _shared_source(self, sequence: _FollowedSequence, name: str) -> _SharedSource:
        key = (name, sequence.sampled)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedSource()
        return shared

    def _sequence(self, sequence_id: int) -> _FollowedSequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            sequence = self._sequences[sequence_id] = _FollowedSequence()
        return sequence


def _confidences(draft: Draft) -> Sequence[float]:
    if len(draft.confidences) == len(draft.token_ids):
        return draft.confidences
    return (UNKNOWN_CONFIDENCE,) * len(draft.token_ids)


def _depths(draft: Draft) -> list[int]:
    """Of each token of a tree, how many of its draft come before it."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _part(draft: Draft, tokens: list[int]) -> Draft:
    """The draft with these of its tokens alone; each comes with what it follows."""
    if len(tokens) == len(draft.token_ids):
        return draft
    if not tokens:
        return NO_DRAFT
    tokens.sort()
    renamed = {-1: -1} | {old: new for new, old in enumerate(tokens)}
    confidences = _confidences(draft)
    return replace(
        draft,
        token_ids=tuple([draft.token_ids[token] for token in tokens]),
        draft_probs=None if draft.draft_probs is None else draft.draft_probs[tokens],
        confidences=tuple([confidences[token] for token in tokens]),
        parents=tuple([renamed[draft.parents[token]] for token in tokens]) if draft.parents else (),
    )
