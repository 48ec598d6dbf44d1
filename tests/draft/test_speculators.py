"""The speculators format: published files are read as they are meant, and ours say what vLLM looks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_speculator import RandomSpeculator, layer_config
from safetensors.torch import load_file, save_file

from outrider.draft.speculators import Speculator, is_speculator, read_speculator_config
from outrider.verify.checkpoint.config import RopeConfig, UnsupportedCheckpoint

# As in config.json of RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3, but for the sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 10,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42",
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 4,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 40,
    },
}
TOKENS = [0, 3, 4, 5, 11, 12, 20, 38, 39, 7]


def published_tensors() -> dict[str, torch.Tensor]:
    """By the names that vLLM's loader renames and those that it takes as they are."""
    shapes = {
        "fc.weight": (16, 48),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (16, 32),
        "midlayer.self_attn.k_proj.weight": (8, 32),
        "midlayer.self_attn.v_proj.weight": (8, 32),
        "midlayer.self_attn.o_proj.weight": (16, 16),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (10, 16),
        "embed_tokens.weight": (40, 16),
    }
    tensors = {name: torch.full(shape, index + 1.0).bfloat16() for index, (name, shape) in enumerate(shapes.items())}
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(TOKENS)])
    tensors["t2d"] = torch.tensor([token in TOKENS for token in range(40)])
    return tensors


