from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chance import FALSE_ALARM, chi_square_p_value
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from outrider.kernels.operations import load_operations
from outrider.verify.random_numbers import Purpose, uniform
from outrider.verify.sampler import RejectionSampleMethod, Sampler, Verdict, VerifyRequest
from outrider.verify.sampling_params import SamplingParams

VOCAB_SIZE = 24
EOS = (0, 1)
PROMPT = (3, 5, 5, 8)
NUM_TOKENS = 20

Drafter = Callable[[Sequence[int], int], tuple[int, ...]]  # (output so far, how many) -> guesses

EVERY_PARAMETER: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=64, temperature=0.0),
    "plain": SamplingParams(max_tokens=64),
    "seed": SamplingParams(max_tokens=64, seed=2**64 - 1),
    "temperature": SamplingParams(max_tokens=64, temperature=0.5),
    "top_k": SamplingParams(max_tokens=64, top_k=4),
    "top_p": SamplingParams(max_tokens=64, top_p=0.7),
    "min_p": SamplingParams(max_tokens=64, min_p=0.1),
    "repetition": SamplingParams(max_tokens=64, repetition_penalty=1.5),
    "presence": SamplingParams(max_tokens=64, presence_penalty=1.5),
    "frequency": SamplingParams(max_tokens=64, frequency_penalty=1.0),
    "logit_bias": SamplingParams(max_tokens=64, logit_bias={7: 3.0, 2: -100.0}),
    "min_tokens": SamplingParams(max_tokens=64, min_tokens=9, stop_token_ids=(4,), logit_bias={0: 2.0, 4: 2.0}),
    "greedy with all that changes logits": SamplingParams(
        max_tokens=64,
        temperature=0.0,
        min_tokens=9,
        stop_token_ids=(4,),
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={7: 2.0, 0: 3.0},
    ),
    "all together": SamplingParams(
        max_tokens=64,
        temperature=0.9,
        min_tokens=9,
        top_k=12,
        top_p=0.9,
        min_p=0.01,
        seed=77,
        stop_token_ids=(4,),
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={7: 2.0, 0: 3.0},
    ),
}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_operations("reference"))


def model_logits(history: Sequence[int]) -> Tensor:
    """A model in miniature: logits ``[VOCAB_SIZE]`` that any change of the history changes."""
    return torch.from_numpy(np.random.default_rng([len(history), *history]).normal(scale=2.0, size=VOCAB_SIZE)).float()


def model_pass(output: Sequence[int], draft: Sequence[int], prompt: Sequence[int] = PROMPT) -> Tensor:
    """The rows of one sequence. A guess that is no token changes the rows after it anyhow."""
    history = [*prompt, *output]
    drafted = [token_id % VOCAB_SIZE for token_id in draft]
    return torch.stack([model_logits([*history, *drafted[:i]]) for i in range(len(draft) + 1)])


