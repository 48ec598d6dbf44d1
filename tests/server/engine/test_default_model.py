"""The default model against transformers, on real prompts: the first promise of the project."""

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

from outrider.verify.checkpoint.chat_template import load_chat_template
from outrider.verify.checkpoint.tokenizer import load_tokenizer

PROMPTS_FILE = Path(__file__).parents[4] / "shared" / "data" / "specbench_dev.jsonl"
NUM_PROMPTS = 20
MAX_TOKENS = 64
MAX_PROMPT_TOKENS = 300
TIE = 1e-4  # two logits closer than this may change places under another order of additions

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PROMPTS_FILE.exists(), reason=f"the prompts are not at {PROMPTS_FILE}"),
]


@dataclass
class Oracle:
    """Hugging Face's greedy answers in float32, and how close the two best logits were at each token."""

    prompts: list[list[int]]
    answers: list[list[int]]
    margins: list[list[float]]


@pytest.fixture(scope="module")
def oracle(default_model: Path) -> Oracle:
    from transformers import AutoModelForCausalLM, GgufConfig

    prompts = encoded_prompts(default_model)
    model = AutoModelForCausalLM.from_pretrained(
        default_model.parent,
        gguf_file=default_model.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()
    answers, margins = [], []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best_two = torch.stack([logits[0].topk(2).values for logits in result.logits])
        answers.append(result.sequences[0, len(prompt) :].tolist())
        margins.append((best_two[:, 0] - best_two[:, 1]).tolist())
    del model
    gc.collect()
    return Oracle(prompts, answers, margins)


def encoded_prompts(model: Path) -> list[list[int]]:
    """Questions spread over all categories, short enough for every test here."""
    tokenizer, template = load_tokenizer(model), load_chat_template(model)
    lines = PROMPTS_FILE.read_text().splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines]
    encoded = [template.encode([{"role": "user", "content": text}], tokenizer) for text in texts]
    fitting = [token_ids for token_ids in encoded if len(token_ids) <= MAX_PROMPT_TOKENS]
    return fitting[:: len(fitting) // NUM_PROMPTS][:NUM_PROMPTS]


def requests(oracle: Oracle, **params: Any) -> list[Any]:
    return [greedy(prompt, str(i), MAX_TOKENS, **params) for i, prompt in enumerate(oracle.prompts)]


def staggered(oracle: Oracle, engine: Any, **params: Any) -> dict[str, Answer]:
    """All prompts, one joining every third step."""
    return run(engine, [], {3 * i: [request] for i, request in enumerate(requests(oracle, **params))})


@pytest.fixture(scope="module")
def plain(oracle: Oracle, default_model: Path) -> list[list[int]]:
    """Our own answers, one request at a time, without speculation."""
    engine = make_engine(default_model, kv_cache_mib=256, drafter="none")
    return [run(engine, [request])[request.request_id].token_ids for request in requests(oracle)]


def test_greedy_answers_equal_transformers_token_by_token(oracle: Oracle, plain: list[list[int]]) -> None:
    num_ties = 0
    for index, (ours, theirs, margins) in enumerate(zip(plain, oracle.answers, oracle.margins, strict=True)):
        if ours != theirs:
            first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            assert margins[first] < TIE, f"prompt {index} differs at token {first}, margin {margins[first]:.2e}"
            num_ties += 1
    print(f"\n{len(plain)} prompts, {sum(map(len, plain))} tokens; first differences at ties below {TIE}: {num_ties}")
    assert num_ties <= 2


WAYS: dict[str, dict[str, Any]] = {
    "draft length 1": {"max_draft_tokens": 1, "max_running": 1},
    "draft length 4, batch of 4, chunks of 16": {"max_draft_tokens": 4, "max_running": 4, "max_step_tokens": 16},
    "draft length 8, batch of 8, chunks of 512": {"max_draft_tokens": 8, "max_running": 8, "max_step_tokens": 512},
    "no drafts, batch of 8, chunks of 16": {"max_draft_tokens": 0, "max_running": 8, "max_step_tokens": 16},
    "prefix hits": {"max_running": 4},
    "preemption": {"max_running": 8, "kv_cache_mib": 40},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_be_faster_changes_a_token(
    way: str, oracle: Oracle, plain: list[list[int]], default_model: Path
) -> None:
    engine = make_engine(default_model, **{"kv_cache_mib": 512, **WAYS[way]})
    if way == "prefix hits":
        run(engine, [replace(request, generate=False) for request in requests(oracle)])
    answers = staggered(oracle, engine)
    assert [answers[str(i)].token_ids for i in range(len(plain))] == plain
    checks: dict[str, Callable[[], bool]] = {
        "preemption": lambda: engine.stats.num_preemptions > 0,
        "prefix hits": lambda: all(answers[str(i)].num_cached_tokens for i in range(len(plain))),
        "no drafts, batch of 8, chunks of 16": lambda: all(a.num_draft_tokens == 0 for a in answers.values()),
    }
    happened = checks.get(way, lambda: sum(a.num_accepted for a in answers.values()) > 20)
    assert happened(), "what this test is about did not happen"
