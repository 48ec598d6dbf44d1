"""EAGLE-3 drafts on disk: the ``speculators`` format (github.com/vllm-project/speculators), which vLLM serves too.

A directory with ``config.json`` and safetensors. Names of weights, where ``h`` is the draft's hidden size:

    fc.weight                              [h, num_taps * target's hidden size]
    input_norm.weight, fc_norm.{i}.weight  before fc, over all taps or each; most drafts have neither
    layers.0.input_layernorm.weight        [h], of the embedding
    layers.0.hidden_norm.weight            [h], of the hidden state
    layers.0.self_attn.{q,k,v}_proj.weight [.., 2 h], the embedding's half first
    layers.*                               as in the Hugging Face checkpoint of such a model
    norm.weight, lm_head.weight            [h], [draft_vocab_size, h]
    d2t, t2d                               int64 [draft_vocab_size], bool [vocab_size]; absent if it has all words
    embed_tokens.weight                    [vocab_size, h]; absent where it is the target's

``d2t`` holds offsets: output ``i`` stands for token ``i + d2t[i]``. ``t2d`` says which tokens have an output. Older
files write ``midlayer`` for ``layers.0``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from outrider.verify.checkpoint.checkpoint import fingerprint_files
from outrider.verify.checkpoint.config import ModelConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.huggingface_config import read_layer_config
from outrider.verify.checkpoint.json_files import read_json
from outrider.verify.checkpoint.weights import StoredWeight, layer_shapes

VERSION = "0.9.0"  # of the format, that is written
_WEIGHTS_FILE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")
_NEEDLESS = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # of training


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """What ``config.json`` says.

    ``layers``: of the draft; its ``vocab_size`` is the target's. ``taps``: layers of the target before which its
    residual stream is read; None: 2, half of its layers, and the third from its end.
    ``fusion_norm``: over all taps together, over each, or none, before they are fused.
    ``norm_before_residual``: as in ``DecoderLayer``.
    """

    layers: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    target_hidden_size: int
    target_name: str = ""
    target_architecture: str = "LlamaForCausalLM"
    fusion_norm: Literal["none", "all", "each"] = "none"
    norm_before_residual: bool = False
    num_draft_tokens: int = 3  # that it was trained for

    @property
    def num_taps(self) -> int:
        return 3 if self.taps is None else len(self.taps)

    def taps_in(self, num_target_layers: int) -> tuple[int, ...]:
        """The taps in a target of so many layers."""
        return self.taps or (2, num_target_layers // 2, num_target_layers - 3)


class Speculator:
    """An opened draft; its weights stay on disk until they are read.

    Raises:
        UnsupportedCheckpoint: a file is missing or damaged, or the draft needs what is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = read_speculator_config(path)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UnsupportedCheckpoint(f"{path} has no safetensors file")
        self.fingerprint = fingerprint_files([path / "config.json", *files])
        self._stored: dict[str, tuple[Any, str]] = {}  # by name: the file, and the name in it
        for file in files:
            try:
                shard: Any = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise UnsupportedCheckpoint(f"{file} is cut off or damaged ({error}); fetch the file again") from error
            self._stored.update((name.replace("midlayer.", "layers.0."), (shard, name)) for name in shard.keys())  # noqa: SIM118
        self._check_weights()
        self.token_map = self._read_token_map()

    def has(self, name: str) -> bool:
        return name in self._stored

    def weight(self, name: str) -> StoredWeight:
        shard, stored_name = self._stored[name]
        tensor: Tensor = shard.get_tensor(stored_name)
        dtype = shard.get_slice(stored_name).get_dtype()
        blocks = tensor.contiguous().view(torch.uint8).numpy().reshape(tensor.shape[0], -1)
        return StoredWeight(tuple(tensor.shape), dtype, blocks)

    def _check_weights(self) -> None:
        shapes = weight_shapes(self.config)
        for name, shape in shapes.items():
            if name not in self._stored:
                if name == "embed_tokens.weight":
                    continue
                raise UnsupportedCheckpoint(f"{self._path} lacks the weight {name}")
            shard, stored_name = self._stored[name]
            found = shard.get_slice(stored_name)
            if tuple(found.get_shape()) != shape:
                raise UnsupportedCheckpoint(
                    f"{self._path}: {name} has shape {tuple(found.get_shape())}; config.json wants {shape}"
                )
            if found.get_dtype() not in _DTYPES:
                raise UnsupportedCheckpoint(
                    f"{self._path}: {name} is stored as {found.get_dtype()}; supported are {', '.join(_DTYPES)}"
                )
        known = {*shapes, "d2t", "t2d"}
        unknown = [name for name in self._stored if name not in known and not name.endswith(_NEEDLESS)]
        if unknown:
            raise UnsupportedCheckpoint(
                f"{self._path} holds a weight that its config.json gives no place to: {min(unknown)}"
            )

    def _read_token_map(self) -> Tensor | None:
        """The token each output stands for: int64 ``[draft_vocab_size]``; None: its own number."""
        size, vocab_size = self.config.draft_vocab_size, self.config.layers.vocab_size
        if "d2t" not in self._stored:
            if size == vocab_size:
                return None
            raise UnsupportedCheckpoint(f"{self._path} has {size} of {vocab_size} tokens and no d2t that says which")
        shard, name = self._stored["d2t"]
        offsets: Tensor = shard.get_tensor(name)
        if offsets.shape != (size,) or offsets.dtype not in (torch.int64, torch.int32):
            raise UnsupportedCheckpoint(
                f"{self._path}: d2t is {offsets.dtype} of shape {tuple(offsets.shape)}; it must be int64 of ({size},)"
            )
        token_map = torch.arange(size) + offsets.long()
        if token_map.min() < 0 or token_map.max() >= vocab_size or len(token_map.unique()) != size:
            raise UnsupportedCheckpoint(
                f"{self._path}: d2t must give each output a token of its own from 0 to {vocab_size - 1}"
            )
        return token_map


