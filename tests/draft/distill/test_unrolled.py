"""Unrolled training beside chains that are run one by one, row by row, as they will be drafted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from outrider.draft.distill.head import DraftHead, HeadShape
from outrider.draft.distill.unrolled import acceptance_loss, unroll

LENGTH, STEPS = 9, 4


def random_weights(shape: HeadShape, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, width = shape.hidden_size, shape.intermediate_size
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    sizes["lm_head.weight"] = (shape.draft_vocab_size, hidden)
    for layer in range(shape.num_layers):
        inputs = 2 * hidden if layer == 0 else hidden
        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * (layer == 0)
        parts = {
            "self_attn.q_proj": (shape.attention_size, inputs),
            "self_attn.k_proj": (shape.key_value_size, inputs),
            "self_attn.v_proj": (shape.key_value_size, inputs),
            "self_attn.o_proj": (hidden, shape.attention_size),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        } | dict.fromkeys(norms, (hidden,))
        sizes |= {f"layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return {name: torch.randn(*size, generator=generator) * 0.4 for name, size in sizes.items()}


class OneByOne:
    """EAGLE-3's head for one row at a time, with keys and values in lists, written from the paper."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def row(
        self, residual: Tensor, embedding: Tensor, position: int, caches: list[list[tuple[Tensor, Tensor]]]
    ) -> Tensor:
        """The residual stream ``[hidden]`` after the layers; the row's keys and values are appended."""
        for layer, cache in enumerate(caches):
            own = {n.removeprefix(f"layers.{layer}."): w for n, w in self.weights.items()}
            if layer == 0:
                read = [
                    self.norm(embedding, own["input_layernorm.weight"]),
                    self.norm(residual, own["hidden_norm.weight"]),
                ]
                read_row = torch.cat(read)
            else:
                read_row = self.norm(residual, own["input_layernorm.weight"])
            query, key, value = (
                (own[f"self_attn.{name}_proj.weight"] @ read_row).view(-1, self.shape.head_dim) for name in "qkv"
            )
            cache.append((self.turned(key, position), value))
            heads = []
            for head, one in enumerate(self.turned(query, position)):
                shared = head * self.shape.num_kv_heads // self.shape.num_heads
                scores = torch.stack([one @ k[shared] for k, _ in cache]) / math.sqrt(self.shape.head_dim)
                share = torch.exp(scores) / torch.exp(scores).sum()
                heads.append(sum((s * v[shared] for s, (_, v) in zip(share, cache, strict=True)), torch.zeros(1)))
            residual = residual + own["self_attn.o_proj.weight"] @ torch.cat(heads)
            rows = self.norm(residual, own["post_attention_layernorm.weight"])
            gate = own["mlp.gate_proj.weight"] @ rows
            residual = residual + own["mlp.down_proj.weight"] @ (
                gate / (1 + torch.exp(-gate)) * (own["mlp.up_proj.weight"] @ rows)
            )
        return residual

    def norm(self, row: Tensor, weight: Tensor) -> Tensor:
        return row / math.sqrt(float(row @ row) / len(row) + self.shape.rms_norm_eps) * weight

    def turned(self, heads: Tensor, position: int) -> Tensor:
        half = self.shape.head_dim // 2
        pairs = torch.complex(heads[:, :half], heads[:, half:])
        angles = torch.tensor([position * 10000.0 ** (-i / half) for i in range(half)])
        turned = pairs * torch.polar(torch.ones(half), angles)
        return torch.cat([turned.real, turned.imag], dim=1)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_chain_is_the_one_that_will_be_drafted(num_layers: int) -> None:
    shape = HeadShape(
        16, 24, num_layers, num_heads=4, num_kv_heads=2, head_dim=4, draft_vocab_size=10, rms_norm_eps=1e-5
    )
    weights = random_weights(shape)
    generator = torch.Generator().manual_seed(3)
    embeddings, features = torch.randn(LENGTH, 16, generator=generator), torch.randn(LENGTH, 48, generator=generator)
    half = shape.head_dim // 2
    angles = torch.arange(LENGTH)[:, None] * torch.tensor([10000.0 ** (-i / half) for i in range(half)])
    ready = DraftHead(shape, weights).ready(torch.float32)
    found = [
        residual[0].detach()
        for residual in unroll(ready, embeddings[None], features[None], (angles.cos(), angles.sin()), STEPS)
    ]

    oracle = OneByOne(shape, weights)
    for begin in range(LENGTH):
        caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]
        for row in range(begin + 1):  # true rows
            fused = weights["fc.weight"] @ features[row - 1] if row else torch.zeros(16)
            residual = oracle.row(fused, embeddings[row], row, caches)
        for step in range(STEPS):
            row = begin + step
            if row >= LENGTH:
                break
            if step:
                residual = oracle.row(residual, embeddings[row], row, caches)
            torch.testing.assert_close(found[step][row], residual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("directness", [0.0, 0.3, 1.0])
def test_the_loss_is_the_total_variation_and_its_gradient_the_mix_that_autograd_finds(directness: float) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 30, generator=generator).requires_grad_()
    probs = torch.randn(6, 30, generator=generator).mul(3).softmax(dim=-1)
    row_weights = torch.rand(6, generator=generator)

    loss = acceptance_loss(logits, probs, row_weights, directness)
    (found,) = torch.autograd.grad(loss * 2, logits)

    own = logits.softmax(dim=-1)
    total_variation = (own - probs).abs().sum(dim=-1) / 2
    divergence = (probs * (probs.log() - logits.log_softmax(dim=-1))).sum(dim=-1)
    mixed = (directness * total_variation + (1 - directness) * divergence) * row_weights
    (wanted,) = torch.autograd.grad(2 * mixed.sum(), logits)
    torch.testing.assert_close(loss, (total_variation * row_weights).sum())
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
