"""Small EAGLE-3 drafts with random weights, and what they compute, in float64 and from their formulas alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

from outrider.draft.speculators import SpeculatorConfig, save_speculator, weight_shapes
from outrider.verify.checkpoint.config import ModelConfig, RopeConfig

VOCAB_SIZE = 259  # the tiny model's


def layer_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "tie_word_embeddings": False,
    }
    return ModelConfig(**{**values, **changes})


@dataclass(frozen=True)
class RandomSpeculator:
    """``weights`` by their names in the file, without the maps of tokens."""

    config: SpeculatorConfig
    weights: dict[str, Tensor]
    token_map: Tensor | None

    @staticmethod
    def make(
        seed: int, own_embedding: bool = False, layers: ModelConfig | None = None, **changes: Any
    ) -> RandomSpeculator:
        values: dict[str, Any] = {
            "layers": layers or layer_config(),
            "draft_vocab_size": 100,
            "taps": (1, 2, 3),
            "target_hidden_size": 48,
        }
        config = SpeculatorConfig(**{**values, **changes})
        generator = torch.Generator().manual_seed(seed)
        shapes = weight_shapes(config)
        if not own_embedding:
            del shapes["embed_tokens.weight"]
        weights = {}
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            scale = 0.7 if "embed" in name else shape[-1] ** -0.5
            weights[name] = 1 + 0.3 * noise if name.endswith("norm.weight") or "fc_norm" in name else scale * noise
            weights[name] = weights[name].bfloat16().float()
        token_map = None
        if config.draft_vocab_size < VOCAB_SIZE:
            token_map = torch.randperm(VOCAB_SIZE, generator=generator)[: config.draft_vocab_size].sort().values
        return RandomSpeculator(config, weights, token_map)

    def save(self, path: Path) -> Path:
        save_speculator(path, self.config, self.weights, self.token_map)
        return path

    def chain(
        self,
        token_ids: Sequence[int],
        features: Tensor,
        embedding: Tensor,
        num_tokens: int,
        unknown: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        """The likeliest guesses after ``token_ids``, and the probability of each.

        ``features`` ``[len(token_ids) - 1, num_taps * target's size]``: of all positions but the last;
        ``embedding`` ``[vocab_size, hidden_size]``: the target's table;
        ``unknown``: positions whose rows have no feature, beside the first.
        """
        weights = {name: weight.double() for name, weight in self.weights.items()}
        table = weights.get("embed_tokens.weight", embedding.double())
        fused = linear(self._normed(features.double(), weights), weights["fc.weight"])
        residuals = torch.cat(
            [torch.zeros(1, fused.shape[1], dtype=torch.float64), fused]
        )  # no feature before the first
        residuals[list(unknown)] = 0.0
        known, guesses, chances = list(token_ids), list[int](), list[float]()
        while True:
            last = self._rows(table[known], residuals, weights)[-1]
            probs = softmax(linear(self._norm(last, weights["norm.weight"]), weights["lm_head.weight"]), dim=-1)
            choice = int(probs.argmax())
            guesses.append(choice if self.token_map is None else int(self.token_map[choice]))
            chances.append(float(probs[choice]))
            if len(guesses) == num_tokens:
                return guesses, chances
            known.append(guesses[-1])
            residuals = torch.cat([residuals, last[None]])

    def _normed(self, features: Tensor, weights: dict[str, Tensor]) -> Tensor:
        match self.config.fusion_norm:
            case "none":
                return features
            case "all":
                return self._norm(features, weights["input_norm.weight"])
            case "each":
                parts = features.chunk(self.config.num_taps, dim=-1)
                return torch.cat([self._norm(p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.layers.rms_norm_eps).rsqrt() * weight

    def _rows(self, embeddings: Tensor, residual: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """All rows of a sequence at once: what the layers leave, ``[length, hidden_size]``."""
        layers = self.config.layers
        for index in range(layers.num_layers):
            layer = {
                name.removeprefix(f"layers.{index}."): weight
                for name, weight in weights.items()
                if name.startswith(f"layers.{index}.")
            }
            if index == 0:
                hidden = self._norm(residual, layer["hidden_norm.weight"])
                residual = hidden if self.config.norm_before_residual else residual
                hidden = torch.cat([self._norm(embeddings, layer["input_layernorm.weight"]), hidden], dim=-1)
            else:
                hidden = self._norm(residual, layer["input_layernorm.weight"])
            residual = residual + self._attention(hidden, layer)
            hidden = self._norm(residual, layer["post_attention_layernorm.weight"])
            gate, up = (
                linear(hidden, layer[f"mlp.{name}_proj.weight"], layer.get(f"mlp.{name}_proj.bias"))
                for name in ("gate", "up")
            )
            residual = residual + linear(
                silu(gate) * up, layer["mlp.down_proj.weight"], layer.get("mlp.down_proj.bias")
            )
        return residual

    def _attention(self, hidden: Tensor, layer: dict[str, Tensor]) -> Tensor:
        layers = self.config.layers

        def heads(name: str) -> Tensor:
            rows = linear(hidden, layer[f"self_attn.{name}_proj.weight"], layer.get(f"self_attn.{name}_proj.bias"))
            rows = rows.view(len(hidden), -1, layers.head_dim).transpose(0, 1)
            if layers.qk_norm and name != "v":
                rows = self._norm(rows, layer[f"self_attn.{name}_norm.weight"])
            return rows if name == "v" else _rotated(rows, layers.rope.theta)

        query, key, value = heads("q"), heads("k"), heads("v")
        repeats = layers.num_heads // layers.num_kv_heads
        key, value = key.repeat_interleave(repeats, dim=0), value.repeat_interleave(repeats, dim=0)
        scores = query @ key.transpose(1, 2) / layers.head_dim**0.5
        future = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
        attended = softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ value
        rows = attended.transpose(0, 1).reshape(len(hidden), -1)
        return linear(rows, layer["self_attn.o_proj.weight"], layer.get("self_attn.o_proj.bias"))


def _rotated(rows: Tensor, theta: float) -> Tensor:
    """``[num_heads, length, head_dim]``, each pair (i, i + head_dim / 2) turned by its angle."""
    half = rows.shape[-1] // 2
    angles = torch.arange(rows.shape[1])[:, None] * theta ** (-torch.arange(half).double() / half)
    first, second = rows[..., :half], rows[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
