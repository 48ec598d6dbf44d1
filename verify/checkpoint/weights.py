"""The weights a checkpoint holds: which must be there, and one of them in its stored form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.verify.checkpoint.config import ModelConfig, UnsupportedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as its file stores it (the ``Weight`` of ``kernels/operations.py``).

    ``quantization`` is the name GGUF gives the stored form. ``blocks``: ``[out_features, bytes_per_row]``,
    for a vector ``[n, bytes_per_element]``; read-only, often still on disk.
    """

    shape: tuple[int, ...]
    quantization: str
    blocks: npt.NDArray[np.uint8]

    def dense(self) -> Tensor:
        """The values as float32, of ``shape``; a new tensor each time."""
        import torch

        if self.quantization == "BF16":
            return torch.from_numpy(self.blocks.view(np.int16).copy()).view(torch.bfloat16).float().reshape(self.shape)
        if self.quantization in ("F16", "F32"):
            stored = self.blocks.view(np.float16 if self.quantization == "F16" else np.float32)
            return torch.from_numpy(stored.astype(np.float32)).reshape(self.shape)
        import gguf

        values = gguf.dequantize(self.blocks, gguf.GGMLQuantizationType[self.quantization])
        return torch.from_numpy(values).reshape(self.shape)


def weight_shapes(config: ModelConfig, num_stored: int) -> dict[str, tuple[int, ...]]:
    """Every weight a model of this configuration has, by its Hugging Face name.

    Raises:
        UnsupportedCheckpoint: no model can be of this shape, or not with ``num_stored`` tensors in the file.
    """
    if config.num_layers > num_stored:
        raise UnsupportedCheckpoint(f"a model of {config.num_layers} layers does not fit into {num_stored} tensors")
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedCheckpoint(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise UnsupportedCheckpoint(f"heads of {config.head_dim}: a rotary embedding needs an even number")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in layer_shapes(config))
    return shapes


def layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight of one layer, by its name in the layer."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", key_value, hidden, config.attention_bias),
        ("self_attn.v_proj", key_value, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.attention_output_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    )
    for name, out_features, in_features, has_bias in linears:
        yield f"{name}.weight", (out_features, in_features)
        if has_bias:
            yield f"{name}.bias", (out_features,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
