"""A chain is what the draft would say if its tokens were known before, one step after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from random_decoder import AWKWARD, DecoderKind
from random_draft import MAX_STEPS, RandomDraft, chain_limits

from outrider.kernels.draft_chain import ComposedDraft
from outrider.kernels.draft_model import ChainLimits, DraftedTokens
from outrider.kernels.operations import Operations, load_operations
from outrider.kernels.race import exponentials
from outrider.verify import random_numbers
from outrider.verify.random_numbers import Purpose

F32 = DecoderKind(**AWKWARD, formats=(("F32",) * 4,) * 2, has_biases=True)
KINDS = {
    "conditioned": dataclasses.replace(F32, is_wide=True),
    "conditioned, one layer": dataclasses.replace(F32, is_wide=True, formats=(("F32",) * 4,), windows=(False,)),
    "conditioned on what is normed": dataclasses.replace(F32, is_wide=True, norm_before_residual=True),
    "windows": dataclasses.replace(F32, windows=(True, False)),
}
OPERATIONS = ["reference", "cpu"]


@pytest.fixture(params=OPERATIONS)
def ops(request: pytest.FixtureRequest) -> Operations:
    return load_operations(request.param, num_threads=2, kv_cache_dtype="f32")


def greedy(num_seqs: int, limit: int = MAX_STEPS, min_survival: float = 0.0) -> ChainLimits:
    return ChainLimits(
        np.full(num_seqs, limit),
        np.full(num_seqs, min_survival),
        np.zeros(num_seqs),
        np.zeros((num_seqs, MAX_STEPS), dtype=np.uint64),
    )


class Chains:
    """A draft and the state from which its chains start."""

    def __init__(self, ops: Operations, kind: str, num_tokens: list[int], has_map: bool = True) -> None:
        self.ops = ops
        self.draft = RandomDraft(KINDS[kind], num_tokens, "F32", has_map=has_map)
        self.model = self.draft.model(ops, is_native=False)
        self.packed = ops.pack_draft(self.model)
        self.pages, self.cache, self.hidden = self.draft.ready(ops, self.model)

    def run(self, limits: ChainLimits) -> DraftedTokens:
        everyone = [*range(len(self.draft.num_tokens))]
        batch, hidden = self.draft.batch(self.pages, everyone), torch.cat(self.hidden)
        return self.ops.draft_chain(self.packed, hidden, batch, *self.draft.angles(everyone), self.cache, limits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_map", [True, False])
def test_a_chain_is_float64s(ops: Operations, kind: str, has_map: bool) -> None:
    chains = Chains(ops, kind, [3, 40, 17], has_map)
    drafted = chains.run(greedy(3))
    assert drafted.counts.tolist() == [MAX_STEPS] * 3
    for sequence in range(3):
        steps = chains.draft.exact_chain(sequence, chains.hidden[sequence], MAX_STEPS)
        for step, (logits, token_id) in enumerate(steps):
            assert drafted.token_ids[sequence, step] == token_id
            confidence = float(logits.softmax(0).max())
            assert drafted.confidences[sequence, step] == pytest.approx(confidence, rel=1e-3)


def test_chains_end_where_they_are_no_longer_worth_it(ops: Operations) -> None:
    num_tokens = [5, 9, 14, 20, 31, 44]
    everything = Chains(ops, "conditioned", num_tokens).run(greedy(6))
    survival = np.cumprod(everything.confidences.astype(np.float64), axis=1)
    assert (everything.counts == MAX_STEPS).all()
    ended = set()
    for least in (0.5, 0.1, 0.01, 1e-9):
        drafted = Chains(ops, "conditioned", num_tokens).run(greedy(6, min_survival=least))
        expected = (survival >= least).sum(axis=1)
        assert drafted.counts.tolist() == expected.tolist()
        ended |= set(expected.tolist())
        for sequence, count in enumerate(expected):
            assert (drafted.token_ids[sequence, :count] == everything.token_ids[sequence, :count]).all()
            assert (drafted.token_ids[sequence, count:] == -1).all()
            assert (drafted.confidences[sequence, count:] == 0).all()
    assert len(ended) > 2, "nothing is shown by chains that all end at once"


@pytest.mark.parametrize("limit", [0, 1, 3, MAX_STEPS])
def test_chains_have_no_more_tokens_than_allowed(ops: Operations, limit: int) -> None:
    drafted = Chains(ops, "windows", [4, 50]).run(greedy(2, limit))
    everything = Chains(ops, "windows", [4, 50]).run(greedy(2))
    assert drafted.counts.tolist() == [limit] * 2
    assert (drafted.token_ids[:, :limit] == everything.token_ids[:, :limit]).all()
    assert (drafted.token_ids[:, limit:] == -1).all()


def test_a_row_that_is_not_sound_ends_its_chain_alone(ops: Operations) -> None:
    chains = Chains(ops, "conditioned", [5, 9, 14])
    expected = Chains(ops, "conditioned", [5, 9, 14]).run(greedy(3))
    chains.hidden[1][0, 7] = torch.nan
    drafted = chains.run(greedy(3))
    assert drafted.counts.tolist() == [MAX_STEPS, 0, MAX_STEPS]
    assert (drafted.token_ids[[0, 2]] == expected.token_ids[[0, 2]]).all()
    assert (drafted.token_ids[1] == -1).all()


@pytest.mark.parametrize("has_map", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_at_a_temperature_a_token_wins_the_targets_race(ops: Operations, has_map: bool, temperature: float) -> None:
    num_seqs = 40
    chains = Chains(ops, "conditioned", [6] * num_seqs, has_map)
    draws = [random_numbers.draw(seed, 6, Purpose.TARGET) for seed in range(num_seqs)]
    limits = ChainLimits(
        np.ones(num_seqs, dtype=np.int64),
        np.zeros(num_seqs),
        np.full(num_seqs, temperature),
        np.array(draws, dtype=np.uint64)[:, None],
    )
    chains.draft.angles = lambda _: (torch.zeros(num_seqs, 1, 6),) * 2  # one step is asked for
    drafted = chains.run(limits)
    for seed in range(num_seqs):
        logits, _ = next(chains.draft.exact_chain(seed, chains.hidden[seed], 1))
        probs = (logits / temperature).softmax(0)
        token_map = chains.draft.token_map
        token_ids = np.arange(len(probs)) if token_map is None else token_map.numpy()
        times = random_numbers.exponentials(seed, 6, Purpose.TARGET, token_ids) / probs.numpy()
        winner = int(times.argmin())
        assert drafted.token_ids[seed, 0] == token_ids[winner]
        assert drafted.confidences[seed, 0] == pytest.approx(float(probs[winner]), rel=1e-4)
    assert len(set(drafted.token_ids[:, 0])) > 3


def test_the_numbers_of_a_race_are_the_targets_own() -> None:
    token_ids = np.array([0, 1, 77, 49151])
    draw = random_numbers.draw(12, 34, Purpose.TARGET)
    expected = random_numbers.exponentials(12, 34, Purpose.TARGET, token_ids)
    assert exponentials(draw, token_ids).tolist() == expected.tolist()


def test_a_chain_is_the_same_alone_and_in_company(ops: Operations) -> None:
    num_tokens = [3, 40, 17, 1, 5, 60]
    limits = chain_limits(6)
    chains = Chains(ops, "conditioned", num_tokens)
    together = chains.run(limits)
    for sequence in range(6):
        apart = Chains(ops, "conditioned", num_tokens)
        only = dataclasses.replace(limits, limits=np.where(np.arange(6) == sequence, limits.limits, 0))
        drafted = apart.run(only)
        assert drafted.token_ids[sequence].tolist() == together.token_ids[sequence].tolist()
        assert drafted.confidences[sequence].tolist() == together.confidences[sequence].tolist()
        slots = apart.pages.slots(sequence, 0, num_tokens[sequence] + int(max(limits.limits[sequence] - 1, 0)))
        mine, theirs = (cache.flatten(2, 3)[:, :, slots] for cache in (apart.cache, chains.cache))
        if isinstance(apart.packed, ComposedDraft):  # whose cache keeps a token's numbers side by side
            assert torch.equal(mine, theirs)


def test_what_does_not_fit_is_refused(ops: Operations) -> None:
    chains = Chains(ops, "conditioned", [5, 12])
    with pytest.raises(ValueError, match="a chain may have 8 tokens, and there is room for 7"):
        chains.run(greedy(2, MAX_STEPS + 1))
    chains.pages.page_tables[1, 1] = 0
    with pytest.raises(ValueError, match="would write into the null page: reserve its pages first"):
        chains.run(greedy(2))
    chains.pages.page_tables = chains.pages.page_tables[:, :1]
    with pytest.raises(ValueError, match="a chain needs 18 positions, and its page table has 16"):
        chains.run(greedy(2))
