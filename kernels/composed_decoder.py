"""The layers of a decoder, composed of the small operations: what every fused ``decode`` must compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.operations import AttentionPlan, DecoderLayer, DecoderPass, DecoderShape, Operations


@dataclass(frozen=True, slots=True)
class ComposedDecoder:
    """A ``PackedDecoder`` for implementations that fuse nothing."""

    layers: Sequence[DecoderLayer]
    shape: DecoderShape

    def run(
        self,
        ops: Operations,
        residual: Tensor,
        cache: Tensor,
        decoder_pass: DecoderPass,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> Tensor:
        """``Operations.decode``, operation by operation."""
        eps = self.shape.rms_norm_eps
        for index in range(len(self.layers))[first_layer:last_layer]:
            layer = self.layers[index]
            tap(decoder_pass, index, residual)
            hidden = ops.rms_norm(residual, layer.input_norm, eps)
            if layer.embedding_norm is not None:
                assert decoder_pass.embeddings is not None, "a wide layer reads embeddings"
                residual = hidden if layer.norm_before_residual else residual
                embeddings = ops.rms_norm(decoder_pass.embeddings, layer.embedding_norm, eps)
                hidden = torch.cat([embeddings, hidden], dim=-1)
            residual = residual + self._attention(ops, layer, hidden, cache[index], decoder_pass)
            hidden = ops.rms_norm(residual, layer.mlp_norm, eps)
            residual = residual + ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
        if last_layer is None or last_layer == len(self.layers):
            tap(decoder_pass, len(self.layers), residual)
        return residual

    def _attention(
        self, ops: Operations, layer: DecoderLayer, hidden: Tensor, cache: Tensor, decoder_pass: DecoderPass
    ) -> Tensor:
        """``cache``: ``[2, num_pages, ...]``, this layer's keys and values."""
        shape, plan = self.shape, _plan(layer, decoder_pass)
        qkv = ops.linear(hidden, layer.qkv).view(len(hidden), -1, shape.head_dim)
        query_key, value = qkv.split((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            query_key = ops.rms_norm(query_key, layer.query_key_norm, shape.rms_norm_eps)
        rotated = ops.rotary(query_key, decoder_pass.cos, decoder_pass.sin)
        query, key = rotated.split((shape.num_heads, shape.num_kv_heads), dim=1)
        ops.write_kv(key, value, cache[0], cache[1], plan)
        attended = ops.paged_attention(query, cache[0], cache[1], shape.attention_scale, plan)
        return ops.linear(attended.reshape(len(hidden), -1), layer.attention_output)


def tap(decoder_pass: DecoderPass, layer: int, residual: Tensor) -> None:
    """Keep the residual stream before ``layer``, for every tap there."""
    hidden_size = residual.shape[1]
    for place, wanted in enumerate(decoder_pass.taps):
        if wanted == layer:
            assert decoder_pass.tapped is not None, "taps need room"
            decoder_pass.tapped[:, place * hidden_size : (place + 1) * hidden_size] = residual


def _plan(layer: DecoderLayer, decoder_pass: DecoderPass) -> AttentionPlan:
    plan = decoder_pass.window_plan if layer.has_window else decoder_pass.full_plan
    assert plan is not None
    return plan