def publish(path: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """A published draft in ``path``; a tensor of None is left out."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config or PUBLISHED))
    chosen = {name: tensor for name, tensor in {**published_tensors(), **tensors}.items() if tensor is not None}
    save_file(chosen, path / "model.safetensors")
    return path


def test_a_published_draft_is_read(tmp_path: Path) -> None:
    speculator = Speculator(publish(tmp_path / "draft"))
    config = speculator.config
    assert config.draft_vocab_size == 10
    assert (config.layers.hidden_size, config.layers.num_kv_heads, config.layers.vocab_size) == (16, 2, 40)
    assert config.layers.rope.scaling == "llama3"
    assert config.layers.rope.original_max_position == 8192
    assert config.target_hidden_size == 16
    assert config.target_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert config.norm_before_residual
    assert config.taps_in(32) == (2, 16, 29)  # EAGLE's own, where none are named
    assert speculator.token_map is not None
    assert speculator.token_map.tolist() == TOKENS
    for name, tensor in published_tensors().items():
        if name not in ("d2t", "t2d"):
            found = speculator.weight(name.replace("midlayer.", "layers.0.")).dense()
            assert torch.equal(found, tensor.float())


def test_a_draft_for_all_tokens_has_no_map(tmp_path: Path) -> None:
    all_words = torch.zeros(40, 16).bfloat16()
    config = {**PUBLISHED, "draft_vocab_size": 40}
    path = publish(tmp_path / "draft", config, d2t=None, t2d=None, **{"lm_head.weight": all_words})
    assert Speculator(path).token_map is None


def test_what_is_not_said_is_as_vllm_takes_it(tmp_path: Path) -> None:
    config = {name: value for name, value in PUBLISHED.items() if name != "norm_before_residual"}
    config["eagle_aux_hidden_state_layer_ids"] = [1, 9, 14]
    read = read_speculator_config(publish(tmp_path / "draft", config))
    assert read.norm_before_residual
    assert read.taps_in(16) == (1, 9, 14)


def broken(changes: dict[str, Any]) -> dict[str, Any]:
    return {**PUBLISHED, **changes}


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        (broken({"speculators_model_type": "dflash"}), {}, "type 'dflash'; only eagle3"),
        (broken({"norm_output": True}), {}, "norm_output"),
        (broken({"transformer_layer_config": None}), {}, "no transformer_layer_config"),
        (broken({"draft_vocab_size": -1}), {}, "-1 for draft_vocab_size"),
        (broken({"eagle_aux_hidden_state_layer_ids": "all"}), {}, "'all', no list of layers"),
        (broken({"transformer_layer_config": {"model_type": "gpt2"}}), {}, "layers of type 'gpt2'"),
        (PUBLISHED, {"fc.weight": None}, "lacks the weight fc.weight"),
        (PUBLISHED, {"midlayer.hidden_norm.weight": None}, "lacks the weight layers.0.hidden_norm.weight"),
        (PUBLISHED, {"fc.weight": torch.zeros(16, 32)}, r"fc.weight has shape \(16, 32\)"),
        (PUBLISHED, {"fc.weight": torch.zeros(16, 48).long()}, "stored as I64"),
        (PUBLISHED, {"mask_hidden": torch.zeros(1, 48)}, "no place to: mask_hidden"),
        (PUBLISHED, {"d2t": None}, "10 of 40 tokens and no d2t"),
        (PUBLISHED, {"d2t": torch.full((10,), 35)}, "a token of its own from 0 to 39"),
        (PUBLISHED, {"d2t": -torch.arange(10)}, "a token of its own"),
        (PUBLISHED, {"d2t": torch.zeros(9).long()}, r"must be int64 of \(10,\)"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str
) -> None:
    path = publish(tmp_path / "draft", config, **tensors)
    with pytest.raises(UnsupportedCheckpoint, match=problem):
        Speculator(path)


def test_a_file_cut_off_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path / "draft")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedCheckpoint, match="cut off or damaged"):
        Speculator(path)


def test_speculators_are_told_from_other_directories(tmp_path: Path, tiny_model: Path) -> None:
    assert is_speculator(publish(tmp_path / "draft"))
    assert not is_speculator(tiny_model)
    assert not is_speculator(tmp_path / "nothing")


KINDS: list[dict[str, Any]] = [
    {},
    {"own_embedding": True, "norm_before_residual": True, "fusion_norm": "all"},
    {"draft_vocab_size": 259, "fusion_norm": "each", "taps": (0, 4)},
    {"layers": layer_config(num_layers=2, attention_bias=True, attention_output_bias=True)},
    {"layers": layer_config(architecture="qwen3", qk_norm=True), "target_name": "a/b", "taps": None},
    {"layers": layer_config(rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192))},
    {"layers": layer_config(rope=RopeConfig(1e4, "yarn", 4.0, original_max_position=256, attention_factor=1.5))},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_written_is_read_back(tmp_path: Path, kind: dict[str, Any]) -> None:
    head = RandomSpeculator.make(seed=1, **kind)
    found = Speculator(head.save(tmp_path / "draft"))
    assert replace(found.config, num_draft_tokens=head.config.num_draft_tokens) == head.config
    for name, weight in head.weights.items():
        assert torch.equal(found.weight(name).dense(), weight)
    if head.token_map is None:
        assert found.token_map is None
    else:
        assert found.token_map is not None
        assert torch.equal(found.token_map, head.token_map)


def test_what_is_written_is_what_vllm_looks_for(tmp_path: Path) -> None:
    """Its ``SpeculatorsConfig`` and ``Eagle3LlamaForCausalLM.load_weights``, the latter of models/llama_eagle3.py."""
    head = RandomSpeculator.make(seed=2, num_draft_tokens=5, target_name="org/target")
    path = head.save(tmp_path / "draft")
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["draft_vocab_size"] == 100
    assert config["norm_before_residual"] is False  # vLLM's default is another
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", 259, 1)
    tensors = load_file(path / "model.safetensors")
    # Its rule: output i scores token i + d2t[i].
    assert head.token_map is not None
    assert (torch.arange(100) + tensors["d2t"]).tolist() == head.token_map.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == head.token_map.tolist()
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    projections = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    norms = {f"layers.0.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    others = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors.keys() == projections | mlp | norms | others


def test_a_draft_of_another_shape_than_it_says_is_not_written(tmp_path: Path) -> None:
    head = RandomSpeculator.make(seed=3)
    head.weights["fc.weight"] = head.weights["fc.weight"][:, :-1]
    with pytest.raises(ValueError, match=r"fc.weight has shape \(48, 143\)"):
        head.save(tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
