"""What an engine is made from: nothing is left open when it starts, and what does not go together is refused."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.engine.settings import EngineSettings


def test_the_cache_takes_the_form_that_suits_the_kernels_unless_one_is_named() -> None:
    assert EngineSettings("m", "m", kernels="cpu").resolved().kv_cache_dtype == "f16"
    assert EngineSettings("m", "m", kernels="reference").resolved().kv_cache_dtype == "f32"
    assert EngineSettings("m", "m", kernels="cpu", kv_cache_dtype="int8").resolved().kv_cache_dtype == "int8"


def test_nothing_is_left_open_when_an_engine_starts() -> None:
    resolved = EngineSettings("m", "m").resolved()
    assert resolved.kernels in ("cpu", "reference")
    assert resolved.kv_cache_dtype in ("f32", "f16")
    assert EngineSettings("m", "m", kernels="reference").resolved().draft_quantize == "none"
    assert EngineSettings("m", "m", kernels="cpu").resolved().draft_quantize == "int8"
    assert EngineSettings("m", "m", kernels="cpu", quantize="int4").resolved().draft_quantize == "int4"
    assert resolved.resolved() == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize": "int2"}, "quantize must be one of none, int8, int4, not 'int2'"),
        ({"kv_cache_dtype": "f8"}, "kv_cache_dtype must be one of auto, f32, f16, int8, not 'f8'"),
        ({"num_threads": 1_000_000}, "num_threads must be from 0 .* on this machine, not 1000000"),
        ({"kernels": "reference", "quantize": "int4"}, "quantize must be none with the reference kernels, not 'int4'"),
        ({"kernels": "reference", "draft_quantize": "int8"}, "draft_quantize must be none with the reference kernels"),
        ({"kernels": "reference", "kv_cache_dtype": "f16"}, "kv_cache_dtype must be f32 with the reference kernels"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings("m", "m", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "oracle"}, "drafter must be one of auto, hybrid, suffix, model, none, not 'oracle'"),
        ({"drafter": "suffix", "draft_model_path": "d"}, "draft_model_path must be empty with the drafter suffix"),
        ({"max_draft_tokens": 65}, "max_draft_tokens must be from 0"),
        ({"suffix_min_match": 0}, "suffix_min_match must be from 1 to 64, not 0"),
        ({"rejection_sample_method": "typical"}, "rejection_sample_method must be one of block, standard"),
        ({"draft_sample_method": "beam"}, "draft_sample_method must be one of probabilistic, greedy"),
        ({"draft_quantize": "int2"}, "draft_quantize must be one of auto, none, int8, int4"),
    ],
)
def test_drafts_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings("m", "m", **changes)
