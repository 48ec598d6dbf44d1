"""A head conditioned on the target: EAGLE-3 (Li et al. 2025, 2503.01840).

The target's residual stream at a few depths is fused to one hidden state, which a layer or two read beside the
embedding of the token that was chosen there. What they leave guesses the next token, and is the hidden state of the
chain's next row in place of the target's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.draft.speculators import Speculator
from outrider.kernels.draft_model import DraftModel, PackedDraft
from outrider.kernels.operations import (
    AttentionPlan,
    DecoderLayer,
    DecoderPass,
    DecoderShape,
    Operations,
    PackedLinear,
    RaggedBatch,
)
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.rope import RotaryTable
from outrider.verify.transformer import Transformer

LAYER_GROUP = "draft"


class Eagle3Head:
    """A ``DraftNetwork`` over a draft in the speculators format.

    Raises:
        UnsupportedCheckpoint: it cannot be read, or was not made for this target.
    """

    def __init__(self, path: Path, target: Transformer, operations: Operations, max_context: int) -> None:
        speculator = Speculator(path)
        config = speculator.config
        self.config = config
        self._name = path.name
        self._fingerprint = speculator.fingerprint
        self._operations = operations
        self._taps = config.taps_in(target.config.num_layers)
        _check_target(path, speculator, target, self._taps)
        layers = config.layers
        self._rotary = RotaryTable(layers.rope, layers.head_dim, max_context)
        self._fusion_norms = _fusion_norms(speculator)
        self._fusion = operations.pack_linear([speculator.weight("fc.weight")])
        packed_layers = [_load_layer(speculator, operations, index) for index in range(layers.num_layers)]
        shape = DecoderShape(
            layers.hidden_size, layers.num_heads, layers.num_kv_heads, layers.head_dim, layers.rms_norm_eps
        )
        self._model = DraftModel(
            decoder=operations.pack_decoder(packed_layers, shape),
            shape=shape,
            sliding_window=layers.sliding_window,
            embedding=operations.pack_embedding(speculator.weight("embed_tokens.weight"))
            if speculator.has("embed_tokens.weight")
            else target.embedding,
            norm=speculator.weight("norm.weight").dense(),
            head=operations.pack_head(speculator.weight("lm_head.weight")),
            token_map=speculator.token_map,
            conditioned=True,
        )
        self._windows = {layer.has_window for layer in packed_layers}
        self._packed = operations.pack_draft(self._model)

    @property
    def name(self) -> str:
        return self._name

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def kv_layers(self) -> LayerGroup:
        layers = self.config.layers
        dtype, width = self._operations.kv_layout(layers.head_dim)
        return LayerGroup(LAYER_GROUP, layers.num_layers, layers.num_kv_heads, width, dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    @property
    def feature_size(self) -> int:
        return len(self._taps) * self.config.target_hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.layers.vocab_size

    @property
    def packed(self) -> PackedDraft:
        return self._packed

    @property
    def rotary(self) -> RotaryTable:
        return self._rotary

    def fused(self, features: Tensor) -> Tensor:
        """One hidden state for each row of features: ``[n, len(taps) * target's size]`` to ``[n, hidden_size]``."""
        ops, eps = self._operations, self.config.layers.rms_norm_eps
        if self.config.fusion_norm == "all":
            features = ops.rms_norm(features, self._fusion_norms[0], eps)
        elif self.config.fusion_norm == "each":
            parts = features.chunk(len(self._taps), dim=1)
            norms = zip(parts, self._fusion_norms, strict=True)
            features = torch.cat([ops.rms_norm(part.contiguous(), norm, eps) for part, norm in norms], dim=1)
        return ops.linear(features, self._fusion)

    def residual(self, token_ids: Tensor, features: Tensor | None, batch: RaggedBatch, storage: KVStorage) -> Tensor:
        ops, model = self._operations, self._model
        residual = torch.zeros(len(token_ids), model.shape.hidden_size) if features is None else self.fused(features)
        cos, sin = self._rotary.of(batch)
        embeddings = ops.embedding(token_ids, model.embedding)

        def plan(window: int | None) -> AttentionPlan:
            shape = model.shape
            return ops.plan_attention(
                batch, storage.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, window
            )

        full_plan = plan(None) if False in self._windows else None
        window_plan = plan(model.sliding_window) if True in self._windows else None
        decoder_pass = DecoderPass(cos, sin, full_plan, window_plan, embeddings)
        return ops.decode(residual, model.decoder, storage.layers(LAYER_GROUP), decoder_pass)


def _check_target(path: Path, speculator: Speculator, target: Transformer, taps: tuple[int, ...]) -> None:
    config, wanted = speculator.config, target.config
    if (config.target_hidden_size, config.layers.vocab_size) != (wanted.hidden_size, wanted.vocab_size):
        raise UnsupportedCheckpoint(
            f"the draft {path} was made for a target of hidden size {config.target_hidden_size} with "
            f"{config.layers.vocab_size} tokens{_named(config.target_name)}; this one has {wanted.hidden_size} and "
            f"{wanted.vocab_size}"
        )
    if min(taps) < 0 or max(taps) > wanted.num_layers:
        raise UnsupportedCheckpoint(
            f"the draft {path} reads the target before layers {taps}; this target has {wanted.num_layers} layers"
        )
    if not speculator.has("embed_tokens.weight") and config.layers.hidden_size != wanted.hidden_size:
        raise UnsupportedCheckpoint(
            f"the draft {path} has no embed_tokens, and its hidden size of {config.layers.hidden_size} cannot use the "
            f"target's, of {wanted.hidden_size}"
        )


def _named(target: str) -> str:
    return f" ({target})" if target else ""


def _fusion_norms(speculator: Speculator) -> list[Tensor]:
    names = ["input_norm", *(f"fc_norm.{tap}" for tap in range(speculator.config.num_taps))]
    return [speculator.weight(f"{name}.weight").dense() for name in names if speculator.has(f"{name}.weight")]


def _load_layer(speculator: Speculator, operations: Operations, index: int) -> DecoderLayer:
    config, prefix = speculator.config.layers, f"layers.{index}"

    def vector(name: str) -> Tensor:
        return speculator.weight(f"{prefix}.{name}.weight").dense()

    def linear(*names: str) -> PackedLinear:
        weights = [speculator.weight(f"{prefix}.{name}.weight") for name in names]
        bias_names = [f"{prefix}.{name}.bias" for name in names]
        biases = [speculator.weight(name).dense() for name in bias_names if speculator.has(name)]
        return operations.pack_linear(weights, torch.cat(biases) if biases else None)

    def head_norms() -> Tensor:
        query, key = vector("self_attn.q_norm"), vector("self_attn.k_norm")
        return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])

    is_wide, sliding = index == 0, config.sliding_layers
    return DecoderLayer(
        input_norm=vector("hidden_norm" if is_wide else "input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_key_norm=head_norms() if config.qk_norm else None,
        attention_output=linear("self_attn.o_proj"),
        mlp_norm=vector("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        has_window=config.sliding_window is not None and (sliding is None or sliding[index]),
        embedding_norm=vector("input_layernorm") if is_wide else None,
        norm_before_residual=is_wide and speculator.config.norm_before_residual,
    )
