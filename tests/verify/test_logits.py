from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from outrider.verify.logits import LogitsProcessor
from outrider.verify.sampling_params import SamplingParams

VOCAB_SIZE = 40
PROMPT = (3, 5, 5, 8, 21)
OUTPUT = (8, 1, 1, 1, 30)
EOS = (2, 7)


def random_logits(seed: int = 0) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).normal(scale=3.0, size=VOCAB_SIZE)


def process(
    params: SamplingParams,
    logits: npt.NDArray[np.float64],
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    then: Sequence[int] = (),
) -> npt.NDArray[np.float64]:
    """Process a copy of ``logits`` after ``output``, and after ``then`` appended one by one."""
    processor = LogitsProcessor(params, prompt, output, EOS)
    for token_id in then:
        processor.append(token_id)
    row = logits.copy()
    processor.process(row)
    return row


def hf(processor: object, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    history = torch.tensor([[*PROMPT, *OUTPUT]])
    return processor(history, torch.from_numpy(logits.copy())[None])[0].numpy()  # type: ignore[operator, no-any-return]


def openai_penalties(
    logits: npt.NDArray[np.float64], output: Sequence[int], presence: float, frequency: float
) -> npt.NDArray[np.float64]:
    """``mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence``, as OpenAI documents it."""
    return np.array(
        [mu - output.count(j) * frequency - float(output.count(j) > 0) * presence for j, mu in enumerate(logits)]
    )


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 100.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    logits = random_logits()
    assert (logits[list(PROMPT)] < 0).any()
    assert (logits[list(PROMPT)] > 0).any()
    got = process(SamplingParams(max_tokens=9, repetition_penalty=penalty), logits)
    np.testing.assert_allclose(got, hf(RepetitionPenaltyLogitsProcessor(penalty), logits), rtol=1e-12)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 2.0), (0.3, -0.4)])
def test_presence_and_frequency_penalties_are_openais(presence: float, frequency: float) -> None:
    logits = random_logits()
    params = SamplingParams(max_tokens=9, presence_penalty=presence, frequency_penalty=frequency)
    np.testing.assert_allclose(process(params, logits), openai_penalties(logits, OUTPUT, presence, frequency))


def test_presence_and_frequency_penalties_leave_the_prompt_alone() -> None:
    logits = random_logits()
    params = SamplingParams(max_tokens=9, presence_penalty=2.0, frequency_penalty=2.0)
    np.testing.assert_array_equal(process(params, logits, output=()), logits)


def test_logit_bias_is_transformers_sequence_bias_of_single_tokens() -> None:
    logits = random_logits()
    bias = {0: -100.0, 5: 100.0, 39: 0.25}
    oracle = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    oracle_row = hf(oracle, logits.astype(np.float32).astype(np.float64))
    got = process(SamplingParams(max_tokens=9, logit_bias=bias), logits)
    np.testing.assert_allclose(got, oracle_row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("min_tokens", [0, 4, 5, 6, 9])
def test_min_tokens_bans_what_transformers_bans(min_tokens: int) -> None:
    logits = random_logits()
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=(11, 12))
    oracle = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [*EOS, 11, 12], device="cpu")
    np.testing.assert_array_equal(process(params, logits), hf(oracle, logits))


def test_min_tokens_counts_appended_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=7)
    assert np.isneginf(process(params, random_logits(), then=(4,))[list(EOS)]).all()
    assert np.isfinite(process(params, random_logits(), then=(4, 4))).all()


def test_min_tokens_leaves_an_ignored_end_of_text_token() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(11,), ignore_eos=True)
    assert np.flatnonzero(np.isneginf(process(params, random_logits()))).tolist() == [11]


def test_appended_tokens_count_like_verified_ones() -> None:
    params = SamplingParams(
        max_tokens=9, min_tokens=7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25
    )
    for num_appended in range(len(OUTPUT) + 1):
        cut = len(OUTPUT) - num_appended
        got = process(params, random_logits(), output=OUTPUT[:cut], then=OUTPUT[cut:])
        np.testing.assert_array_equal(got, process(params, random_logits()))


def test_bias_then_repetition_then_openai_penalties_then_bans() -> None:
    logits = random_logits()
    logits[8] = -1.0  # seen in prompt and output; the bias changes its sign
    params = SamplingParams(
        max_tokens=9,
        min_tokens=6,
        logit_bias={8: 4.0, 2: 100.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    got = process(params, logits)
    assert got[8] == (-1.0 + 4.0) / 2.0 - 0.25 - 0.5
    assert got[2] == -np.inf


def test_a_token_the_model_rules_out_stays_out() -> None:
    logits = random_logits()
    logits[8] = -np.inf
    params = SamplingParams(
        max_tokens=9, logit_bias={8: 100.0}, repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=-2.0
    )
    assert process(params, logits)[8] == -np.inf


def test_without_parameters_nothing_changes() -> None:
    np.testing.assert_array_equal(process(SamplingParams(max_tokens=9), random_logits()), random_logits())
