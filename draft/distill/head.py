"""The draft as it is trained: an EAGLE-3 head (Li et al. 2025, 2503.01840) with float32 weights.

Row ``q`` reads token ``x_q`` and the target's feature ``f_{q-1}`` and predicts ``x_{q+1}``. The feature, the target's
residual stream at three depths, is fused to one hidden state; the first layer reads it beside the token's embedding.
Later rows of a chain read, in place of the feature, what the row before them left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outrider.draft.distill.dense_target import rms_norm, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rms_norm_eps: float

    @property
    def attention_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_kv_heads * self.head_dim


KeysAndValues = tuple[Tensor, Tensor]
"""Of one layer and unrolled step, each ``[num_seqs, num_heads, length, head_dim]``."""


class DraftHead:
    """Weights by the names that EAGLE-3 checkpoints give them.

    ``fc.weight`` ``[hidden, 3 * hidden]`` fuses the feature; ``layers.0`` is wide (its projections have ``2 * hidden``
    inputs; ``input_layernorm`` is for the embedding, ``hidden_norm`` for the residual stream), later layers are not;
    ``norm`` and ``lm_head`` ``[draft_vocab, hidden]`` follow.
    """

    def __init__(self, shape: HeadShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        # Sorted: the optimizers know weights by their place, wherever they come from.
        self.weights = {name: weights[name].detach().float().requires_grad_() for name in sorted(weights)}

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """What maps hidden states to hidden states."""
        return ((name, weight) for name, weight in self.weights.items() if _is_matrix(name, weight))

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """The norms, and the head over words."""
        return ((name, weight) for name, weight in self.weights.items() if not _is_matrix(name, weight))

    def ready(self, dtype: torch.dtype) -> ReadyHead:
        """The weights in the dtype to compute in, for one training step."""
        return ReadyHead(self.shape, {n: w.to(dtype) if w.ndim == 2 else w for n, w in self.weights.items()})


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and name != "lm_head.weight"


class ReadyHead:
    """The head's computations; gradients flow to the weights it was made from."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._weights = weights
        self._qkv = [
            torch.cat([weights[f"layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"])
            for layer in range(shape.num_layers)
        ]

    def fuse(self, features: Tensor) -> Tensor:
        """Features ``[..., 3 * hidden]`` to residuals ``[..., hidden]``."""
        return functional.linear(features, self._weights["fc.weight"])

    def qkv(self, layer: int, embeddings: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Queries, keys and values ``[num_seqs, num_heads, length, head_dim]``, the shared ones of keys repeated.

        ``embeddings``, ``residual``: ``[num_seqs, length, hidden]``; ``rotary``: of the positions ``0 .. length - 1``.
        """
        shape, prefix, eps = self.shape, f"layers.{layer}", self.shape.rms_norm_eps
        if layer == 0:
            words = rms_norm(embeddings, self._weights[f"{prefix}.input_layernorm.weight"], eps)
            rows = torch.cat([words, rms_norm(residual, self._weights[f"{prefix}.hidden_norm.weight"], eps)], dim=-1)
        else:
            rows = rms_norm(residual, self._weights[f"{prefix}.input_layernorm.weight"], eps)
        heads = functional.linear(rows, self._qkv[layer]).view(*rows.shape[:2], -1, shape.head_dim).transpose(1, 2)
        query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        repeats = shape.num_heads // shape.num_kv_heads
        shared = (rotate(key, *rotary), value)
        return [rotate(query, *rotary), *(part.repeat_interleave(repeats, dim=1) for part in shared)]

    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """What a layer does with attention's result ``[num_seqs, num_heads, length, head_dim]``."""
        prefix, weights = f"layers.{layer}", self._weights
        rows = attended.transpose(1, 2).flatten(2)
        residual = residual + functional.linear(rows, weights[f"{prefix}.self_attn.o_proj.weight"])
        norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        hidden = rms_norm(residual, norm, self.shape.rms_norm_eps)
        gate = functional.linear(hidden, weights[f"{prefix}.mlp.gate_proj.weight"])
        up = functional.linear(hidden, weights[f"{prefix}.mlp.up_proj.weight"])
        return residual + functional.linear(functional.silu(gate) * up, weights[f"{prefix}.mlp.down_proj.weight"])

    def logits(self, residual: Tensor) -> Tensor:
        """``[num_rows, hidden]`` to scores of the draft's words ``[num_rows, draft_vocab]``."""
        hidden = rms_norm(residual, self._weights["norm.weight"], self.shape.rms_norm_eps)
        return functional.linear(hidden, self._weights["lm_head.weight"])
