"""The transformer, once for every model of the Llama family and for every implementation of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.operations import AttentionPlan, Operations, PackedLinear, RaggedBatch
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.verify.checkpoint.checkpoint import Checkpoint
from outrider.verify.checkpoint.config import ModelConfig
from outrider.verify.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer, packed by the kernels that will read them."""

    input_norm: Tensor  # [hidden_size]
    qkv: PackedLinear
    query_key_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], a weight for each head of q, then of k
    attention_output: PackedLinear
    mlp_norm: Tensor  # [hidden_size]
    gate_up: PackedLinear
    down: PackedLinear
    has_window: bool


class Transformer:
    """A decoder-only transformer whose keys and values live in pages.

    ``layer_group`` is the name of its layers in the ``KVStorage``: a draft model is a second transformer
    with a group of its own in the same pages.
    """

    def __init__(
        self, checkpoint: Checkpoint, operations: Operations, max_context: int, layer_group: str = "target"
    ) -> None:
        self.config = checkpoint.config
        self._operations = operations
        self._layer_group = layer_group
        self._scale = self.config.head_dim**-0.5
        self._rotary = RotaryTable(self.config.rope, self.config.head_dim, max_context)
        embedding = checkpoint.weight("model.embed_tokens.weight")
        self._embedding = operations.pack_embedding(embedding)
        self._layers = [_load_layer(checkpoint, operations, index) for index in range(self.config.num_layers)]
        self._norm = checkpoint.weight("model.norm.weight").dense()
        head = embedding if self.config.tie_word_embeddings else checkpoint.weight("lm_head.weight")
        self._head = operations.pack_linear([head])

    @property
    def kv_layers(self) -> LayerGroup:
        """The room its keys and values need in every page."""
        config = self.config
        return LayerGroup(self._layer_group, config.num_layers, config.num_kv_heads, config.head_dim, torch.float32)

    def forward(self, token_ids: Tensor, batch: RaggedBatch, storage: KVStorage) -> Tensor:
        """Compute the rows of ``batch`` and write their keys and values.

        ``token_ids``: int64 ``[num_tokens]``. Returns the last hidden states ``[num_tokens, hidden_size]``,
        normalised, ready for ``logits``.
        """
        ops, eps = self._operations, self.config.rms_norm_eps
        cos, sin = self._rotary.at(torch.from_numpy(batch.positions))
        full_plan, window_plan = self._plans(batch, storage.page_size)
        residual = ops.embedding(token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            plan = window_plan if layer.has_window else full_plan
            assert plan is not None
            attended = self._attention(layer, index, hidden, cos, sin, storage, plan)
            hidden, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            transformed = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
            is_last = index + 1 == len(self._layers)
            next_norm = self._norm if is_last else self._layers[index + 1].input_norm
            hidden, residual = ops.add_rms_norm(transformed, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: ``[num_rows, hidden_size]`` from ``forward`` to ``[num_rows, vocab_size]``."""
        return self._operations.linear(hidden, self._head)

    def _attention(
        self,
        layer: DecoderLayer,
        index: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        storage: KVStorage,
        plan: AttentionPlan,
    ) -> Tensor:
        ops, config = self._operations, self.config
        qkv = ops.linear(hidden, layer.qkv).view(len(hidden), -1, config.head_dim)
        query_key, value = qkv.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            query_key = ops.rms_norm(query_key, layer.query_key_norm, config.rms_norm_eps)
        query, key = ops.rotary(query_key, cos, sin).split((config.num_heads, config.num_kv_heads), dim=1)
        keys, values = storage.keys(self._layer_group, index), storage.values(self._layer_group, index)
        ops.write_kv(key, value, keys, values, plan)
        attended = ops.paged_attention(query, keys, values, self._scale, plan)
        return ops.linear(attended.reshape(len(hidden), -1), layer.attention_output)

    def _plans(self, batch: RaggedBatch, page_size: int) -> tuple[AttentionPlan | None, AttentionPlan | None]:
        """One plan for the layers that see everything, one for those with a window; None where there are none."""
        config = self.config

        def plan(window: int | None) -> AttentionPlan:
            return self._operations.plan_attention(
                batch, page_size, config.num_heads, config.num_kv_heads, config.head_dim, window
            )

        windows = {layer.has_window for layer in self._layers}
        return plan(None) if False in windows else None, plan(config.sliding_window) if True in windows else None


def _load_layer(checkpoint: Checkpoint, operations: Operations, index: int) -> DecoderLayer:
    config = checkpoint.config
    prefix = f"model.layers.{index}"

    def vector(name: str) -> Tensor:
        return checkpoint.weight(f"{prefix}.{name}.weight").dense()

    def linear(*names: str) -> PackedLinear:
        weights = [checkpoint.weight(f"{prefix}.{name}.weight") for name in names]
        bias_names = [f"{prefix}.{name}.bias" for name in names]
        biases = [checkpoint.weight(name) for name in bias_names if checkpoint.has(name)]
        return operations.pack_linear(weights, torch.cat([bias.dense() for bias in biases]) if biases else None)

    def head_norms() -> Tensor:
        query, key = vector("self_attn.q_norm"), vector("self_attn.k_norm")
        return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])

    return DecoderLayer(
        input_norm=vector("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_key_norm=head_norms() if config.qk_norm else None,
        attention_output=linear("self_attn.o_proj"),
        mlp_norm=vector("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        has_window=_has_window(config, index),
    )


def _has_window(config: ModelConfig, layer: int) -> bool:
    if config.sliding_window is None:
        return False
    return config.sliding_layers is None or config.sliding_layers[layer]
