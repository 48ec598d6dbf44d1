"""A trained head as a directory in the ``speculators`` format (config.json and safetensors; vLLM reads it too)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.draft.distill.directory import write_text
from outrider.draft.distill.distillation import TrainedHead
from outrider.verify.checkpoint.config import ModelConfig, RopeConfig

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
VERSION = "0.9.0"  # of the format


def write_draft(path: Path, trained: TrainedHead, target: ModelConfig, target_name: str, chain: int) -> None:
    """Write config.json and model.safetensors; what was there before stays until the new is complete.

    ``chain``: guesses a step that the configuration proposes.

    Raises:
        OSError: a file cannot be written.
    """
    unfinished = path / (WEIGHTS_FILE + ".unfinished")
    try:
        save_file(_tensors(trained, target.vocab_size), unfinished, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {unfinished}: {error}") from error
    os.replace(unfinished, path / WEIGHTS_FILE)
    write_text(path / CONFIG_FILE, json.dumps(_config(trained, target, target_name, chain), indent=2) + "\n")


def _tensors(trained: TrainedHead, vocab_size: int) -> dict[str, Tensor]:
    """The weights in bfloat16, and the maps between vocabularies: ``d2t`` holds offsets, ``t2d`` who has a word."""
    token_map = trained.token_map
    has_word = torch.zeros(vocab_size, dtype=torch.bool)
    has_word[token_map] = True
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in trained.weights.items()}
    return tensors | {"d2t": token_map - torch.arange(len(token_map)), "t2d": has_word}


def _config(trained: TrainedHead, target: ModelConfig, target_name: str, chain: int) -> dict[str, Any]:
    shape = trained.shape
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "rope_scaling": _rope_scaling(target.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": chain,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(trained.taps),
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """As Hugging Face writes it."""
    match rope.scaling:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": rope.factor}
        case "llama3":
            return {
                "rope_type": "llama3",
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position,
            }
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": rope.factor,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
                "original_max_position_embeddings": rope.original_max_position,
                "attention_factor": rope.attention_factor,
                "truncate": rope.truncate,
            }
