"""A model's configuration from the JSON files of a Hugging Face directory.

Defaults where a key is absent are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.verify.checkpoint.config import Architecture, ModelConfig, RopeConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.json_files import read_json, token_ids

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_QWEN3_HEAD_DIM = 128
_MISTRAL_SLIDING_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28


def read_config(path: Path) -> ModelConfig:
    """The configuration of the model in directory ``path``.

    Raises:
        UnsupportedCheckpoint: ``config.json`` is missing or invalid, or asks for what is not supported.
    """
    values = read_json(path / "config.json")
    if not values:
        raise UnsupportedCheckpoint(f"{path} has no config.json")
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedCheckpoint(
            f"{path} is a model of architecture {name!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    return _Reader(path, architecture, values).config()


def read_layer_config(path: Path, values: dict[str, Any]) -> ModelConfig:
    """The configuration of decoder layers that ``values`` describe, an object inside the ``config.json`` of ``path``.

    Raises:
        UnsupportedCheckpoint: as ``read_config``.
    """
    model_type = values.get("model_type")
    if model_type not in (known := sorted(_ARCHITECTURES.values())):
        raise UnsupportedCheckpoint(f"{path} has layers of type {model_type!r}; supported are {', '.join(known)}")
    return _Reader(path, model_type, values).config()


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    architecture: Architecture
    values: dict[str, Any]

    def config(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden_size = self._positive("hidden_size")
        num_heads = self._positive("num_attention_heads")
        num_layers = self._positive("num_hidden_layers")
        default_head_dim = _QWEN3_HEAD_DIM if self.architecture == "qwen3" else hidden_size // num_heads
        max_position_embeddings = self._positive("max_position_embeddings")
        bias = self.architecture in ("llama", "qwen3") and self._flag("attention_bias")
        sliding_window, sliding_layers = self._sliding(num_layers)
        bos = token_ids(self.path / "config.json", "bos_token_id")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self._positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._positive("num_key_value_heads", num_heads),
            head_dim=self._positive("head_dim", default_head_dim),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=self._number(self.values, "rms_norm_eps", 1e-6),
            rope=self._rope(max_position_embeddings),
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            attention_bias=bias or self.architecture == "qwen2",
            attention_output_bias=bias,
            mlp_bias=self.architecture == "llama" and self._flag("mlp_bias"),
            qk_norm=self.architecture == "qwen3",
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=self._eos_token_ids(),
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        files = ("generation_config.json", "config.json")
        ids = (token_id for file in files for token_id in token_ids(self.path / file, "eos_token_id"))
        return tuple(dict.fromkeys(ids))

    def _refuse_unsupported(self) -> None:
        quantization = self.values.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedCheckpoint(
                f"{self.path} is quantised by {method!r} (quantization_config); "
                "use the unquantised model or a GGUF file of it"
            )
        activation = self.values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedCheckpoint(f"{self.path} has hidden_act {activation!r}; only silu is supported")

    def _sliding(self, num_layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
        """The window and the layers that have it."""
        if self.architecture == "mistral":
            window = self.values.get("sliding_window", _MISTRAL_SLIDING_WINDOW)
            return (None if window is None else self._positive("sliding_window", _MISTRAL_SLIDING_WINDOW)), None
        if self.architecture == "llama" or not self._flag("use_sliding_window"):
            return None, None
        types = self.values.get("layer_types")
        if types is None:
            first = self._integer("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
            layers = tuple(layer >= first for layer in range(num_layers))
        else:
            layers = self._layer_types(types, num_layers)
        return (self._positive("sliding_window"), layers) if any(layers) else (None, None)

    def _layer_types(self, types: object, num_layers: int) -> tuple[bool, ...]:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
            raise UnsupportedCheckpoint(
                f"{self.path}: layer_types must name {num_layers} layers, each {' or '.join(known)}, not {types!r}"
            )
        return tuple(known[kind] for kind in types)

    def _rope(self, max_position_embeddings: int) -> RopeConfig:
        # transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling stood apart.
        settings = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(settings, dict):
            raise UnsupportedCheckpoint(f"{self.path}: rope_parameters is {settings!r}")
        partial = settings.get("partial_rotary_factor", self.values.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise UnsupportedCheckpoint(
                f"{self.path} rotates a part of each head (partial_rotary_factor {partial}), which is not supported"
            )
        theta = self._number(settings, "rope_theta", self._number(self.values, "rope_theta", 10000.0))
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind == "default":
            return RopeConfig(theta=theta)
        original = self.values.get("original_max_position_embeddings")
        if original is None:
            original = settings.get("original_max_position_embeddings", max_position_embeddings)
        if not isinstance(original, int) or original <= 0:
            raise UnsupportedCheckpoint(f"{self.path}: original_max_position_embeddings is {original!r}")
        factor = self._number(settings, "factor")
        if kind == "linear":
            return RopeConfig(theta=theta, scaling="linear", factor=factor)
        if kind == "llama3":
            return RopeConfig(
                theta=theta,
                scaling="llama3",
                factor=factor,
                low_freq_factor=self._number(settings, "low_freq_factor"),
                high_freq_factor=self._number(settings, "high_freq_factor"),
                original_max_position=original,
            )
        if kind == "yarn":
            return self._yarn(settings, theta, factor, original)
        raise UnsupportedCheckpoint(
            f"{self.path} has a rotary embedding of type {kind!r}; supported are default, linear, llama3 and yarn"
        )

    def _yarn(self, settings: dict[str, Any], theta: float, factor: float, original: int) -> RopeConfig:
        attention_factor = settings.get("attention_factor")
        scale, scale_all = settings.get("mscale"), settings.get("mscale_all_dim")
        if attention_factor is None and scale and scale_all:
            attention_factor = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=self._number(settings, "beta_fast", 32.0),
            beta_slow=self._number(settings, "beta_slow", 1.0),
            attention_factor=attention_factor,
            truncate=settings.get("truncate", True) is not False,
        )

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise UnsupportedCheckpoint(f"{self.path}: config.json has {value!r} for {key}, which must be an integer")

    def _positive(self, key: str, default: int | None = None) -> int:
        value = self._integer(key, default)
        if value > 0:
            return value
        raise UnsupportedCheckpoint(f"{self.path}: config.json has {value} for {key}, which must be more than 0")

    def _number(self, values: dict[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        if value is None:
            value = default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise UnsupportedCheckpoint(f"{self.path}: config.json has {value!r} for {key}, which must be a number above 0")

    def _flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise UnsupportedCheckpoint(f"{self.path}: config.json has {value!r} for {key}, which must be true or false")


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
