"""The sampler on drafts that are drawn, or that are trees, with everything a request can ask for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chance import FALSE_ALARM, chi_square_p_value
from torch import Tensor

from outrider.kernels.operations import load_operations
from outrider.verify.acceptance import choose_by_rejection, sample
from outrider.verify.block import verify_block
from outrider.verify.distribution import TokenDistribution, target_distribution
from outrider.verify.logits import LogitsProcessor
from outrider.verify.random_numbers import Purpose
from outrider.verify.sampler import Sampler, Verdict, VerifyRequest
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.typical import threshold

VOCAB_SIZE = 12
EOS = (0, 1)
PROMPT = (3, 5, 5, 8)

PARAMS: dict[str, SamplingParams] = {
    "plain": SamplingParams(max_tokens=64),
    "temperature": SamplingParams(max_tokens=64, temperature=0.5),
    "top_k": SamplingParams(max_tokens=64, top_k=4),
    "top_p": SamplingParams(max_tokens=64, top_p=0.7),
    "min_p": SamplingParams(max_tokens=64, min_p=0.1),
    "repetition": SamplingParams(max_tokens=64, repetition_penalty=1.5),
    "presence and frequency": SamplingParams(max_tokens=64, presence_penalty=1.5, frequency_penalty=1.0),
    "logit_bias": SamplingParams(max_tokens=64, logit_bias={7: 3.0, 2: -100.0}),
    "min_tokens": SamplingParams(max_tokens=64, min_tokens=5, stop_token_ids=(4,), logit_bias={0: 2.0, 4: 2.0}),
    "all together": SamplingParams(
        max_tokens=64, temperature=0.9, min_tokens=5, top_k=9, top_p=0.95, min_p=0.01, stop_token_ids=(4,),
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={7: 2.0, 0: 3.0},
    ),
}  # fmt: skip
GREEDY: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=64, temperature=0.0),
    "greedy with penalties": SamplingParams(max_tokens=64, temperature=0.0, min_tokens=5, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_operations("reference"))


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed})


def model_logits(history: Sequence[int]) -> Tensor:
    """A model in miniature: logits ``[VOCAB_SIZE]`` that any change of the history changes."""
    return torch.from_numpy(np.random.default_rng([len(history), *history]).normal(scale=1.5, size=VOCAB_SIZE)).float()


def paths_of(token_ids: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each row, the drafted tokens that lead to it."""
    paths: list[tuple[int, ...]] = [()]
    for index, token_id in enumerate(token_ids):
        parent = parents[index] if parents else index - 1
        paths.append((*paths[parent + 1], token_id))
    return paths


def rows(output: Sequence[int], token_ids: Sequence[int], parents: Sequence[int] = ()) -> Tensor:
    return torch.stack([model_logits([*PROMPT, *output, *path]) for path in paths_of(token_ids, parents)])


def undrafted(sampler: Sampler, params: SamplingParams, length: int) -> list[int]:
    output: list[int] = []
    while len(output) < length:
        [verdict] = sampler.verify(rows(output, ()), [VerifyRequest(params, PROMPT, output, eos_token_ids=EOS)])
        output.extend(verdict.token_ids)
    return output


def random_tree(random: np.random.Generator, answer: Sequence[int], num_right: int) -> tuple[list[int], list[int]]:
    """A tree of distinct siblings in which the first ``num_right`` tokens of ``answer`` lie somewhere."""
    token_ids, parents, right_parent = list[int](), list[int](), -1
    taken: set[tuple[int, int]] = {(-1, answer[0])}  # children that may not be drafted by chance
    for depth in range(num_right + 1):
        for _ in range(int(random.integers(0, 4))):
            parent = int(random.integers(-1, len(token_ids)))
            token_id = int(random.integers(VOCAB_SIZE))
            if (parent, token_id) not in taken:
                taken.add((parent, token_id))
                token_ids.append(token_id)
                parents.append(parent)
        if depth < num_right:
            token_ids.append(answer[depth])
            parents.append(right_parent)
            right_parent = len(token_ids) - 1
            taken.add((right_parent, answer[depth + 1]))
    return token_ids, parents


