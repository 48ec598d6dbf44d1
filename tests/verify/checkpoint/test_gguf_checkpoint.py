"""GGUF files: every quantisation, the row order, the configuration, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.config import RopeConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf import QUANTIZATIONS
from outrider.verify.checkpoint.gguf_config import llama3_factors

UP = "model.layers.0.mlp.up_proj.weight"


def random_blocks(quantization: str, rows: int, columns: int) -> np.ndarray:
    """Any bytes are valid blocks; 0x7c in a scale's high byte would make it infinite, so exponents are capped."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantization]]
    shape = (rows, columns // block_size * block_bytes)
    return np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8) & np.uint8(0x3F)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_dense_is_what_gguf_dequantises(quantization: str, write_gguf: Any, tiny: Any) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    blocks = random_blocks(quantization, 256, 256)
    tensors = tiny.tensors("qwen3") | {"blk.0.ffn_up.weight": (blocks, kind)}
    weight = open_checkpoint(write_gguf("qwen3", tiny.metadata("qwen3"), tensors)).weight(UP)
    assert (weight.shape, weight.quantization) == ((256, 256), quantization)
    assert weight.blocks.dtype == np.uint8
    assert np.array_equal(weight.blocks, blocks)
    dense = weight.dense()
    assert dense.dtype == torch.float32
    assert np.array_equal(dense.numpy(), gguf.dequantize(blocks, kind), equal_nan=True)
    assert not torch.isnan(dense).any()


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def hand_q8_0() -> tuple[bytes, list[float]]:
    values = [(7 * i) % 255 - 127 for i in range(32)]
    return half(0.25) + struct.pack("<32b", *values), [0.25 * v for v in values]


def hand_q4_1() -> tuple[bytes, list[float]]:
    low, high = [i % 16 for i in range(16)], [(3 * i + 5) % 16 for i in range(16)]
    packed = bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    return half(0.5) + half(-2.0) + packed, [0.5 * v - 2.0 for v in low + high]


def hand_q5_0() -> tuple[bytes, list[float]]:
    values = [(11 * i + 2) % 32 for i in range(32)]
    fifth_bits = sum((v >> 4) << i for i, v in enumerate(values))
    packed = bytes((values[i] & 15) | (values[i + 16] & 15) << 4 for i in range(16))
    return half(0.125) + struct.pack("<I", fifth_bits) + packed, [0.125 * (v - 16) for v in values]


@pytest.mark.parametrize("hand", [hand_q8_0, hand_q4_1, hand_q5_0])
def test_dense_is_what_the_format_says(hand: Any, write_gguf: Any, tiny: Any) -> None:
    block, expected = hand()
    blocks = np.tile(np.frombuffer(block, np.uint8), (256, 8))
    kind = gguf.GGMLQuantizationType[hand.__name__.removeprefix("hand_").upper()]
    tensors = tiny.tensors("qwen3") | {"blk.0.ffn_up.weight": (blocks, kind)}
    dense = open_checkpoint(write_gguf("qwen3", tiny.metadata("qwen3"), tensors)).weight(UP).dense()
    assert dense[5].tolist() == expected * 8


def test_a_permuted_quantised_weight_has_its_blocks_in_the_order_of_its_rows(write_gguf: Any, tiny: Any) -> None:
    blocks = random_blocks("Q4_1", 128, 256)
    tensors = tiny.tensors() | {"blk.0.attn_k.weight": (blocks, gguf.GGMLQuantizationType.Q4_1)}
    weight = open_checkpoint(write_gguf("llama", tiny.metadata("llama"), tensors)).weight(
        "model.layers.0.self_attn.k_proj.weight"
    )
    # Row 0, 1, 2 of each head of 64 are stored as rows 0, 2, 4; row 32 (its second half) as row 1.
    for row, stored in ((0, 0), (1, 2), (2, 4), (32, 1), (33, 3), (64, 64), (97, 67)):
        assert np.array_equal(weight.blocks[row], blocks[stored])
    assert np.array_equal(weight.dense().numpy(), gguf.dequantize(weight.blocks, gguf.GGMLQuantizationType.Q4_1))


def open_tiny(write_gguf: Any, tiny: Any, architecture: str = "llama", **changes: Any) -> Any:
    return open_checkpoint(
        write_gguf(architecture, tiny.metadata(architecture, **changes), tiny.tensors(architecture))
    ).config


def test_configuration(write_gguf: Any, tiny: Any) -> None:
    config = open_tiny(write_gguf, tiny)
    assert (config.architecture, config.vocab_size, config.hidden_size, config.head_dim) == ("llama", 32, 256, 64)
    assert (config.num_heads, config.num_kv_heads, config.max_position_embeddings) == (4, 2, 128)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and not config.attention_bias and not config.qk_norm
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.sliding_window is None


def test_biases_norms_and_an_own_head_are_found(write_gguf: Any, tiny: Any) -> None:
    qwen2 = open_checkpoint(write_gguf("qwen2", tiny.metadata("qwen2"), tiny.tensors("qwen2"), "a.gguf"))
    assert qwen2.config.attention_bias and not qwen2.config.attention_output_bias
    expected = tiny.tensors("qwen2")["blk.0.attn_q.bias"]
    assert np.array_equal(qwen2.weight("model.layers.0.self_attn.q_proj.bias").dense().numpy(), expected)
    head = {"output.weight": np.ones((32, 256), np.float32)}
    qwen3 = open_checkpoint(write_gguf("qwen3", tiny.metadata("qwen3"), tiny.tensors("qwen3") | head, "b.gguf"))
    assert qwen3.config.qk_norm and not qwen3.config.tie_word_embeddings
    assert qwen3.weight("lm_head.weight").dense().sum() == 32 * 256
    assert not qwen2.has("lm_head.weight") and not qwen2.has("model.layers.0.self_attn.q_norm.weight")


