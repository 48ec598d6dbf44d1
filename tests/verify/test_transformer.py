"""Our transformer against Hugging Face's, architecture by architecture, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import save_tiny_model, tiny_llama_config
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from outrider.kernels.operations import RaggedBatch, load_operations
from outrider.kvcache.storage import KVStorage
from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.transformer import Transformer

PAGE_SIZE = 16
NUM_TOKENS = 150


def shape(**changes: Any) -> dict[str, Any]:
    common = tiny_llama_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range")
    return {**{name: common[name] for name in names}, "eos_token_id": 2, **changes}


def rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": tiny_llama_config(),
    "llama, whole groups": tiny_llama_config(hidden_size=64, head_dim=16, intermediate_size=160),
    "llama, multi-head": tiny_llama_config(num_key_value_heads=4),
    "llama, multi-query, tied": tiny_llama_config(num_key_value_heads=1, tie_word_embeddings=True),
    "llama, biases": tiny_llama_config(attention_bias=True, mlp_bias=True),
    "llama, llama3 rope": tiny_llama_config(**LLAMA3),
    "llama, linear rope": tiny_llama_config(**rope("linear", factor=4.0)),
    "llama, yarn rope": tiny_llama_config(**YARN),
    "mistral, window": MistralConfig(**shape(sliding_window=40)),
    "qwen2": Qwen2Config(**shape()),
    "qwen2, window in upper layers": Qwen2Config(
        **shape(use_sliding_window=True, sliding_window=40, max_window_layers=1)
    ),
    "qwen3": Qwen3Config(**shape(head_dim=16)),
}


def forward_in_chunks(model: Transformer, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits of every row, ``[num_tokens, vocab_size]``."""
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    storage = KVStorage([model.kv_layers], num_pages + 1, PAGE_SIZE)
    table = np.arange(num_pages, 0, -1, dtype=np.int32)  # pages in falling order: nothing may rely on neighbours
    parts = []
    for start in range(0, len(token_ids), chunk):
        positions = np.arange(start, min(start + chunk, len(token_ids)))
        batch = RaggedBatch(
            cu_seqlens_q=np.array([0, len(positions)], dtype=np.int32),
            seq_lens=np.array([positions[-1] + 1], dtype=np.int32),
            page_tables=table[None],
            positions=positions,
            slot_mapping=table[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
        )
        parts.append(model.logits(model.forward(torch.tensor(token_ids)[positions], batch, storage)))
    return torch.cat(parts)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    token_ids: list[int]
    expected: torch.Tensor  # Hugging Face's logits in float32, [NUM_TOKENS, vocab_size]


def oracle(path: Path) -> Checkpoint:
    token_ids = torch.randint(0, 259, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return Checkpoint(path, token_ids, model(torch.tensor([token_ids])).logits[0])


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return oracle(save_tiny_model(tmp_path_factory.mktemp("model"), CONFIGS[request.param]))


# What is lost on the way, in root mean squares of all logits; float32 loses next to nothing.
KERNELS: dict[str, tuple[dict[str, Any], float]] = {
    "reference": ({"name": "reference"}, 1e-5),
    "cpu": ({"name": "cpu", "kv_cache_dtype": "f32"}, 1e-5),
    "cpu, f16 cache": ({"name": "cpu"}, 1e-3),
    "cpu, int8 cache": ({"name": "cpu", "kv_cache_dtype": "int8"}, 0.02),
    "cpu, int8 weights": ({"name": "cpu", "quantize": "int8"}, 0.05),
    "cpu, int4 weights, int8 cache": ({"name": "cpu", "quantize": "int4", "kv_cache_dtype": "int8"}, 0.3),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_hugging_faces_and_do_not_depend_on_chunks(kernels: str, checkpoint: Checkpoint) -> None:
    settings, allowed = KERNELS[kernels]
    operations = load_operations(**settings)
    with torch.no_grad():
        model = Transformer(open_checkpoint(checkpoint.path), operations, max_context=512)
        whole = forward_in_chunks(model, checkpoint.token_ids, NUM_TOKENS)
        assert deviation(whole, checkpoint.expected) < allowed
        for chunk in (1, 7, 64):
            assert torch.equal(forward_in_chunks(model, checkpoint.token_ids, chunk), whole), f"chunks of {chunk}"


def deviation(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((logits - expected).square().mean() / expected.square().mean()).sqrt())


def test_weights_in_bfloat16_stay_as_they_are(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = oracle(tmp_path)
    model = Transformer(open_checkpoint(tmp_path), load_operations("cpu", kv_cache_dtype="f32"), max_context=512)
    assert deviation(forward_in_chunks(model, checkpoint.token_ids, NUM_TOKENS), checkpoint.expected) < 1e-5