def generate(sampler: Sampler, params: SamplingParams, drafter: Drafter, num_draft_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        draft = drafter(output, num_draft_tokens)
        request = VerifyRequest(params, PROMPT, output, draft, eos_token_ids=EOS)
        [verdict] = sampler.verify(model_pass(output, draft), [request])
        assert verdict.error is None
        assert len(verdict.token_ids) == verdict.num_accepted + 1
        assert verdict.token_ids[:-1] == draft[: verdict.num_accepted]
        output.extend(verdict.token_ids)
    return output[:NUM_TOKENS]


def no_draft(output: Sequence[int], num_draft_tokens: int) -> tuple[int, ...]:
    return ()


def drafters_around(answer: Sequence[int]) -> dict[str, Drafter]:
    """Guessers that know ``answer``, and guess right, wrong, partly right, at random, or no tokens at all."""

    def right(output: Sequence[int], count: int) -> tuple[int, ...]:
        return (*answer[len(output) : len(output) + count],)

    def wrong(output: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple((token_id + 1) % VOCAB_SIZE for token_id in right(output, count))

    def partly_right(output: Sequence[int], count: int) -> tuple[int, ...]:
        cut = len(output) % (count + 1)
        return right(output, count)[:cut] + wrong(output, count)[cut:]

    def random(output: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(len(output)).integers(VOCAB_SIZE, size=count).tolist())

    def invalid(output: Sequence[int], count: int) -> tuple[int, ...]:
        return right(output, count)[:1] + (-1, VOCAB_SIZE, 10**9, -VOCAB_SIZE)[: count - 1]

    return {"right": right, "wrong": wrong, "partly right": partly_right, "random": random, "invalid": invalid}


@pytest.mark.parametrize("name", EVERY_PARAMETER)
def test_the_text_is_the_same_with_every_draft_of_every_length(sampler: Sampler, name: str) -> None:
    params = EVERY_PARAMETER[name]
    answer = generate(sampler, params, no_draft, 0)
    for kind, drafter in drafters_around(answer).items():
        for num_draft_tokens in range(1, 9):
            text = generate(sampler, params, drafter, num_draft_tokens)
            assert text == answer, f"{kind} drafts of {num_draft_tokens}"


def test_other_seeds_give_other_texts(sampler: Sampler) -> None:
    texts = [generate(sampler, SamplingParams(max_tokens=64, seed=seed), no_draft, 0) for seed in range(5)]
    assert len(set(map(tuple, texts))) == 5


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_greedy_text_is_what_transformers_processors_make_of_the_same_logits(
    sampler: Sampler, num_draft_tokens: int
) -> None:
    params = SamplingParams(
        max_tokens=64,
        temperature=0.0,
        min_tokens=9,
        repetition_penalty=1.3,
        logit_bias={7: 2.0, 0: 3.0},
    )
    oracle = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in params.logit_bias.items()]),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(EOS), device="cpu"),
        ]
    )
    history = list(PROMPT)
    for _ in range(NUM_TOKENS):
        scores = oracle(torch.tensor([history]), model_logits(history)[None])
        history.append(int(scores.argmax()))
    answer = history[len(PROMPT) :]
    assert not set(EOS).isdisjoint(answer), "a text on which the ban makes a difference"
    assert generate(sampler, params, drafters_around(answer)["partly right"], num_draft_tokens) == answer


@pytest.mark.parametrize("name", EVERY_PARAMETER)
@pytest.mark.parametrize("num_right", range(6))
def test_as_many_drafted_tokens_are_accepted_as_are_right_before_the_first_wrong(
    sampler: Sampler, name: str, num_right: int
) -> None:
    params = EVERY_PARAMETER[name]
    answer = generate(sampler, params, no_draft, 0)
    wrong = (answer[num_right] + 1) % VOCAB_SIZE
    draft = (*answer[:num_right], wrong, *answer[num_right + 1 : 6])[:5]
    request = VerifyRequest(params, PROMPT, (), draft, eos_token_ids=EOS)
    [verdict] = sampler.verify(model_pass((), draft), [request])
    assert verdict == Verdict(tuple(answer[: num_right + 1]), num_right)


def test_greedy_ties_go_to_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]] * 2)
    for params in (
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={3: 1.0}),
    ):
        assert sampler.verify(logits, [VerifyRequest(params, (), (), (1,))]) == [Verdict((1, 1), 1)]


def mixed_pass(sampler: Sampler) -> tuple[list[Tensor], list[VerifyRequest]]:
    rows, requests = [], []
    for index, params in enumerate(EVERY_PARAMETER.values()):
        answer = generate(sampler, params, no_draft, 0)
        draft = drafters_around(answer)["partly right"](answer[:index], index % 4)
        requests.append(VerifyRequest(params, PROMPT, answer[:index], draft, eos_token_ids=EOS))
        rows.append(model_pass(answer[:index], draft))
    return rows, requests


