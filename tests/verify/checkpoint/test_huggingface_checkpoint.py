"""Hugging Face directories: weights equal to transformers' own, configuration, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.config import RopeConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.huggingface_config import read_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def build(name: str, **changes: Any) -> Any:
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms start as constants
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "biases"),
    [
        ("Llama", {}, (False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, (True, True, True)),
        ("Mistral", {"head_dim": 24, "sliding_window": None}, (False, False, False)),
        ("Qwen2", {}, (True, False, False)),
        ("Qwen3", {"head_dim": 32}, (False, False, False)),
        ("Qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_every_weight_is_transformers_own(
    name: str, changes: dict[str, Any], biases: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    model = build(name, **changes)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (name == "Qwen3")
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    for key, expected in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            assert not checkpoint.has(key)
            continue
        weight = checkpoint.weight(key)
        assert weight.shape == expected.shape
        assert torch.equal(weight.dense(), expected)
    with pytest.raises(UnsupportedCheckpoint, match=r"has no weight model\.layers\.2"):
        checkpoint.weight("model.layers.2.input_layernorm.weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("Llama").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path)
    for key, expected in model.state_dict().items():
        weight = checkpoint.weight(key)
        assert weight.quantization == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
        assert weight.blocks.shape == (expected.shape[0], expected[0].numel() * 2)
        assert weight.blocks.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
        assert torch.equal(weight.dense(), expected.float())


@pytest.mark.parametrize(("name", "permuted"), [("Llama", True), ("Qwen2", False), ("Qwen3", False)])
def test_a_gguf_file_of_the_same_model_loads_the_same(
    name: str, permuted: bool, tmp_path: Path, write_gguf: Any
) -> None:
    model = build(name, **({"attention_bias": True} if name == "Llama" else {"head_dim": 16}))
    model.save_pretrained(tmp_path / "hf")
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    architecture = name.lower()
    path = write_gguf(architecture, gguf_metadata(architecture, model.config), gguf_tensors(state, permuted))
    ours, theirs = open_checkpoint(path), open_checkpoint(tmp_path / "hf")
    for key in state:
        assert torch.equal(ours.weight(key).dense(), theirs.weight(key).dense()), key
        assert np.array_equal(ours.weight(key).blocks, theirs.weight(key).blocks), key
    # What a file without tokenizer and special tokens cannot say is left aside.
    skipped = ("bos_token_id", "eos_token_ids")
    fields = [field for field in ours.config.__dataclass_fields__ if field not in skipped]
    assert [getattr(ours.config, f) for f in fields] == [getattr(theirs.config, f) for f in fields]


def gguf_metadata(architecture: str, config: Any) -> dict[str, Any]:
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def gguf_tensors(state: dict[str, np.ndarray], permuted: bool) -> dict[str, np.ndarray]:
    """Names and row order as llama.cpp's converter gives them."""
    renames = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    tensors = {}
    for key, value in state.items():
        if permuted and (heads := {"q_proj": 4, "k_proj": 2}.get(key.split(".")[-2])):
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        for old, new in renames.items():
            key = key.replace(old, new)
        tensors[key] = value
    return tensors


def config_of(path: Path, name: str = "Llama", **changes: Any) -> Any:
    values = {**SIZES, "architectures": [f"{name}ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    return read_config(path)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(2e4, "linear", 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "truncate": False}},
            RopeConfig(scaling="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, truncate=False),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            RopeConfig(scaling="yarn", factor=4.0, original_max_position=128, attention_factor=1.5),
        ),
    ],
)
def test_rotary_embeddings_old_and_new(changes: dict[str, Any], expected: RopeConfig, tmp_path: Path) -> None:
    assert config_of(tmp_path, **changes).rope == expected


@pytest.mark.parametrize(
    ("name", "changes", "window", "layers"),
    [
        ("Llama", {"sliding_window": 9}, None, None),
        ("Mistral", {"sliding_window": 9}, 9, None),
        ("Mistral", {"sliding_window": None}, None, None),
        ("Mistral", {}, 4096, None),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": False}, None, None),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, 9, (False, True)),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, None, None),
        (
            "Qwen3",
            {
                "head_dim": 16,
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            9,
            (True, False),
        ),
    ],
)
def test_sliding_windows(
    name: str, changes: dict[str, Any], window: int | None, layers: tuple[bool, ...] | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, name, **changes)
    assert (config.sliding_window, config.sliding_layers) == (window, layers)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert config_of(tmp_path, eos_token_id=7).eos_token_ids == (5, 2, 7)
    (tmp_path / "generation_config.json").unlink()
    assert config_of(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_head_sizes_not_given_are_transformers_defaults(tmp_path: Path) -> None:
    assert config_of(tmp_path).head_dim == 16
    assert config_of(tmp_path, "Qwen3").head_dim == transformers.Qwen3Config().head_dim
    assert config_of(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM'; supported are LlamaForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": "absent"}, "architecture None"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_scaling": {"type": "linear"}}, "None for factor"),
        ({"hidden_size": "absent"}, "None for hidden_size"),
        ({"num_hidden_layers": -3}, "-3 for num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "'small' for rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "'yes' for tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        config_of(tmp_path, **changes)


def test_incomplete_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedCheckpoint, match="not valid JSON"):
        open_checkpoint(tmp_path)
    build("Llama").save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    with pytest.raises(UnsupportedCheckpoint, match="cut off or damaged"):
        open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(UnsupportedCheckpoint, match=f"lacks {shard.name}"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere"}}))
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks \.\./elsewhere"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match="only safetensors are supported"):
        open_checkpoint(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    build("Llama", attention_bias=True).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())

    def rewrite(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(values | changes))

    rewrite(attention_bias=False)
    with pytest.raises(UnsupportedCheckpoint, match=r"does not have: model\.layers\.0\.self_attn\.k_proj\.bias"):
        open_checkpoint(tmp_path)
    rewrite(mlp_bias=True)
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks the weight model\.layers\.0\.mlp\.gate_proj\.bias"):
        open_checkpoint(tmp_path)
    rewrite(intermediate_size=100)
    with pytest.raises(UnsupportedCheckpoint, match=r"shape \(96, 64\); config\.json wants \(100, 64\)"):
        open_checkpoint(tmp_path)
    rewrite(num_hidden_layers=10**9)
    with pytest.raises(UnsupportedCheckpoint, match="1000000000 layers does not fit"):
        open_checkpoint(tmp_path)
