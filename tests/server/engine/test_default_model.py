"""The default model on real prompts: transformers' tokens in float32, and one answer however it is computed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answer, greedy, make_engine, run
from logit_tap import LogitTap

from outrider.verify.checkpoint.chat_template import load_chat_template
from outrider.verify.checkpoint.tokenizer import load_tokenizer

PROMPTS_FILE = Path(__file__).parents[4] / "shared" / "data" / "specbench_dev.jsonl"
NUM_PROMPTS = 20
MAX_TOKENS = 64
MAX_PROMPT_TOKENS = 300
TIE = 1e-4  # two logits closer than this may change places under another order of additions

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROMPTS_FILE.exists(), reason=f"the prompts are not at {PROMPTS_FILE}"),
]


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    """Questions spread over all categories, short enough for every test here."""
    tokenizer, template = load_tokenizer(default_model), load_chat_template(default_model)
    texts = [json.loads(line)["turns"][0] for line in PROMPTS_FILE.read_text().splitlines()]
    encoded = [template.encode([{"role": "user", "content": text}], tokenizer) for text in texts]
    fitting = [token_ids for token_ids in encoded if len(token_ids) <= MAX_PROMPT_TOKENS]
    return fitting[:: len(fitting) // NUM_PROMPTS][:NUM_PROMPTS]


def requests(prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[Any]:
    return [greedy(prompt, str(index), max_tokens) for index, prompt in enumerate(prompts)]


def staggered(engine: Any, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> dict[str, Answer]:
    """All prompts, one joining every third step."""
    return run(engine, [], {3 * index: [request] for index, request in enumerate(requests(prompts, max_tokens))})


ORACLE_PROMPTS = 8  # transformers takes seconds for each
ORACLE_TOKENS = 48


def test_greedy_answers_equal_transformers_token_by_token(prompts: list[list[int]], default_model: Path) -> None:
    """The reference kernels, with all that makes them sooner done: drafts, batches, chunks."""
    prompts = prompts[:: NUM_PROMPTS // ORACLE_PROMPTS][:ORACLE_PROMPTS]
    engine = make_engine(default_model, kernels="reference", kv_cache_mib=256, max_running=8, max_step_tokens=64)
    answers = staggered(engine, prompts, ORACLE_TOKENS)
    assert sum(answer.num_accepted for answer in answers.values()) > 10
    del engine
    gc.collect()
    num_ties = 0
    for index, (theirs, margins) in enumerate(transformers_answers(default_model, prompts)):
        ours = answers[str(index)].token_ids
        if ours != theirs:
            first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            assert margins[first] < TIE, f"prompt {index} differs at token {first}, margin {margins[first]:.2e}"
            num_ties += 1
    assert num_ties <= 1, f"first differences at ties below {TIE}: {num_ties} of {len(prompts)}"


def transformers_answers(path: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Hugging Face's greedy answers in float32, and how close the two best logits were at each token."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    answers = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=ORACLE_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best_two = torch.stack([logits[0].topk(2).values for logits in result.logits])
        answers.append((result.sequences[0, len(prompt) :].tolist(), (best_two[:, 0] - best_two[:, 1]).tolist()))
    return answers


@dataclass(frozen=True)
class Plain:
    """The native kernels' own answers, one request at a time, a token a step."""

    answers: list[list[int]]
    logits: LogitTap


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]], default_model: Path) -> Plain:
    engine = make_engine(default_model, kernels="cpu", kv_cache_mib=256, drafter="none")
    tap = LogitTap(engine)
    return Plain([run(engine, [request])[request.request_id].token_ids for request in requests(prompts)], tap)


WAYS: dict[str, dict[str, Any]] = {
    "draft length 1": {"max_draft_tokens": 1, "max_running": 1},
    "draft length 4, batch of 4, chunks of 16": {"max_draft_tokens": 4, "max_running": 4, "max_step_tokens": 16},
    "draft length 8, batch of 8, chunks of 512": {"max_draft_tokens": 8, "max_running": 8, "max_step_tokens": 512},
    "no drafts, batch of 8, chunks of 16": {"max_draft_tokens": 0, "max_running": 8, "max_step_tokens": 16},
    "1 thread": {"num_threads": 1, "max_running": 8},
    "prefix hits": {"max_running": 4},
    "preemption": {"max_running": 8, "kv_cache_mib": 20},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_be_faster_changes_a_bit(
    way: str, prompts: list[list[int]], plain: Plain, default_model: Path
) -> None:
    engine = make_engine(default_model, kernels="cpu", **{"kv_cache_mib": 256, **WAYS[way]})
    tap = LogitTap(engine)
    if way == "prefix hits":
        run(engine, [replace(request, generate=False) for request in requests(prompts)])
    answers = staggered(engine, prompts)
    assert [answers[str(i)].token_ids for i in range(len(prompts))] == plain.answers
    assert tap.bits.keys() >= plain.logits.bits.keys()
    tap.assert_same(plain.logits)
    checks: dict[str, Callable[[], bool]] = {
        "preemption": lambda: engine.stats.num_preemptions > 0,
        "prefix hits": lambda: all(answers[str(i)].num_cached_tokens for i in range(len(prompts))),
        "no drafts, batch of 8, chunks of 16": lambda: all(a.num_draft_tokens == 0 for a in answers.values()),
    }
    happened = checks.get(way, lambda: sum(a.num_accepted for a in answers.values()) > 20)
    assert happened(), "what this test is about did not happen"
