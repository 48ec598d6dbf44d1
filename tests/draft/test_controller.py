"""The controller in simulated worlds, against every fixed length, and against brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from draft_world import AHEAD, COSTS, Plan, Text, World, pass_ms, rate_of_controller, rate_of_fixed_length

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.controller import DraftController, DraftState
from outrider.draft.controller_costs import DraftCosts

NUM_TOKENS = 4000


def rates(plan: Plan, source: str, num_sequences: int = 1) -> tuple[float, list[float]]:
    """Tokens per millisecond: the controller's, and those of every fixed length from 0."""
    world = World([plan] * num_sequences, NUM_TOKENS * 3 // (2 * num_sequences) + 200, seed=1)
    fixed = [rate_of_fixed_length(world, source, length, NUM_TOKENS) for length in range(AHEAD + 1)]
    return rate_of_controller(world, source, NUM_TOKENS), fixed


@pytest.mark.parametrize("source", ["model", "suffix"])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.7, 0.95])
def test_in_a_steady_world_it_is_within_3_percent_of_the_best_fixed_length(rate: float, source: str) -> None:
    mine, fixed = rates(lambda _: Text(rate, spread=0.1), source)
    assert mine >= 0.97 * max(fixed)


@pytest.mark.parametrize("source", ["model", "suffix"])
def test_where_guesses_differ_it_beats_every_fixed_length(source: str) -> None:
    mine, fixed = rates(lambda position: Text(0.9 if position // 40 % 2 else 0.2, spread=0.3), source)
    assert mine > max(fixed)


@pytest.mark.parametrize("source", ["model", "suffix"])
def test_where_the_text_turns_it_beats_every_fixed_length(source: str) -> None:
    mine, fixed = rates(lambda position: Text(0.95, 0.3) if position // 300 % 2 else Text(0.05, 0.1), source)
    assert mine > max(fixed)


@pytest.mark.parametrize("source", ["model", "suffix"])
@pytest.mark.parametrize("rate", [0.05, 0.6])
def test_eight_sequences_lose_next_to_nothing_where_no_draft_pays(rate: float, source: str) -> None:
    mine, fixed = rates(lambda _: Text(rate, spread=0.1), source, num_sequences=8)
    assert max(fixed) == fixed[0]
    assert mine >= 0.98 * fixed[0]


def test_eight_sequences_with_sure_and_hopeless_guesses_beat_every_fixed_length() -> None:
    mine, fixed = rates(lambda _: Text(0.7, spread=0.8), "suffix", num_sequences=8)
    assert mine > 1.03 * max(fixed)


def plan(controller: DraftController, num_sequences: int, max_draft_rows: int | None = None) -> None:
    controller.plan([DraftState(index, AHEAD) for index in range(num_sequences)], max_draft_rows=max_draft_rows)


def chain(*confidences: float, source: str = "suffix") -> Draft:
    return Draft(tuple(range(len(confidences))), None, confidences, source)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_of_beginnings_promises_more_tokens_per_millisecond(seed: int) -> None:
    rng = random.Random(seed)
    num_sequences, longest, max_rows = rng.randint(1, 4), 4, rng.choice([2, 5, 100])
    controller = DraftController(COSTS, AHEAD)
    plan(controller, num_sequences, max_rows)
    drafts = [chain(*(rng.random() for _ in range(rng.randint(0, longest)))) for _ in range(num_sequences)]
    survivals = [controller.survivals(index, draft) for index, draft in enumerate(drafts)]

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = num_sequences + sum(sum(survivals[index][:length]) for index, length in enumerate(lengths))
        return tokens / (COSTS.step_overhead_ms + 1.5 + pass_ms(num_sequences + sum(lengths)))

    choices = [
        lengths
        for lengths in itertools.product(*(range(len(draft.token_ids) + 1) for draft in drafts))
        if sum(lengths) <= max_rows
    ]
    trimmed = controller.trim(drafts, draft_ms=1.5)
    lengths = tuple(len(draft.token_ids) for draft in trimmed)
    for draft, whole, length in zip(trimmed, drafts, lengths, strict=True):
        assert draft.token_ids == whole.token_ids[:length]
    assert lengths in choices
    best = max(map(rate, choices))
    probed = rate(lengths) < best - 1e-12  # at most one sequence without rows is given one, to learn
    assert rate(lengths) == pytest.approx(best, rel=1e-12) or (probed and lengths.count(1) >= 1)


@pytest.mark.parametrize("seed", range(10))
def test_of_a_tree_no_other_part_promises_more(seed: int) -> None:
    rng = random.Random(seed)
    parents = (-1, -1, 0, 0, 2, 1, 4)
    draft = Draft(tuple(range(10, 17)), None, tuple(rng.uniform(0.1, 0.95) for _ in parents), "model", parents)
    controller = DraftController(COSTS, AHEAD)
    plan(controller, 1)
    survivals = controller.survivals(0, draft)

    def rate(nodes: tuple[int, ...]) -> float:
        return (1 + sum(survivals[node] for node in nodes)) / (COSTS.step_overhead_ms + pass_ms(1 + len(nodes)))

    parts = [
        nodes
        for size in range(len(parents) + 1)
        for nodes in itertools.combinations(range(len(parents)), size)
        if all(parents[node] == -1 or parents[node] in nodes for node in nodes)
    ]
    (trimmed,) = controller.trim([draft])
    nodes = tuple(token_id - 10 for token_id in trimmed.token_ids)
    assert rate(nodes) == pytest.approx(max(map(rate, parts)), rel=1e-12)
    for node, parent in zip(nodes, trimmed.parents, strict=True):
        assert (nodes[parent] if parent >= 0 else -1) == parents[node]


def test_lengths_follow_a_change_within_a_few_steps() -> None:
    controller = DraftController(COSTS, AHEAD)
    draft = chain(*[0.8] * AHEAD)

    def step(num_right: int) -> int:
        plan(controller, 1)
        (trimmed,) = controller.trim([draft])
        length = len(trimmed.token_ids)
        controller.record(0, trimmed, min(num_right, length))
        return length

    for _ in range(40):
        step(AHEAD)
    assert step(AHEAD) >= 7  # code
    for _ in range(6):
        step(0)
    assert step(0) <= 3  # prose; three rows more cost this machine nothing
    for _ in range(30):
        step(0)
    for _ in range(6):
        step(AHEAD)
    assert step(AHEAD) >= 5  # code again


EXPENSIVE = DraftCosts(lambda num_rows: 4.0 * num_rows, step_overhead_ms=0.1)


def test_where_rows_never_pay_there_are_none_but_for_probes_ever_further_apart() -> None:
    controller = DraftController(EXPENSIVE, AHEAD)
    probes = []
    for step in range(200):
        plan(controller, 1)
        (trimmed,) = controller.trim([chain(0.5, 0.5)])
        assert len(trimmed.token_ids) <= 1
        if trimmed.token_ids:
            probes.append(step)
            controller.record(0, trimmed, 0)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps[:5] == [3, 5, 9, 17, 17]
    assert set(gaps[5:]) == {17}


def test_probes_find_the_way_back() -> None:
    # Rows are so cheap that one right guess in two pays; and at first none comes true.
    controller = DraftController(DraftCosts(lambda num_rows: 4.0 + 1.6 * num_rows), AHEAD)

    def step(is_right: bool) -> int:
        plan(controller, 1)
        (trimmed,) = controller.trim([chain(0.7, 0.7, 0.7)])
        controller.record(0, trimmed, len(trimmed.token_ids) if is_right else 0)
        return len(trimmed.token_ids)

    lengths = [step(False) for _ in range(120)]
    assert sum(lengths[-40:]) <= 5
    lengths = [step(True) for _ in range(60)]
    assert min(lengths[-20:]) >= 1


def test_what_stands_after_a_wrong_token_teaches_nothing() -> None:
    whole, tried = DraftController(COSTS, AHEAD), DraftController(COSTS, AHEAD)
    draft = chain(0.9, 0.8, 0.7, 0.6, 0.5)
    for _ in range(50):
        for controller in (whole, tried):
            plan(controller, 1)
        whole.record(0, draft, 1)
        tried.record(0, chain(0.9, 0.8), 1)
    assert whole.survivals(0, draft) == tried.survivals(0, draft)


def test_a_draft_model_that_is_never_right_is_hardly_ever_asked() -> None:
    controller = DraftController(COSTS, AHEAD)
    asked = []
    for step in range(300):
        plan(controller, 1)
        limit = controller.ask_model(0, 0.0)
        draft = NO_DRAFT
        if limit.limit:
            asked.append(step)
            draft = chain(*[0.3] * limit.limit, source="model")
            controller.model_guessed(0, draft, limit)
        (trimmed,) = controller.trim([draft])
        controller.record(0, trimmed, 0)
    assert 3 <= sum(step >= 150 for step in asked) <= 15


def test_budgets_and_limits_are_kept() -> None:
    controller = DraftController(COSTS, max_draft_tokens=6)
    limits = controller.plan([DraftState(1, 10), DraftState(2, 3), DraftState(3, 0)], max_draft_rows=4)
    assert [limit.limit for limit in limits] == [4, 3, 0]
    trimmed = controller.trim([chain(*[0.99] * 8) for _ in range(3)])
    assert sum(len(draft.token_ids) for draft in trimmed) <= 4
    assert len(trimmed[1].token_ids) <= 3
    assert trimmed[2] == NO_DRAFT


def test_odd_drafts_do_no_harm() -> None:
    controller = DraftController(COSTS, AHEAD)
    odd = [
        NO_DRAFT,
        Draft((1, 2, 3)),
        Draft((1, 2), None, (0.5,), "suffix"),
        chain(math.nan, math.inf, -1.0),
        Draft((1,), None, (0.5,), "a source nobody knows"),
    ]
    for _ in range(20):
        plan(controller, len(odd))
        trimmed = controller.trim(odd)
        for index, (draft, whole) in enumerate(zip(trimmed, odd, strict=True)):
            assert draft.token_ids == whole.token_ids[: len(draft.token_ids)]
            controller.record(index, draft, 0)
    assert controller.plan([]) == []
    assert controller.trim([]) == []
    with pytest.raises(ValueError, match="1 drafts for 0 planned sequences"):
        controller.trim([NO_DRAFT])


def test_without_measured_costs_it_still_drafts() -> None:
    controller = DraftController()
    plan(controller, 1)
    assert len(controller.trim([chain(*[0.9] * 4)])[0].token_ids) == 4


def test_released_sequences_are_forgotten() -> None:
    controller = DraftController(COSTS, AHEAD)
    for sequence_id in range(1000):
        controller.begin(sequence_id, sampled=sequence_id % 2 == 0)
        controller.plan([DraftState(sequence_id, AHEAD)])
        (trimmed,) = controller.trim([chain(0.9, 0.9)])
        controller.record(sequence_id, trimmed, 1)
        controller.release(sequence_id)
    assert controller.num_followed == 0
    controller.release(5)  # harmless


@pytest.mark.parametrize(("draft_ms", "late_ms"), [(4.0, 0.0), (0.4, 4.0)], ids=["drafting", "the pass after it"])
def test_a_model_that_takes_longer_than_its_costs_said_is_asked_less(draft_ms: float, late_ms: float) -> None:
    def num_asked(draft_ms: float, late_ms: float) -> int:
        """Of the last 100 of 200 steps, those that asked a model whose first guess comes true every second time."""
        controller = DraftController(DraftCosts(pass_ms=lambda rows: 5.0, draft_ms=lambda seqs, steps: 0.2 * steps), 2)
        asked = []
        for step in range(200):
            controller.plan([DraftState(1, 2)])
            limit = controller.ask_model(1, 0.0)
            draft = Draft((7, 8)[: limit.limit], confidences=(0.5, 0.4)[: limit.limit], source="model")
            if limit.limit:
                controller.model_guessed(1, draft, limit)
            kept = controller.trim([draft], draft_ms if limit.limit else 0.0)[0]
            controller.record(1, kept, min(step % 2, len(kept.token_ids)))
            controller.took(5.0 + (draft_ms + late_ms if limit.limit else 0.0))
            asked.append(limit.limit > 0)
        return sum(asked[100:])

    assert num_asked(0.4, 0.0) > 90  # as expected: it pays
    assert num_asked(draft_ms, late_ms) < 30