def test_rope_scaling_and_sliding_window(write_gguf: Any, tiny: Any) -> None:
    linear = open_tiny(write_gguf, tiny, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.rope == RopeConfig(scaling="linear", factor=4.0)
    yarn = open_tiny(
        write_gguf,
        tiny,
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=2.0,
        rope__scaling__original_context_length=64,
        attention__sliding_window=16,
    )
    assert yarn.rope == RopeConfig(scaling="yarn", factor=2.0, original_max_position=64)
    assert yarn.sliding_window == 16


def test_llama3_scaling_is_recovered_from_its_divisors(write_gguf: Any, tiny: Any) -> None:
    rope = RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    factors = np.array(transformers_llama3_divisors(rope), np.float32)
    tensors = tiny.tensors() | {"rope_freqs.weight": factors}
    metadata = tiny.metadata("llama", rope__freq_base=500000.0)
    assert open_checkpoint(write_gguf("llama", metadata, tensors)).config.rope == rope
    tensors["rope_freqs.weight"] = factors * np.linspace(1, 2, 32, dtype=np.float32)
    with pytest.raises(UnsupportedCheckpoint, match=r"rope_freqs\.weight is not what llama3's scaling"):
        open_checkpoint(write_gguf("llama", metadata, tensors))
    tensors["rope_freqs.weight"] = np.zeros(32, np.float32)
    with pytest.raises(UnsupportedCheckpoint, match=r"rope_freqs\.weight holds 0\.0, less than 1"):
        open_checkpoint(write_gguf("llama", metadata, tensors))


def transformers_llama3_divisors(rope: RopeConfig) -> list[float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope.theta ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    divisors: list[float] = (plain / scaled.double()).tolist()
    assert divisors == pytest.approx(llama3_factors(rope, 64), rel=1e-5)
    return divisors


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3'.*supported in GGUF files are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope__dimension_count": 32}, "rope.dimension_count is 32"),
        ("llama", {"attention__value_length": 32}, "attention.value_length is 32"),
        ("llama", {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "'longrope'"),
        ("llama", {"embedding_length": None}, "lacks llama.embedding_length"),
        ("llama", {"attention__layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
        ("llama", {"block_count": 2**31}, "2147483648 layers does not fit into 11 tensors"),
        ("llama", {"block_count": "many"}, "block_count is 'many' where an integer belongs"),
        ("llama", {"attention__head_count_kv": [2, 1]}, "differs from layer to layer"),
        ("llama", {"attention__head_count_kv": 3}, "4 query heads cannot share 3 KV heads"),
        ("llama", {"feed_forward_length": 512}, r"shape \(256, 256\); its configuration wants \(512, 256\)"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str, write_gguf: Any, tiny: Any
) -> None:
    path = write_gguf(architecture, tiny.metadata(architecture, **changes), tiny.tensors())
    with pytest.raises(UnsupportedCheckpoint, match=message):
        open_checkpoint(path)


def test_unsupported_tensors_are_refused_by_name(write_gguf: Any, tiny: Any) -> None:
    metadata = tiny.metadata("llama")
    blocks = random_blocks("IQ4_NL", 256, 256)
    quantised = tiny.tensors() | {"blk.0.ffn_up.weight": (blocks, gguf.GGMLQuantizationType.IQ4_NL)}
    with pytest.raises(UnsupportedCheckpoint, match=r"blk\.0\.ffn_up\.weight is quantised as IQ4_NL"):
        open_checkpoint(write_gguf("llama", metadata, quantised))
    with pytest.raises(UnsupportedCheckpoint, match=r"does not have: blk\.0\.odd\.weight"):
        open_checkpoint(write_gguf("llama", metadata, tiny.tensors() | {"blk.0.odd.weight": np.ones(4, np.float32)}))
    lacking = tiny.tensors()
    del lacking["blk.0.ffn_down.weight"]
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks the tensor blk\.0\.ffn_down\.weight"):
        open_checkpoint(write_gguf("llama", metadata, lacking))
    with pytest.raises(UnsupportedCheckpoint, match=r"has no weight model\.rope"):
        open_checkpoint(write_gguf("llama", metadata, tiny.tensors())).weight("model.rope")


def test_the_fingerprint_follows_the_content_and_not_the_path(write_gguf: Any, tiny: Any, tmp_path: Path) -> None:
    path = write_gguf("llama", tiny.metadata("llama"), tiny.tensors())
    before = open_checkpoint(path).fingerprint
    moved = path.rename(tmp_path / "other.gguf")
    assert open_checkpoint(moved).fingerprint == before
    changed = write_gguf("llama", tiny.metadata("llama", context_length=256), tiny.tensors())
    assert open_checkpoint(changed).fingerprint != before


def test_the_default_model_opens(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope.theta, config.max_position_embeddings) == (49152, 100000.0, 8192)
    assert config.tie_word_embeddings and config.eos_token_ids[0] == 2
    # The embedding is Q8_0: rows of blocks [f16 scale, 32 int8].
    embedding = checkpoint.weight("model.embed_tokens.weight")
    row = embedding.blocks[100].reshape(18, 34)
    expected = row[:, :2].copy().view(np.float16).astype(np.float32) * row[:, 2:].view(np.int8)
    assert np.array_equal(embedding.dense()[100].numpy(), expected.reshape(-1))