def is_speculator(path: Path) -> bool:
    """Whether ``path`` is a draft in this format, of whatever kind."""
    return path.is_dir() and "speculators_model_type" in read_json(path / "config.json")


def read_speculator_config(path: Path) -> SpeculatorConfig:
    """What ``config.json`` in ``path`` says.

    Raises:
        UnsupportedCheckpoint: it is missing or invalid, or asks for what is not supported.
    """
    values = read_json(path / "config.json")
    kind = values.get("speculators_model_type")
    if kind != "eagle3":
        raise UnsupportedCheckpoint(f"{path} is a speculator of type {kind!r}; only eagle3 is supported")
    if values.get("norm_output"):
        raise UnsupportedCheckpoint(f"{path} has norm_output (EAGLE 3.1), which is not supported")
    layer_values = values.get("transformer_layer_config")
    if not isinstance(layer_values, dict):
        raise UnsupportedCheckpoint(f"{path}: config.json has no transformer_layer_config")
    layers = read_layer_config(path, layer_values)
    verifier = _object(_object(values, "speculators_config"), "verifier")
    names = verifier.get("architectures") or [""]
    return SpeculatorConfig(
        layers=layers,
        draft_vocab_size=_positive(path, values, "draft_vocab_size", layers.vocab_size),
        taps=_taps(path, values),
        target_hidden_size=_positive(path, values, "target_hidden_size", layers.hidden_size),
        target_name=str(verifier.get("name_or_path") or ""),
        target_architecture=str(names[0]),
        fusion_norm="all" if values.get("norm_before_fc") else "each" if values.get("fc_norm") else "none",
        # vLLM takes a draft that does not say for one that has it.
        norm_before_residual=values.get("norm_before_residual", True) is not False,
    )


def weight_shapes(config: SpeculatorConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of such a draft but the maps of its tokens; ``embed_tokens.weight`` may be absent."""
    layers = config.layers
    hidden, fused = layers.hidden_size, config.num_taps * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (layers.vocab_size, hidden),
        "fc.weight": (hidden, fused),
        "layers.0.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.fusion_norm == "all":
        shapes["input_norm.weight"] = (fused,)
    elif config.fusion_norm == "each":
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(config.num_taps)}
    for layer in range(layers.num_layers):
        for name, shape in layer_shapes(layers):
            is_wide = layer == 0 and name in _WIDE
            shapes[f"layers.{layer}.{name}"] = (shape[0], 2 * hidden) if is_wide else shape
    return shapes


_WIDE = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def save_speculator(
    path: Path,
    config: SpeculatorConfig,
    weights: Mapping[str, Tensor],
    token_map: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft; ``path`` is made if need be, and other files in it are left alone.

    ``token_map``: int64 ``[draft_vocab_size]``, ascending as is the custom; None where the draft has all tokens.

    Raises:
        ValueError: weights are missing or of another shape than ``config`` says.
    """
    shapes = weight_shapes(config)
    for name in {*shapes, *weights} - {"embed_tokens.weight"}:
        found = tuple(weights[name].shape) if name in weights else None
        if found != shapes.get(name):
            raise ValueError(f"{name} has shape {found}; a draft of this configuration has {shapes.get(name)}")
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    if token_map is not None:
        token_map = token_map.cpu().long()
        has_output = torch.zeros(config.layers.vocab_size, dtype=torch.bool)
        has_output[token_map] = True
        tensors |= {"d2t": token_map - torch.arange(len(token_map)), "t2d": has_output}
    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f"{_WEIGHTS_FILE}.unfinished"
    unfinished.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(unfinished, path / _WEIGHTS_FILE)
    text = json.dumps(_config_values(config, dtype), indent=2) + "\n"
    (path / "config.json").write_text(text, encoding="utf-8")


def _config_values(config: SpeculatorConfig, dtype: torch.dtype) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    has_own_width = config.target_hidden_size != config.layers.hidden_size
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name, "architectures": [config.target_architecture]},
        },
        "transformer_layer_config": _layer_values(config.layers),
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps) if config.taps is not None else None,
        "target_hidden_size": config.target_hidden_size if has_own_width else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fusion_norm == "all",
        "fc_norm": config.fusion_norm == "each",
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _layer_values(layers: ModelConfig) -> dict[str, Any]:
    rope = layers.rope
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling != "none":
        parameters |= {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        parameters |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return {
        "model_type": layers.architecture,
        "vocab_size": layers.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": layers.max_position_embeddings,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_parameters": parameters,
        "attention_bias": layers.attention_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": False,
    }


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _positive(path: Path, values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise UnsupportedCheckpoint(f"{path}: config.json has {value!r} for {key}, which must be an integer above 0")


def _taps(path: Path, values: Mapping[str, Any]) -> tuple[int, ...] | None:
    taps = values.get("eagle_aux_hidden_state_layer_ids")
    if not taps:
        return None
    if isinstance(taps, list) and all(isinstance(tap, int) and tap >= 0 for tap in taps):
        return tuple(taps)
    raise UnsupportedCheckpoint(f"{path}: eagle_aux_hidden_state_layer_ids is {taps!r}, no list of layers")