@pytest.mark.parametrize("name", [*PARAMS, *GREEDY])
def test_the_text_is_the_same_with_every_tree(sampler: Sampler, name: str) -> None:
    random = np.random.default_rng(1)
    for seed in range(6):
        params = seeded((PARAMS | GREEDY)[name], seed)
        answer = undrafted(sampler, params, 6)
        for num_right in range(5):
            token_ids, parents = random_tree(random, answer, num_right)
            request = VerifyRequest(
                params, PROMPT, (), tuple(token_ids), eos_token_ids=EOS, draft_parents=tuple(parents)
            )
            [verdict] = sampler.verify(rows((), token_ids, parents), [request])
            assert verdict.token_ids == tuple(answer[: num_right + 1])
            assert verdict.num_accepted == num_right == len(verdict.accepted_rows)
            assert [token_ids[index] for index in verdict.accepted_rows] == answer[:num_right]
            for parent, index in zip((-1, *verdict.accepted_rows), verdict.accepted_rows, strict=False):
                assert parents[index] == parent


def test_the_accepted_rows_of_a_chain_are_its_first() -> None:
    assert Verdict((5, 6, 7), 2).accepted_rows == (0, 1)
    assert Verdict((5,), 0).accepted_rows == ()
    assert Verdict((5, 6, 7), 2, path=(1, 4)).accepted_rows == (1, 4)


@pytest.mark.parametrize("name", ["plain", "all together", "greedy"])
def test_logprobs_of_a_tree_are_those_of_its_accepted_rows(sampler: Sampler, name: str) -> None:
    base = (PARAMS | GREEDY)[name]
    answer = undrafted(sampler, base, 4)
    others = [token_id for token_id in range(VOCAB_SIZE) if token_id != answer[0]][:2]
    token_ids, parents = (others[0], answer[0], others[1], answer[1]), (-1, -1, -1, 1)
    params = SamplingParams(**{field: getattr(base, field) for field in base.__slots__} | {"logprobs": 2})
    request = VerifyRequest(params, PROMPT, (), token_ids, eos_token_ids=EOS, draft_parents=parents)
    [verdict] = sampler.verify(rows((), token_ids, parents), [request])
    assert verdict.accepted_rows == (1, 3)
    for index, entry in enumerate(verdict.logprobs):
        expected = model_logits([*PROMPT, *answer[:index]]).double().log_softmax(0)[answer[index]].item()
        assert entry.token_id == answer[index]
        assert entry.logprob == pytest.approx(expected, abs=1e-5)


def test_an_unusable_row_of_a_tree_matters_only_on_the_path(sampler: Sampler) -> None:
    for params in (PARAMS["plain"], PARAMS["top_k"], GREEDY["greedy"]):
        answer = undrafted(sampler, params, 3)
        wrong = (answer[0] + 1) % VOCAB_SIZE
        token_ids, parents = (wrong, answer[0], wrong), (-1, -1, 0)
        request = VerifyRequest(params, PROMPT, (), token_ids, eos_token_ids=EOS, draft_parents=parents)
        logits = rows((), token_ids, parents)
        logits[[1, 3]] = torch.nan
        assert sampler.verify(logits, [request]) == [Verdict((answer[0], answer[1]), 1, path=(1,))]
        logits[2] = torch.nan
        [verdict] = sampler.verify(logits, [request])
        assert (verdict.token_ids, verdict.accepted_rows) == ((answer[0],), (1,))
        assert verdict.error is not None and f"position {len(PROMPT) + 1} " in verdict.error


def targets_along(params: SamplingParams, drafted: Sequence[int]) -> list[TokenDistribution]:
    """What each row's token is drawn from, every row processed from scratch after its own history."""
    targets = []
    for length in range(len(drafted) + 1):
        logits = model_logits([*PROMPT, *drafted[:length]]).double().numpy()
        LogitsProcessor(params, PROMPT, drafted[:length], EOS).process(logits)
        targets.append(target_distribution(logits, params))
    return targets


