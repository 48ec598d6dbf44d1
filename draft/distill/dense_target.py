"""The target as plain tensors: what it knows of every token of a text, for a draft to learn from.

Serving needs one row to cost little; training needs many rows at once, on whatever is fastest here. So the weights
are made dense and whole sequences go through ordinary matrix products. The figures differ from the kernels' in the
last bits, which a draft, being only ever a guess, does not mind.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.verify.checkpoint.checkpoint import Checkpoint
from outrider.verify.checkpoint.config import ModelConfig
from outrider.verify.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target found in a batch of sequences."""

    features: Tensor  # [num_seqs, length, len(taps) * hidden_size], the residual stream at the taps
    hidden: Tensor  # [num_seqs, length, hidden_size], normalised: what the head reads


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer's weights; vectors are float32, matrices of the target's own dtype, ``[out, in]``."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Tensor
    attention_output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


def tap_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer before which the residual stream is read (EAGLE-3, Li et al. 2025)."""
    low, middle, high = sorted((min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)))
    return low, middle, high


class DenseTarget:
    """``embedding`` and ``head``: ``[vocab_size, hidden_size]``; ``norm``: of the last hidden state."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_length: int) -> None:
        self.config = checkpoint.config
        self.taps = tap_layers(self.config.num_layers)
        self._dtype = dtype
        self._device = device
        self._rotary = RotaryTable(self.config.rope, self.config.head_dim, max_length)
        self._weights = checkpoint
        self.embedding = self._matrix("model.embed_tokens.weight")
        tied = self.config.tie_word_embeddings
        self.head = self.embedding if tied else self._matrix("lm_head.weight")
        self.norm = self._vector("model.norm.weight")
        self.layers = [self._layer(index) for index in range(self.config.num_layers)]

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, float32, each ``[length, head_dim // 2]``."""
        cos, sin = self._rotary.at(torch.arange(length))
        return cos.to(self._device), sin.to(self._device)

    @torch.no_grad()
    def forward(self, token_ids: Tensor) -> TargetRows:
        """Read sequences ``[num_seqs, length]`` (int64), padded at their ends with anything."""
        residual = functional.embedding(token_ids, self.embedding)
        rotary = self.rotary(token_ids.shape[1])
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            tapped[index] = residual
            residual = self._layer_forward(residual, layer, rotary)
        tapped[len(self.layers)] = residual
        features = torch.cat([tapped[tap] for tap in self.taps], dim=-1)
        return TargetRows(features, rms_norm(residual, self.norm, self.config.rms_norm_eps))

    def _layer_forward(self, residual: Tensor, layer: DenseLayer, rotary: tuple[Tensor, Tensor]) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        num_seqs, length, _ = residual.shape
        rows = functional.linear(rms_norm(residual, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        heads = rows.view(num_seqs, length, -1, config.head_dim).transpose(1, 2)  # [num_seqs, heads, length, head_dim]
        query, key, value = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rms_norm(query, layer.query_norm, eps), rms_norm(key, layer.key_norm, eps)
        attended = functional.scaled_dot_product_attention(
            rotate(query, *rotary),
            rotate(key, *rotary),
            value,
            attn_mask=None if layer.window is None else _window_mask(length, layer.window, residual.device),
            is_causal=layer.window is None,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        attended = attended.transpose(1, 2).reshape(num_seqs, length, -1)
        residual = residual + functional.linear(attended, layer.attention_output, layer.attention_output_bias)
        rows = functional.linear(rms_norm(residual, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
        gate, up = rows.chunk(2, dim=-1)
        return residual + functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)

    def _layer(self, index: int) -> DenseLayer:
        prefix, config = f"model.layers.{index}", self.config
        has_window = config.sliding_window is not None and (
            config.sliding_layers is None or config.sliding_layers[index]
        )

        def joined(*names: str) -> Tensor:
            return torch.cat([self._matrix(f"{prefix}.{name}.weight") for name in names])

        def bias(*names: str) -> Tensor | None:
            found = [f"{prefix}.{name}.bias" for name in names if self._weights.has(f"{prefix}.{name}.bias")]
            return torch.cat([self._matrix(name) for name in found]) if found else None

        def head_norm(name: str) -> Tensor | None:
            return self._vector(f"{prefix}.self_attn.{name}.weight") if config.qk_norm else None

        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return DenseLayer(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight"),
            qkv=joined(*projections),
            qkv_bias=bias(*projections),
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            attention_output=joined("self_attn.o_proj"),
            attention_output_bias=bias("self_attn.o_proj"),
            mlp_norm=self._vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            gate_up_bias=bias("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
            down_bias=bias("mlp.down_proj"),
            window=config.sliding_window if has_window else None,
        )

    def _matrix(self, name: str) -> Tensor:
        return self._weights.weight(name).dense().to(self._device, self._dtype)

    def _vector(self, name: str) -> Tensor:
        return self._weights.weight(name).dense().to(self._device)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, computed in float32, returned in the dtype of ``rows``."""
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(rows.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[..., length, head_dim]``, the halves of a head turned against each other."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def fastest_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """bfloat16 where it multiplies matrices faster than float32, as with AMX or on a GPU; some CPUs crawl in it."""
    rows, columns = 512, 4 * config.hidden_size

    def seconds(dtype: torch.dtype) -> float:
        left = torch.ones(rows, config.hidden_size, dtype=dtype, device=device)
        right = torch.ones(columns, config.hidden_size, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(4):  # the first prepares
            begun_at = time.perf_counter()
            functional.linear(left, right).sum().item()  # waits for a GPU
            best = min(best, time.perf_counter() - begun_at)
        return best

    return torch.bfloat16 if seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a row ``[length, 1]`` sees a column ``[1, length]``."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)
