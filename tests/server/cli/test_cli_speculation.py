"""``--speculative-config`` and its neighbours: vLLM's names mean what they mean there, or are refused by name."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from outrider.server.cli import serve
from outrider.server.cli.main import HelpFormatter, WrongUsage
from outrider.server.cli.options import make_settings
from outrider.server.cli.speculation import read_speculation
from outrider.server.cli.speculative_config import InvalidSpeculativeConfig, parse_speculative_config
from outrider.server.engine.request import ModelInfo
from outrider.server.engine.settings import EngineSettings

# The fields of vLLM's SpeculativeConfig and its methods, from its documentation; not from the code under test.
VLLM_FIELDS = [
    "method",
    "model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "tensor_parallel_size",
    "quantization",
    "max_model_len",
    "revision",
    "code_revision",
    "enforce_eager",
    "kv_cache_dtype",
    "attention_backend",
    "moe_backend",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "draft_sample_method",
    "enable_adaptive_verification",
    "parallel_drafting",
    "use_heterogeneous_vocab",
    "disable_padded_drafter_batch",
    "disable_eagle_block_drop",
    "use_local_argmax_reduction",
    "draft_load_config",
    "dspark_draft_topk",
]
BUILT_METHODS = ["ngram", "suffix", "draft_model", "eagle", "eagle3"]
OTHER_METHODS = [
    "ngram_gpu",
    "mtp",
    "deepseek_mtp",
    "qwen3_next_mtp",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
    "custom_class",
    "extract_hidden_states",
]


def parsed(**fields: Any) -> dict[str, Any]:
    config = parse_speculative_config(json.dumps(fields))
    return {**config.settings, "model": config.model}


def refusal(text: str) -> str:
    with pytest.raises(InvalidSpeculativeConfig) as refused:
        parse_speculative_config(text)
    return str(refused.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5},
         {"drafter": "suffix", "max_draft_tokens": 5, "suffix_min_match": 4, "model": None}),
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
         {"drafter": "suffix", "suffix_min_match": 2, "model": None}),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0},
         {"drafter": "suffix", "suffix_history": False, "model": None}),
        ({"method": "draft_model", "model": "org/name", "quantization": "int8"},
         {"drafter": "model", "draft_quantize": "int8", "model": "org/name"}),
        ({"method": "eagle3", "model": "here", "draft_tensor_parallel_size": 1, "enforce_eager": True},
         {"drafter": "model", "model": "here"}),
        ({"method": "hybrid", "rejection_sample_method": "block", "draft_sample_method": "greedy",
          "enable_adaptive_verification": False},
         {"drafter": "hybrid", "rejection_sample_method": "block", "draft_sample_method": "greedy",
          "adaptive_drafts": False, "model": None}),
        ({"model": "org/name", "revision": None}, {"drafter": "hybrid", "model": "org/name"}),
    ],
)  # fmt: skip
def test_vllms_names_mean_here_what_they_mean_there(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parsed(**fields) == expected


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_no_field_of_vllm_is_unknown_and_none_takes_nonsense(name: str) -> None:
    message = refusal(json.dumps({"method": "hybrid", name: {"nothing": "takes this"}}))
    assert f"'{name}'" in message
    assert "unknown" not in message


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_a_method_that_is_not_built_is_refused_by_name(method: str) -> None:
    assert f"the method {method} is not supported: " in refusal(json.dumps({"method": method}))


@pytest.mark.parametrize("method", BUILT_METHODS)
def test_the_methods_that_are_built_need_nothing_else(method: str) -> None:
    assert parsed(method=method)["drafter"] == ("suffix" if method in ("ngram", "suffix") else "model")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{method: ngram}", ["not JSON", "character 1", '"method"']),
        ("", ["not JSON"]),
        ('"ngram"', ["must be a JSON object", '"ngram"']),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"method": "suffix", "method": "ngram"}', ["'method' twice"]),
        ('{"num_speculative_token": 3}', ["num_speculative_token", "did you mean 'num_speculative_tokens'?"]),
        ('{"zebra": 3}', ['unknown field "zebra"', "num_speculative_tokens"]),
        ('{"method": "sufix"}', ["'method' must be one of", "did you mean 'suffix'?"]),
        ('{"method": 3}', ["'method' must be one of", "not 3"]),
        ("{}", ["'method'", "'model'"]),
        ('{"method": "suffix", "model": "org/name"}', ["no model", "hybrid"]),
        ('{"method": "draft_model", "model": ""}', ["'model' must be"]),
        ('{"method": "suffix", "num_speculative_tokens": 0}', ["from 1 to 64, not 0"]),
        ('{"method": "suffix", "num_speculative_tokens": true}', ["from 1 to 64, not true"]),
        ('{"method": "suffix", "num_speculative_tokens": 65}', ["from 1 to 64, not 65"]),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}', ["5", "2", "must not be larger"]),
        ('{"method": "eagle3", "prompt_lookup_min": 5}', ["ngram, suffix and hybrid"]),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": 10}', ["can only be 0", "--suffix-history"]),
        ('{"method": "eagle3", "rejection_sample_method": "synthetic"}', ["invented acceptance"]),
        ('{"method": "eagle3", "quantization": "fp8"}', ["'quantization' must be one of none, int8, int4"]),
        ('{"method": "eagle3", "draft_tensor_parallel_size": 2}', ["'draft_tensor_parallel_size' is not supported"]),
        ('{"method": "eagle3", "draft_tensor_parallel_size": true}', ["'draft_tensor_parallel_size' is not supported"]),
        ('{"method": "eagle3", "enable_adaptive_verification": "yes"}', ["must be true or false"]),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_sentence_that_names_it(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message, message


def settings_of(*arguments: str) -> tuple[EngineSettings, str]:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    serve.add_arguments(parser)
    args = parser.parse_args(arguments)
    draft = read_speculation(args)
    return make_settings(EngineSettings, args, model_path="m", model_name="m"), draft


def test_the_configuration_becomes_the_engines_settings_beside_other_options() -> None:
    config = '{"method": "eagle3", "model": "org/name", "num_speculative_tokens": 5}'
    settings, draft = settings_of("--speculative-config", config, "--suffix-history")
    assert (settings.drafter, settings.max_draft_tokens, settings.suffix_history, draft) == (
        "model",
        5,
        True,
        "org/name",
    )
    assert settings_of("--no-speculation")[0].drafter == "none"
    assert settings_of("--draft-model", "org/name") == (EngineSettings("m", "m"), "org/name")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative-config", '{"method": "suffix"}', "--drafter", "hybrid"], ["suffix", "--drafter"]),
        (["--speculative-config", '{"method": "hybrid", "model": "a"}', "--draft-model", "b"], ["different models"]),
        (["--no-speculation", "--draft-model", "b"], ["--no-speculation", "draft model"]),
        (["--no-speculation", "--drafter", "hybrid"], ["--no-speculation", "--drafter"]),
        (["--drafter", "suffix", "--draft-model", "b"], ["--drafter suffix", "--draft-model"]),
        (["--speculative-config", "{"], ["--speculative-config", "not JSON"]),
    ],
)
def test_options_that_contradict_each_other_are_a_usage_error(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(WrongUsage) as refused:
        settings_of(*arguments)
    for word in words:
        assert word in str(refused.value)


def test_the_ready_line_says_who_drafts_with_what_and_in_which_form_everything_lies() -> None:
    settings = EngineSettings("m", "m", kernels="reference")
    hybrid = ModelInfo("m", 9, 9, "cpu", "hybrid", 8, draft_model="m-draft", weights="Q4_1/Q8_0", draft_weights="Q8_0")
    assert serve.describe_speculation(hybrid, settings) == "drafter hybrid with m-draft (Q8_0), up to 8 tokens a step"
    assert serve.describe_memory(hybrid, settings) == "weights Q4_1/Q8_0, keys and values f32"
    drafted = ModelInfo("m", 9, 9, "cpu", "model", 8, draft_model="d")
    quantized = EngineSettings("m", "m", kernels="cpu", quantize="int8", draft_quantize="int4")
    assert serve.describe_memory(drafted, quantized) == "weights int8, keys and values f16"
    assert serve.describe_speculation(drafted, quantized) == "drafter model with d (int4), up to 8 tokens a step"
    stored = EngineSettings("m.gguf", "m", kernels="cpu", quantize="int8")
    assert serve.describe_memory(drafted, stored).startswith("weights as in the file, ")
    fixed = EngineSettings("m", "m", adaptive_drafts=False)
    suffix = ModelInfo("m", 9, 9, "cpu", "suffix", 3)
    assert serve.describe_speculation(suffix, fixed) == "drafter suffix, always 3 tokens a step"
    assert serve.describe_speculation(ModelInfo("m", 9, 9, "cpu", "none", 3), settings) == "no speculation"
    assert serve.describe_speculation(ModelInfo("m", 9, 9, "cpu", "suffix", 0), settings) == "no speculation"