def test_a_verdict_does_not_depend_on_who_shares_the_pass(sampler: Sampler) -> None:
    rows, requests = mixed_pass(sampler)
    alone = [sampler.verify(row, [request])[0] for row, request in zip(rows, requests, strict=True)]
    assert sampler.verify(torch.cat(rows), requests) == alone
    assert sampler.verify(torch.cat(rows[::-1]), requests[::-1]) == alone[::-1]
    assert sampler.verify(torch.empty(0, VOCAB_SIZE), []) == []


def test_logits_are_left_as_they_were(sampler: Sampler) -> None:
    rows, requests = mixed_pass(sampler)
    logits = torch.cat(rows)
    before = logits.clone()
    sampler.verify(logits, requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["greedy", "greedy with all that changes logits", "plain", "all together"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row[3].fill_(torch.nan),
        lambda row: row.fill_(torch.nan),
        lambda row: row.fill_(-torch.inf),
        lambda row: row[3].fill_(torch.inf),
    ],
    ids=["one NaN", "all NaN", "all -inf", "one +inf"],
)
def test_an_unusable_row_fails_its_own_request_and_harms_no_other(
    sampler: Sampler, name: str, damage: Callable[[Tensor], Tensor]
) -> None:
    params = EVERY_PARAMETER[name]
    answer = generate(sampler, params, no_draft, 0)
    draft = tuple(answer[:3])
    rows, requests = mixed_pass(sampler)
    healthy = sampler.verify(torch.cat(rows), requests)
    request = VerifyRequest(params, PROMPT, (), draft, eos_token_ids=EOS)
    for damaged_row in range(4):
        damaged = model_pass((), draft)
        damage(damaged[damaged_row])
        first, *others, last = sampler.verify(torch.cat([damaged, *rows, damaged]), [request, *requests, request])
        assert others == healthy
        assert first == last
        assert first.error is not None
        assert f"position {len(PROMPT) + damaged_row} " in first.error
        # What would have been said without drafts stands.
        assert first.token_ids == draft[:damaged_row]
        assert first.num_accepted == damaged_row


@pytest.mark.parametrize("name", ["greedy", "plain"])
def test_an_unusable_row_behind_a_wrong_guess_is_not_looked_at(sampler: Sampler, name: str) -> None:
    params = EVERY_PARAMETER[name]
    answer = generate(sampler, params, no_draft, 0)
    draft = (answer[0], (answer[1] + 1) % VOCAB_SIZE, -1)
    rows = model_pass((), draft)
    rows[2:] = torch.nan
    [verdict] = sampler.verify(rows, [VerifyRequest(params, PROMPT, (), draft)])
    assert verdict == Verdict((answer[0], answer[1]), 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_bans_every_token_fails_with_a_sentence(sampler: Sampler, temperature: float) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=1, temperature=temperature, stop_token_ids=(0, 1, 2))
    [verdict] = sampler.verify(torch.zeros(1, 3), [VerifyRequest(params, (0, 0), ())])
    assert verdict.token_ids == ()
    assert verdict.error == (
        "min_tokens bans every token that could stand at position 2; lower min_tokens or name fewer stop_token_ids"
    )


def test_extreme_parameters_still_choose_a_token(sampler: Sampler) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 5.0]])
    for params in (
        SamplingParams(max_tokens=9, temperature=1e-5),
        SamplingParams(max_tokens=9, repetition_penalty=0.01, logit_bias={0: -100.0, 1: 100.0}),
        SamplingParams(max_tokens=9, top_p=1e-12, min_p=1.0, top_k=1),
    ):
        assert sampler.verify(logits, [VerifyRequest(params, (0, 1), (2,))]) == [Verdict((0,), 0)]
    biased = SamplingParams(max_tokens=9, logit_bias={2: 100.0, 3: -100.0})
    assert sampler.verify(torch.zeros(1, 4), [VerifyRequest(biased, (), ())]) == [Verdict((2,), 0)]


