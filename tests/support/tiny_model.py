"""A very small model with random weights and a real tokenizer, saved as a Hugging Face directory.

Its greedy text soon repeats itself, so a suffix drafter has much to find; its answers are otherwise as
unpredictable as a model's can be. Byte-level tokens: every text can be written, and every id read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """The special tokens, then one token for each of the 256 bytes."""
    vocab = {
        token: index for index, token in enumerate([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": byte_tokenizer().get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "initializer_range": 0.07,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**shape, **changes})


def save_tiny_model(directory: Path, config: PretrainedConfig | None = None, seed: int = 0) -> Path:
    """Random weights for ``config`` (a small Llama by default) and the byte tokenizer, in ``directory``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_llama_config(), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialised to 0 and 1: a forgotten one would not show
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END_OF_TURN, "chat_template": CHAT_TEMPLATE})
    )
    return directory
