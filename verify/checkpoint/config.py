"""What a checkpoint says about its model, in one form whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


class UnsupportedCheckpoint(Exception):
    """The checkpoint cannot be served; the message names what is not supported and what is."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: ``theta`` and how its frequencies are stretched for long contexts.

    ``factor`` applies to ``linear``, ``llama3`` and ``yarn``; the next three to ``llama3``
    (``original_max_position`` to ``yarn`` too); the last four to ``yarn`` (Peng et al. 2023).
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer of the Llama family."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotation (Qwen3)
    sliding_window: int | None = None  # tokens a row sees, itself included; None: all
    sliding_layers: tuple[bool, ...] | None = None  # which layers have the window; None: every layer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