@pytest.mark.parametrize("name", EVERY_PARAMETER)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(sampler: Sampler, name: str, num_top: int) -> None:
    base = EVERY_PARAMETER[name]
    params = SamplingParams(**{field: getattr(base, field) for field in base.__slots__} | {"logprobs": num_top})
    answer = generate(sampler, base, no_draft, 0)
    draft = (*answer[:2], (answer[2] + 1) % VOCAB_SIZE)
    rows = model_pass((), draft)
    [verdict] = sampler.verify(rows, [VerifyRequest(params, PROMPT, (), draft, eos_token_ids=EOS)])
    assert verdict.token_ids == tuple(answer[:3])
    assert [entry.token_id for entry in verdict.logprobs] == answer[:3]
    for entry, expected in zip(verdict.logprobs, rows.double().log_softmax(dim=1), strict=False):
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
        top_logprobs, top_ids = expected.topk(num_top)
        assert [token_id for token_id, _ in entry.top] == top_ids.tolist()
        np.testing.assert_allclose([logprob for _, logprob in entry.top], top_logprobs, atol=1e-5)


def test_logprobs_list_equals_by_lowest_id(sampler: Sampler) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
    [verdict] = sampler.verify(torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]), [VerifyRequest(params, (), ())])
    assert [token_id for token_id, _ in verdict.logprobs[0].top] == [0, 2, 3]


def test_no_logprobs_unless_asked(sampler: Sampler) -> None:
    rows, requests = mixed_pass(sampler)
    assert all(verdict.logprobs == () for verdict in sampler.verify(torch.cat(rows), requests))


@pytest.mark.parametrize("name", ["greedy", "greedy with all that changes logits"])
def test_at_temperature_zero_draft_probabilities_change_nothing(sampler: Sampler, name: str) -> None:
    params = EVERY_PARAMETER[name]
    answer = generate(sampler, params, no_draft, 0)
    for kind, drafter in drafters_around(answer).items():
        draft = drafter((), 5)
        draft_probs = torch.full((5, VOCAB_SIZE), 1 / VOCAB_SIZE)
        with_probs = VerifyRequest(params, PROMPT, (), draft, draft_probs, eos_token_ids=EOS)
        without = VerifyRequest(params, PROMPT, (), draft, eos_token_ids=EOS)
        rows = model_pass((), draft)
        assert sampler.verify(rows, [with_probs]) == sampler.verify(rows, [without]), kind


@pytest.mark.parametrize(
    "draft_probs",
    [
        torch.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE),
        torch.full((3, VOCAB_SIZE + 1), 1 / (VOCAB_SIZE + 1)),
        torch.full((3,), 1.0),
        torch.full((3, VOCAB_SIZE), torch.nan),
        torch.full((3, VOCAB_SIZE), 1.0),
    ],
    ids=["too few rows", "another vocabulary", "one dimension", "NaN", "not normalised"],
)
def test_draft_probabilities_that_cannot_be_are_ignored(sampler: Sampler, draft_probs: Tensor) -> None:
    for seed in range(30):
        params = SamplingParams(max_tokens=9, seed=seed)
        draft = (seed % VOCAB_SIZE, 3, 4)
        rows = model_pass((), draft)
        broken = VerifyRequest(params, PROMPT, (), draft, draft_probs)
        assert sampler.verify(rows, [broken]) == sampler.verify(rows, [VerifyRequest(params, PROMPT, (), draft)])


# Two tokens of a model with a vocabulary of 4 whose logits depend on the last token.
PAIR_LOGITS = torch.tensor(
    [[0.4, -0.3, 0.9, 0.0], [1.0, 0.2, -0.5, 0.3], [-0.2, 0.8, 0.1, 0.5], [0.0, 0.0, 1.2, -0.4]], dtype=torch.float32
)
PAIR_PARAMS = {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.2}
PAIR_DRAFT_PROBS = torch.tensor([[0.1, 0.5, 0.1, 0.3], [0.4, 0.1, 0.4, 0.1]])
START = 3