def random_draft(seed: int, length: int) -> tuple[tuple[int, ...], npt.NDArray[np.float64]]:
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.full(VOCAB_SIZE, 0.6), size=length).astype(np.float32).astype(np.float64)
    return tuple(int(random.choice(VOCAB_SIZE, p=row / row.sum())) for row in probs), probs


@pytest.mark.parametrize("name", PARAMS)
def test_a_block_is_verified_against_what_each_row_would_be_drawn_from(sampler: Sampler, name: str) -> None:
    num_kept_of = []
    for seed in range(150):
        params = seeded(PARAMS[name], seed)
        drafted, probs = random_draft(seed, 3)
        targets = targets_along(params, drafted)
        num_kept, recovered_id = verify_block(targets[:3], drafted, probs, seed, len(PROMPT))
        if recovered_id is None:
            recovered_id = sample(targets[3], seed, len(PROMPT) + 3, Purpose.TARGET)
        request = VerifyRequest(params, PROMPT, (), drafted, torch.from_numpy(probs), EOS)
        assert sampler.verify(rows((), drafted), [request]) == [Verdict((*drafted[:num_kept], recovered_id), num_kept)]
        num_kept_of.append(num_kept)
    assert len(set(num_kept_of)) >= 3, "drafts of which more and less is kept"


@pytest.mark.parametrize("name", PARAMS)
def test_standard_verification_goes_token_by_token(name: str) -> None:
    sampler = Sampler(load_operations("reference"), "standard")
    for seed in range(100):
        params = seeded(PARAMS[name], seed)
        drafted, probs = random_draft(seed, 3)
        targets = targets_along(params, drafted)
        expected: list[int] = []
        for index, target in enumerate(targets):
            candidates = drafted[index : index + 1]
            choice = choose_by_rejection(target, candidates, probs[index : index + 1], seed, len(PROMPT) + index)
            expected.append(choice.token_id)
            if not choice.accepted:
                break
        request = VerifyRequest(params, PROMPT, (), drafted, torch.from_numpy(probs), EOS)
        assert sampler.verify(rows((), drafted), [request]) == [Verdict(tuple(expected), len(expected) - 1)]


def test_a_block_ends_before_what_cannot_be_judged(sampler: Sampler) -> None:
    for seed in range(60):
        params = seeded(PARAMS["plain"], seed)
        drafted, probs = random_draft(seed, 3)
        first, first_probs = drafted[:1], torch.from_numpy(probs[:1])
        [alone] = sampler.verify(rows((), first), [VerifyRequest(params, PROMPT, (), first, first_probs, EOS)])
        unusable = rows((), drafted)
        unusable[1:] = torch.nan
        [verdict] = sampler.verify(unusable, [VerifyRequest(params, PROMPT, (), drafted, torch.from_numpy(probs), EOS)])
        assert verdict.num_accepted == alone.num_accepted
        assert (verdict.error is None) == (alone.num_accepted == 0)
        broken = probs.copy()
        broken[1] = np.nan
        request = VerifyRequest(params, PROMPT, (), drafted, torch.from_numpy(broken), EOS)
        [verdict] = sampler.verify(rows((), drafted), [request])
        assert verdict.token_ids[: len(alone.token_ids)] == alone.token_ids


def test_pairs_of_a_drawn_tree_follow_the_model(sampler: Sampler) -> None:
    # Two siblings, drawn without replacement, and one token behind each; a penalty makes rows differ by path.
    logits = torch.tensor([[0.4, -0.3, 0.9], [1.0, 0.2, -0.5], [-0.2, 0.8, 0.1]])
    sibling_probs, next_probs = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    params = SamplingParams(max_tokens=9, temperature=0.8, frequency_penalty=0.7)
    count = 10_000
    numbers = np.random.default_rng(0)
    requests, all_rows = [], []
    for seed in range(count):
        siblings = numbers.choice(3, size=2, replace=False, p=sibling_probs).tolist()
        left = np.where(np.arange(3) == siblings[0], 0.0, sibling_probs)
        behind = numbers.choice(3, size=2, p=next_probs).tolist()
        probs = np.array([sibling_probs, left / left.sum(), next_probs, next_probs])
        token_ids = (*siblings, *behind)
        requests.append(
            VerifyRequest(seeded(params, seed), (2,), (), token_ids, torch.from_numpy(probs), (), (-1, -1, 0, 1))
        )
        all_rows.append(logits[[2, *token_ids]])
    verdicts = sampler.verify(torch.cat(all_rows), requests)
    first = (logits[2].double() / 0.8).softmax(0).numpy()
    assert chi_square_p_value([verdict.token_ids[0] for verdict in verdicts], first) > FALSE_ALARM
    penalised = ((logits.double() - 0.7 * torch.eye(3)) / 0.8).softmax(1).numpy()
    for token_id in range(3):  # the second token, where the first was drafted
        seconds = [v.token_ids[1] for v in verdicts if len(v.token_ids) > 1 and v.token_ids[0] == token_id]
        assert len(seconds) > 500
        assert chi_square_p_value(seconds, penalised[token_id]) > FALSE_ALARM


