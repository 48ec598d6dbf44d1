"""A model's configuration from a GGUF file's metadata."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from outrider.verify.checkpoint.config import Architecture, ModelConfig, RopeConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf_metadata import GGUFHeader
from outrider.verify.checkpoint.gguf_tokenizer import end_token_ids

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, ``[head_dim // 2]``: how GGUF keeps llama3's scaling."""

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_F32_TYPE_ID = 0
_LLAMA3_ORIGINAL_CONTEXT = 8192
_MIN_ROPE_FACTOR = 0.9999  # 1, but for rounding
_YARN_LOG_SCALE = 0.1
_MAX_F32 = 3.4e38


def read_config(header: GGUFHeader) -> ModelConfig:
    """The configuration in ``header``.

    Raises:
        UnsupportedCheckpoint: the architecture, or something it uses, is not supported.
    """
    name = header.text("general.architecture")
    architecture = _ARCHITECTURES.get(name or "")
    if architecture is None:
        raise UnsupportedCheckpoint(
            f"{header.path} is a model of architecture {name!r}; "
            f"supported in GGUF files are {', '.join(_ARCHITECTURES)} (Mistral models call themselves llama)"
        )
    return _Reader(header, architecture).config()


@dataclass(frozen=True, slots=True)
class _Reader:
    header: GGUFHeader
    architecture: Architecture

    def config(self) -> ModelConfig:
        self._refuse_unsupported()
        embedding = self.header.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise UnsupportedCheckpoint(f"{self.header.path} lacks the tensor token_embd.weight")
        hidden_size = self._required("embedding_length")
        num_heads = self._required("attention.head_count")
        head_dim = self._integer("attention.key_length") or hidden_size // num_heads
        self._require_equal("attention.value_length", head_dim)
        self._require_equal("rope.dimension_count", head_dim)
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=self._required("feed_forward_length"),
            num_layers=self._required("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._integer("attention.head_count_kv") or num_heads,
            head_dim=head_dim,
            max_position_embeddings=self._required("context_length"),
            rms_norm_eps=self._rms_norm_eps(),
            rope=self._rope(head_dim),
            tie_word_embeddings="output.weight" not in self.header.tensors,
            attention_bias="blk.0.attn_q.bias" in self.header.tensors,
            attention_output_bias="blk.0.attn_output.bias" in self.header.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self.header.tensors,
            qk_norm=self.architecture == "qwen3",
            sliding_window=self._integer("attention.sliding_window") or None,
            bos_token_id=self.header.integer("tokenizer.ggml.bos_token_id"),
            eos_token_ids=end_token_ids(self.header),
        )

    def _refuse_unsupported(self) -> None:
        if self._integer("expert_count"):
            raise UnsupportedCheckpoint(f"{self.header.path} is a mixture of experts, which is not supported")
        if self._integer("attention.sliding_window_pattern"):
            raise UnsupportedCheckpoint(f"{self.header.path} has a pattern of sliding windows, which is not supported")

    def _rms_norm_eps(self) -> float:
        eps = self.header.number(f"{self.architecture}.attention.layer_norm_rms_epsilon")
        if eps is None:
            raise UnsupportedCheckpoint(
                f"{self.header.path} lacks {self.architecture}.attention.layer_norm_rms_epsilon"
            )
        return _shortest_float(eps)

    def _rope(self, head_dim: int) -> RopeConfig:
        prefix = f"{self.architecture}.rope"
        theta = self.header.number(f"{prefix}.freq_base") or 10000.0
        if not theta > 0:
            raise UnsupportedCheckpoint(f"{self.header.path} says {theta} for {prefix}.freq_base")
        rope = RopeConfig(theta=_shortest_float(theta))
        if ROPE_FACTORS in self.header.tensors:
            return self._llama3_rope(rope, head_dim)
        legacy_factor = self.header.number(f"{prefix}.scale_linear")
        kind = self.header.text(f"{prefix}.scaling.type") or ("linear" if legacy_factor else "none")
        factor = self.header.number(f"{prefix}.scaling.factor") or legacy_factor or 1.0
        if kind == "none" or factor == 1.0:
            return rope
        if kind == "linear":
            return replace(rope, scaling="linear", factor=factor)
        if kind == "yarn":
            return self._yarn_rope(rope, factor)
        raise UnsupportedCheckpoint(
            f"{self.header.path} scales its rotary embedding by {kind!r}; supported are linear, yarn and llama3"
        )

    def _yarn_rope(self, rope: RopeConfig, factor: float) -> RopeConfig:
        scaling = f"{self.architecture}.rope.scaling"
        original = self._integer("rope.scaling.original_context_length") or self._required("context_length")
        # llama.cpp multiplies YaRN's own attention factor by this one.
        extra = self.header.number(f"{scaling}.yarn_attn_factor") or self.header.number(f"{scaling}.attn_factor")
        attention_factor = None if extra in (None, 1.0) else extra * (1.0 + _YARN_LOG_SCALE * math.log(factor))
        if self.header.number(f"{scaling}.yarn_log_multiplier") is not None:
            raise UnsupportedCheckpoint(f"{self.header.path} sets yarn_log_multiplier, which is not supported")
        return replace(
            rope,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=self.header.number(f"{scaling}.yarn_beta_fast") or rope.beta_fast,
            beta_slow=self.header.number(f"{scaling}.yarn_beta_slow") or rope.beta_slow,
            attention_factor=attention_factor,
        )

    def _llama3_rope(self, rope: RopeConfig, head_dim: int) -> RopeConfig:
        """Recover llama3's parameters from the divisors they gave; refuse divisors they do not give."""
        factors = self._rope_factors(head_dim)
        if not all(_MIN_ROPE_FACTOR <= factor < math.inf for factor in factors):
            raise UnsupportedCheckpoint(f"{self.header.path}: {ROPE_FACTORS} holds {min(factors)}, less than 1")
        factor = float(f"{max(factors):.4g}")
        if factor == 1.0:
            return rope
        original = self._integer("rope.scaling.original_context_length") or _LLAMA3_ORIGINAL_CONTEXT
        guess = replace(rope, scaling="llama3", factor=factor, original_max_position=original)
        expected = llama3_factors(guess, head_dim)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
            raise UnsupportedCheckpoint(
                f"{self.header.path}: {ROPE_FACTORS} is not what llama3's scaling by {guess.factor} "
                f"from {original} positions gives; other frequency factors are not supported"
            )
        return guess

    def _rope_factors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self.header.tensors[ROPE_FACTORS]
        layout = struct.Struct(f"<{head_dim // 2}f")
        fits = tensor.start + layout.size <= len(self.header.buffer)
        if tensor.type_id != _F32_TYPE_ID or tensor.shape != (head_dim // 2,) or not fits:
            raise UnsupportedCheckpoint(f"{self.header.path}: {ROPE_FACTORS} is not {head_dim // 2} F32 values")
        return layout.unpack_from(self.header.buffer, tensor.start)

    def _integer(self, key: str) -> int | None:
        """An integer, also where the file gives the same one for every layer."""
        full_key = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full_key)
        if isinstance(value, tuple):
            if len(set(value)) == 1 and isinstance(value[0], int):
                return value[0]
            raise UnsupportedCheckpoint(f"{self.header.path}: {full_key} differs from layer to layer: not supported")
        return self.header.integer(full_key)

    def _required(self, key: str) -> int:
        value = self._integer(key)
        if value is None or value <= 0:
            problem = "lacks" if value is None else f"says {value} for"
            raise UnsupportedCheckpoint(f"{self.header.path} {problem} {self.architecture}.{key}")
        return value

    def _require_equal(self, key: str, head_dim: int) -> None:
        value = self._integer(key)
        if value is not None and value != head_dim:
            raise UnsupportedCheckpoint(
                f"{self.header.path}: {self.architecture}.{key} is {value} and the heads are of {head_dim}; "
                "they must be equal"
            )


def llama3_factors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What llama3's scaling divides each of the ``head_dim // 2`` rotary frequencies by.

    Source: Llama 3.1's reference code (``apply_scaling``), also in transformers' ``modeling_rope_utils``.
    """
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * i / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope.factor)
        else:
            smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            factors.append(1.0 / ((1.0 - smooth) / rope.factor + smooth))
    return factors


def _shortest_float(value: float) -> float:
    """The shortest decimal with the same float32: 1e-05, where the file's own bits read 9.999999747378752e-06."""
    if not abs(value) < _MAX_F32:
        return value
    for digits in range(6, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