def pair_probs() -> npt.NDArray[np.float64]:
    """``[16]``: of each first token, then each second token."""
    first = (PAIR_LOGITS[START].double() / 0.8).softmax(0)
    penalty = torch.eye(4, dtype=torch.float64) * (0.7 + 0.2)  # the second token sees the first
    second = ((PAIR_LOGITS.double() - penalty) / 0.8).softmax(1)
    return (first[:, None] * second).flatten().numpy()  # type: ignore[no-any-return]


def draw_pairs(
    sampler: Sampler, drafts: Sequence[tuple[int, ...]], draft_probs: Tensor | None = None
) -> npt.NDArray[np.int64]:
    """The first two tokens ``[len(drafts), 2]`` of requests with seeds 0, 1, ...: in one pass, or two if need be."""
    outputs: list[list[int]] = [[] for _ in drafts]
    for _ in range(2):
        unfinished = [seed for seed, output in enumerate(outputs) if len(output) < 2]
        requests, last_tokens = [], []
        for seed in unfinished:
            output = outputs[seed]
            draft = drafts[seed] if not output or draft_probs is None else ()
            draft = draft[len(output) :]
            probs = None if draft_probs is None or not draft else draft_probs[len(output) : len(output) + len(draft)]
            params = SamplingParams(max_tokens=9, seed=seed, **PAIR_PARAMS)  # type: ignore[arg-type]
            requests.append(VerifyRequest(params, (START,), tuple(output), draft, probs))
            last_tokens.extend([(START, *output)[-1], *draft])
        for seed, verdict in zip(unfinished, sampler.verify(PAIR_LOGITS[last_tokens], requests), strict=True):
            outputs[seed].extend(verdict.token_ids)
    return np.array([output[:2] for output in outputs])


def assert_pairs_follow_the_model(pairs: npt.NDArray[np.int64]) -> None:
    expected = pair_probs()
    assert chi_square_p_value(pairs @ [4, 1], expected) > FALSE_ALARM
    for index, marginal in enumerate((expected.reshape(4, 4).sum(1), expected.reshape(4, 4).sum(0))):
        assert chi_square_p_value(pairs[:, index], marginal) > FALSE_ALARM


def test_sampled_pairs_follow_the_model_whatever_the_drafter(sampler: Sampler) -> None:
    kinds: list[tuple[int, ...]] = [(), (2,), (2, 1), (0, 0), (3, 2, 1)]  # the likeliest, the least likely, ...
    pairs = draw_pairs(sampler, [kinds[seed % len(kinds)] for seed in range(20_000)])
    assert_pairs_follow_the_model(pairs)
    for index in range(len(kinds)):
        assert_pairs_follow_the_model(pairs[index :: len(kinds)])


def drafts_by_probs(count: int) -> list[tuple[int, ...]]:
    """Two drafted tokens a seed, sampled from ``PAIR_DRAFT_PROBS``."""
    edges = PAIR_DRAFT_PROBS.double().cumsum(1).numpy()
    return [
        tuple(int(np.searchsorted(edges[i], uniform(seed, 1 + i, Purpose.DRAFT, trial=1)).clip(0, 3)) for i in range(2))
        for seed in range(count)
    ]


@pytest.mark.parametrize("method", ["block", "standard"])
def test_sampled_pairs_follow_the_model_when_drafts_were_sampled(method: RejectionSampleMethod) -> None:
    sampler = Sampler(load_operations("reference"), method)
    # The second pass, if there is one, has no draft: a drafter would draw one anew.
    drafts = drafts_by_probs(12_000)
    assert_pairs_follow_the_model(draw_pairs(sampler, drafts, PAIR_DRAFT_PROBS))


def test_sampled_drafts_need_the_probabilities_they_were_sampled_from(sampler: Sampler) -> None:
    # The power of the test above: the drafts stay, their probabilities are another drafter's.
    pairs = draw_pairs(sampler, drafts_by_probs(4_000), PAIR_DRAFT_PROBS.flip(1))
    assert chi_square_p_value(pairs @ [4, 1], pair_probs()) < FALSE_ALARM
