"""The transformer, once for every model of the Llama family and for every implementation of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.draft_model import DraftModel
from outrider.kernels.operations import (
    AttentionPlan,
    DecoderLayer,
    DecoderPass,
    DecoderShape,
    Operations,
    PackedEmbedding,
    PackedLinear,
    RaggedBatch,
)
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.verify.checkpoint.checkpoint import Checkpoint
from outrider.verify.checkpoint.config import ModelConfig
from outrider.verify.rope import RotaryTable


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
        self._rotary = RotaryTable(self.config.rope, self.config.head_dim, max_context)
        embedding = checkpoint.weight("model.embed_tokens.weight")
        self._embedding = operations.pack_embedding(embedding)
        layers = [_load_layer(checkpoint, operations, index) for index in range(self.config.num_layers)]
        self._decoder = operations.pack_decoder(layers, _shape(self.config))
        self._has_window = {layer.has_window for layer in layers}
        self._norm = checkpoint.weight("model.norm.weight").dense()
        if self.config.tie_word_embeddings:
            self._head = operations.tied_head(self._embedding)
        else:
            self._head = operations.pack_head(checkpoint.weight("lm_head.weight"))

    @property
    def kv_layers(self) -> LayerGroup:
        """The room its keys and values need in every page."""
        config = self.config
        dtype, width = self._operations.kv_layout(config.head_dim)
        return LayerGroup(self._layer_group, config.num_layers, config.num_kv_heads, width, dtype)

    @property
    def embedding(self) -> PackedEmbedding:
        """The table of its tokens, which a draft conditioned on it may share."""
        return self._embedding

    @property
    def as_draft(self) -> DraftModel:
        """The same model as ``Operations.pack_draft`` takes it."""
        config = self.config
        return DraftModel(self._decoder, _shape(config), config.sliding_window, self._embedding, self._norm, self._head)

    def forward(self, token_ids: Tensor, batch: RaggedBatch, storage: KVStorage) -> Tensor:
        """Compute the rows of ``batch`` and write their keys and values.

        ``token_ids``: int64 ``[num_tokens]``. Returns the last hidden states ``[num_tokens, hidden_size]``,
        normalised, ready for ``logits``.
        """
        return self.normalized(self.residual(token_ids, batch, storage))

    def forward_tapped(
        self, token_ids: Tensor, batch: RaggedBatch, storage: KVStorage, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """``forward``, and beside it the residual stream at ``taps``: ``[num_tokens, len(taps) * hidden_size]``.

        A tap is the layer before which it is taken; ``num_layers`` is what the last one left.
        """
        tapped = torch.empty(len(token_ids), len(taps) * self.config.hidden_size)
        return self.normalized(self.residual(token_ids, batch, storage, taps, tapped)), tapped

    def residual(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        storage: KVStorage,
        taps: tuple[int, ...] = (),
        tapped: Tensor | None = None,
    ) -> Tensor:
        """As ``forward``, but what the layers left ``[num_tokens, hidden_size]``, not normalised."""
        ops = self._operations
        cos, sin = self._rotary.of(batch)
        plans = self._plans(batch, storage.page_size)
        decoder_pass = DecoderPass(cos, sin, *plans, taps=taps, tapped=tapped)
        residual = ops.embedding(token_ids, self._embedding)
        return ops.decode(residual, self._decoder, storage.layers(self._layer_group), decoder_pass)

    def copy_kv(self, storage: KVStorage, source_slots: Sequence[int], destination_slots: Sequence[int]) -> None:
        """Copy the keys and values of tokens, as ``Operations.copy_kv`` does."""
        self._operations.copy_kv(storage.layers(self._layer_group), source_slots, destination_slots)

    def normalized(self, residual: Tensor) -> Tensor:
        """What ``logits`` takes, of the residual stream behind the layers ``[num_rows, hidden_size]``."""
        return self._operations.rms_norm(residual, self._norm, self.config.rms_norm_eps)

    @property
    def rotary(self) -> RotaryTable:
        """The angles of its positions."""
        return self._rotary

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: ``[num_rows, hidden_size]`` from ``forward`` to ``[num_rows, vocab_size]``."""
        return self._operations.linear(hidden, self._head)

    def _plans(self, batch: RaggedBatch, page_size: int) -> tuple[AttentionPlan | None, AttentionPlan | None]:
        """One plan for the layers that see everything, one for those with a window; None where there are none."""
        config = self.config

        def plan(window: int | None) -> AttentionPlan:
            return self._operations.plan_attention(
                batch, page_size, config.num_heads, config.num_kv_heads, config.head_dim, window
            )

        full = plan(None) if False in self._has_window else None
        return full, plan(config.sliding_window) if True in self._has_window else None


def _shape(config: ModelConfig) -> DecoderShape:
    return DecoderShape(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


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
