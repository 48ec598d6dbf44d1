"""transformers as a contender, in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.server.bench.baseline import BaselineUnavailable, Transformers
from outrider.server.bench.prompts import Prompt

# Byte tokens: <|im_start|>, "user\n", the message, <|im_end|>, "\n", <|im_start|>, "assistant\n"
NUM_TEMPLATE_TOKENS = 1 + 5 + 1 + 1 + 1 + 10
MAX_TOKENS = 6


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(i, ({"role": "user", "content": text},)) for i, text in enumerate(texts, start=1)]


async def test_it_counts_each_answer_of_a_padded_batch_by_itself(tiny_model: Path) -> None:
    pytest.importorskip("accelerate")
    baseline = await Transformers.start(tiny_model, max_tokens=MAX_TOKENS)
    try:
        texts = ("Hi", "A longer question.", "Why?")
        together = await baseline.run(prompts(*texts), concurrency=2)
        alone = await baseline.run(prompts(*texts), concurrency=1)
    finally:
        await baseline.aclose()
    assert baseline.versions["dtype"] == "torch.float32"
    for one in (together, alone):
        assert [m.num_input_tokens for m in one.measurements] == [NUM_TEMPLATE_TOKENS + len(text) for text in texts]
        assert [m.line for m in one.measurements] == [1, 2, 3]
        for measurement in one.measurements:
            assert measurement.num_output_tokens == len(measurement.text_times_s) <= MAX_TOKENS
            assert measurement.ttft_s is not None
            assert measurement.e2e_s is not None
            assert 0 < measurement.ttft_s <= measurement.e2e_s <= one.wall_s
    assert [m.num_output_tokens for m in together.measurements] == [m.num_output_tokens for m in alone.measurements]


async def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(BaselineUnavailable, match=f"transformers cannot load {tmp_path}"):
        await Transformers.start(tmp_path, max_tokens=MAX_TOKENS)
