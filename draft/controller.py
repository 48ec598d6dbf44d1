"""How far to guess: the draft lengths of a step that promise the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.controller_chains import ChainChoice
from outrider.draft.controller_costs import DraftCosts, KnownCosts
from outrider.draft.controller_records import DraftRecords, Rest, confidences_of

MODEL = "model"  # the source whose guesses cost time, whether they are verified or not
_LONGEST_REST = 16  # steps without a draft after which one is tried again
_LONGEST_MODEL_REST = 64  # the same, where a draft model does not pay for all together
_LARGEST_COST_SCALE = 16.0  # of one step: more is a disturbance
_MAX_LATENESS_MS = 5.0  # of a step that counts: more is a disturbance
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
class _Crowd:
    """What drafts gained with about so many sequences: how many times the tokens per millisecond of none, smoothed."""

    gain: float = 1.0
    draft_rows: float = 2.0  # of a sequence
    model_gain: float = 1.3  # of the steps with a draft model's drafts
    model_rest: Rest = field(default_factory=Rest)


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
    crowd: _Crowd = field(default_factory=lambda: _Crowd())
    row_costs: list[float] = field(default_factory=list)
    draft_costs: list[float] = field(default_factory=list)
    model_rests: bool = False
    model_is_used: bool = False  # not only tried
    num_chains: int = 0  # that the draft model made
    num_chain_steps: int = 0  # of the longest of them
    expected_ms: float = 0.0  # all of it


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
        self._crowds: dict[int, _Crowd] = {}
        self._step = _Step()
        self._draft_cost_scale = 1.0  # what drafting takes, beside what the costs say: smoothed
        # What steps take longer than was expected, smoothed: without chains of a model, and with.
        self._lateness_ms = [0.0, 0.0]

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
        crowd = step.crowd = self._crowds.setdefault(len(states).bit_length(), _Crowd())
        # One sequence alone knows by itself whether a model pays; of several each pays for the others' drafts.
        if len(states) > 1 and crowd.model_gain < 1.0:
            step.model_rests = not crowd.model_rest.is_due(_LONGEST_MODEL_REST)
        step.price = max(1.0, crowd.gain) * len(states) / max(1e-9, step.fixed_ms + passes[num_rows])
        step.usual_rows = num_rows + min(most, round(crowd.draft_rows * (len(states) - 1)))
        for state in states:
            self._records.sequence(state.sequence_id).step += 1
        return [DraftLimit(min(limit, most)) for limit in limits]

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Of each token, the probability that it and all before it in its draft are accepted."""
        return self._records.survivals(sequence_id, draft)

    def value(self, sequence_id: int, draft: Draft) -> float:
        """Tokens that the best beginning of a draft gains in the planned step, less what its rows cost."""
        best = gained = 0.0
        survivals = self._records.survivals(sequence_id, draft)
        if draft.parents:
            survivals = sorted(survivals, reverse=True)
        for survival, cost in zip(survivals, self._row_costs()[1:], strict=False):
            gained += survival
            best = max(best, gained - cost)
        return best

    def ask_model(self, sequence_id: int, other_value: float) -> DraftLimit:
        """How far a draft model should guess for a sequence that has a draft of ``other_value`` without it.

        Not at all where that gained less, of late, than the time was worth; but now and then a little, to see.
        """
        source, shared = self._records.source(sequence_id, MODEL), self._chains_of_all(sequence_id)
        if source.chains is None:
            source.chains = ChainChoice(self._max_draft_tokens, shared)
        if not self._step.model_rests:
            if source.chains.value > other_value:
                self._step.model_is_used = True
                return DraftLimit(*source.chains.best())
            if not source.rest.is_due(self._longest_rest):
                return DraftLimit(0)
            return DraftLimit(min(2, self._max_draft_tokens))
        return DraftLimit(0)

    def model_guessed(self, sequence_id: int, draft: Draft, limit: DraftLimit) -> float:
        """Learn what a draft model's guess is worth, its time included; the ``value`` of the draft."""
        source, shared = self._records.source(sequence_id, MODEL), self._chains_of_all(sequence_id)
        ended = len(draft.token_ids) < limit.limit
        self._step.num_chains += 1
        self._step.num_chain_steps = max(self._step.num_chain_steps, len(draft.token_ids) + ended)
        claims, survivals = self._records.carried_on(
            sequence_id, draft, limit.min_survival, self._max_draft_tokens, ended
        )
        if source.chains is None:
            source.chains = ChainChoice(self._max_draft_tokens, shared)
        gains = shared.gains(claims, survivals, self._row_costs(), self._draft_costs())
        source.chains.learn(gains, 0.15 if source.chains.value > 0 else 0.5)
        shared.learn(gains, max(0.02, 1 / (2 + shared.num_chains)))  # what was assumed counts as two chains
        if source.chains.value > 0:
            source.rest.used()
        return self.value(sequence_id, draft)

    def trim(self, drafts: Sequence[Draft], draft_ms: float = 0.0) -> list[Draft]:
        """The part of the drafts that is worth verifying, in the order of ``plan``'s sequences.

        ``draft_ms``: what drafting took.

        Raises:
            ValueError: there are not as many drafts as sequences were planned.
        """
        step = self._step
        if len(drafts) != len(step.states):
            raise ValueError(f"{len(drafts)} drafts for {len(step.states)} planned sequences; plan and trim the same")
        self._learn_draft_cost(draft_ms)
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
        """All sequences of a step pay for one's probe, so all together probe no more often than one alone."""
        return _LONGEST_REST * max(1, len(self._step.states))

    def _chains_of_all(self, sequence_id: int) -> ChainChoice:
        """The choice that a new sequence begins with."""
        shared = self._records.shared(sequence_id, MODEL)
        if shared.chains is None:
            shared.chains = ChainChoice(self._max_draft_tokens)
            promising = [0.75**num_tokens for num_tokens in range(1, self._max_draft_tokens + 1)]
            gains = shared.chains.gains(promising, promising, self._row_costs(), self._draft_costs())
            shared.chains.learn(gains, 1.0)
        return shared.chains

    def _row_costs(self) -> list[float]:
        """[n]: what a draft of n tokens adds to the planned pass, in tokens."""
        step = self._step
        if not step.row_costs:
            usual, price = step.usual_rows, step.price
            passes = self._costs.passes(usual + self._max_draft_tokens)
            step.row_costs = [
                price * (passes[usual + num_tokens] - passes[usual] + step.row_ms * num_tokens)
                for num_tokens in range(self._max_draft_tokens + 1)
            ]
        return step.row_costs

    def _draft_costs(self) -> list[float]:
        """[n]: a sequence's share of n steps of the draft model, if all take part, in tokens."""
        step, num_sequences = self._step, len(self._step.states)
        if not step.draft_costs:
            price = self._draft_cost_scale * step.price / num_sequences
            # A model in between makes the pass longer, too: its weights and the target's take turns in the caches.
            without, with_model = self._lateness_ms
            extra = step.price / num_sequences * max(0.0, with_model - without)
            step.draft_costs = [0.0] + [
                price * self._costs.draft_ms(num_sequences, num_steps) + extra
                for num_steps in range(1, self._max_draft_tokens + 1)
            ]
        return step.draft_costs

    def took(self, step_ms: float) -> None:
        """Learn what the planned step took in all, from before ``plan`` until its tokens were out."""
        step = self._step
        if step.expected_ms <= 0.0 or step.num_rows != len(step.states):  # prompts in it are another matter
            return
        late_ms = min(max(step_ms - step.expected_ms, -_MAX_LATENESS_MS), _MAX_LATENESS_MS)
        kind = step.num_chains > 0
        self._lateness_ms[kind] += _SMOOTHING / 2 * (late_ms - self._lateness_ms[kind])

    def _learn_draft_cost(self, draft_ms: float) -> None:
        """Drafting takes longer than its kernels alone; by how much, steps tell."""
        expected = self._costs.draft_ms(self._step.num_chains, self._step.num_chain_steps)
        if expected > 0.0 and draft_ms > 0.0:
            ratio = min(max(draft_ms / expected, 0.5), _LARGEST_COST_SCALE)
            self._draft_cost_scale += _SMOOTHING / 2 * (ratio - self._draft_cost_scale)

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
        step.expected_ms = fixed_ms + passes[step.num_rows + best_count] + step.row_ms * best_count
        none = len(step.states) / max(1e-9, step.fixed_ms + passes[step.num_rows])
        crowd, gain = step.crowd, best / none
        crowd.gain += _SMOOTHING * (gain - crowd.gain)
        crowd.draft_rows += _SMOOTHING * (best_count / len(step.states) - crowd.draft_rows)
        if step.model_is_used:
            share = _SMOOTHING if crowd.model_gain >= 1.0 else 0.5  # below, this step was a trial
            crowd.model_gain += share * (gain - crowd.model_gain)
            if crowd.model_gain >= 1.0:
                crowd.model_rest.used()
        return best_count

    def _probe(self, drafts: Sequence[Draft], kept: Sequence[list[int]], num_spare_rows: int) -> None:
        """Give the first token of one draft without rows a row, if its source has gone without for long enough."""
        for state, draft, tokens in zip(self._step.states, drafts, kept, strict=True):
            if not draft.token_ids:
                continue
            source = self._records.source(state.sequence_id, draft.source)
            shared = self._records.shared(state.sequence_id, draft.source)
            if tokens:
                source.rest.used()
                shared.rest_length -= shared.rest_length >> 3
            elif num_spare_rows > 0 and state.max_draft_tokens > 0 and source.rest.is_due(self._longest_rest):
                shared.rest_length = max(shared.rest_length, source.rest.length // 2)
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