def typical_outcomes(temperature: float, count: int = 400) -> list[tuple[Verdict, Verdict, tuple[int, ...]]]:
    lossless, lossy = (Sampler(load_operations("reference"), acceptance=name) for name in ("lossless", "typical_lossy"))
    outcomes = []
    for seed in range(count):
        params = SamplingParams(max_tokens=9, seed=seed, temperature=temperature)
        drafted = tuple(np.random.default_rng(seed).integers(VOCAB_SIZE, size=3).tolist())
        request = VerifyRequest(params, PROMPT, (), drafted)
        [exact], [typical] = (each.verify(rows((), drafted), [request]) for each in (lossless, lossy))
        outcomes.append((exact, typical, drafted))
    return outcomes


def test_typical_acceptance_keeps_what_is_likely_enough_and_is_lossy() -> None:
    texts, num_exact, num_typical = [], 0, 0
    for seed, (exact, typical, drafted) in enumerate(typical_outcomes(1.0)):
        num_exact += exact.num_accepted
        num_typical += typical.num_accepted
        assert typical.num_accepted >= exact.num_accepted
        for index in range(typical.num_accepted):
            probs = model_logits([*PROMPT, *drafted[:index]]).double().softmax(0).numpy()
            bound = min(0.09, 0.3 * np.exp((probs * np.log(probs)).sum()))
            own = sample(TokenDistribution(np.arange(VOCAB_SIZE), probs), seed, len(PROMPT) + index, Purpose.TARGET)
            assert probs[drafted[index]] > bound or drafted[index] == own
        texts.append(typical.token_ids[0])
    assert num_typical > 1.5 * num_exact
    many = np.array([typical.token_ids[0] for _, typical, _ in typical_outcomes(1.0, 1_500)])
    probs = model_logits(PROMPT).double().softmax(0).numpy()
    groups = np.array([probs > threshold(TokenDistribution(np.arange(VOCAB_SIZE), probs))]).astype(np.int64)[0]
    assert chi_square_p_value(groups[many], np.bincount(groups, probs)) < 1e-3, "it says more of what is likely"


def test_typical_acceptance_leaves_greedy_requests_and_undrafted_tokens_alone() -> None:
    assert all(exact == typical for exact, typical, _ in typical_outcomes(0.0, 50))
    lossless, lossy = (Sampler(load_operations("reference"), acceptance=name) for name in ("lossless", "typical_lossy"))
    for seed in range(50):
        request = VerifyRequest(SamplingParams(max_tokens=9, seed=seed), PROMPT, ())
        assert lossy.verify(rows((), ()), [request]) == lossless.verify(rows((), ()), [request])


@pytest.mark.parametrize("probs", [[1.0], [0.5, 0.5], [0.7, 0.1, 0.1, 0.1], [0.01] * 100], ids=str)
def test_the_typical_threshold_falls_with_entropy(probs: list[float]) -> None:
    entropy = torch.distributions.Categorical(torch.tensor(probs, dtype=torch.float64)).entropy().item()
    got = threshold(TokenDistribution(np.arange(len(probs)), np.array(probs)))
    assert got == pytest.approx(min(0.09, 0.3 * np.exp(-entropy)), rel=1e-9)
