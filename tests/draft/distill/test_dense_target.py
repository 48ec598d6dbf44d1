"""The target as plain tensors, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import byte_tokenizer, save_tiny_model, tiny_llama_config
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from outrider.draft.distill.dense_target import DenseTarget, fastest_dtype, tap_layers
from outrider.verify.checkpoint.checkpoint import open_checkpoint

SHAPE: dict[str, Any] = {
    "vocab_size": byte_tokenizer().get_vocab_size(),
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": tiny_llama_config(num_hidden_layers=6, initializer_range=0.2, tie_word_embeddings=True),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=7),
    "qwen2, biases": Qwen2Config(**SHAPE),
    "qwen3, norms of heads": Qwen3Config(**SHAPE),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_features_hidden_states_and_logits_are_those_of_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, config)
    token_ids = torch.randint(0, config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(token_ids, output_hidden_states=True)

    target = DenseTarget(open_checkpoint(path), torch.float32, torch.device("cpu"), max_length=20)
    found = target.forward(token_ids)

    assert target.taps == (2, 3, 3)
    wanted = torch.cat([expected.hidden_states[tap] for tap in target.taps], dim=-1)
    torch.testing.assert_close(found.features, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.hidden, expected.hidden_states[-1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.hidden @ target.head.T, expected.logits, atol=1e-4, rtol=1e-4)


def test_padding_at_the_end_changes_no_row_before_it(tmp_path: Path) -> None:
    target = DenseTarget(open_checkpoint(save_tiny_model(tmp_path)), torch.float32, torch.device("cpu"), max_length=40)
    token_ids = torch.randint(0, 200, (1, 12), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([token_ids, torch.zeros(1, 28, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(target.forward(padded).features[:, :12], target.forward(token_ids).features)


@pytest.mark.parametrize(("num_layers", "taps"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (2, (0, 1, 2)), (1, (0, 0, 1))])
def test_taps_are_a_low_a_middle_and_a_high_layer(num_layers: int, taps: tuple[int, ...]) -> None:
    assert tap_layers(num_layers) == taps


def test_a_dtype_is_found_by_trying(tmp_path: Path) -> None:
    config = open_checkpoint(save_tiny_model(tmp_path)).config
    assert fastest_dtype(config, torch.device("cpu")) in (torch.bfloat16, torch.float32)
