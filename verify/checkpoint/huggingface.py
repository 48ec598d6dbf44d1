"""A checkpoint in a Hugging Face directory: ``config.json`` and safetensors, one file or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.verify.checkpoint.checkpoint import fingerprint_files
from outrider.verify.checkpoint.config import ModelConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.huggingface_config import read_config
from outrider.verify.checkpoint.json_files import read_json
from outrider.verify.checkpoint.weights import StoredWeight, weight_shapes

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_NEEDLESS = "rotary_emb.inv_freq"  # older checkpoints store what the configuration gives


class HuggingFaceCheckpoint:
    """A ``Checkpoint`` over memory-mapped safetensors files.

    Raises:
        UnsupportedCheckpoint: a file is missing or damaged, or the model needs what is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_config(path)
        files = _weight_files(path)
        self._fingerprint = fingerprint_files([path / "config.json", *files])
        self._tensors = self._find_weights({file: _open(file) for file in files})

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def has(self, name: str) -> bool:
        return name in self._tensors

    def weight(self, name: str) -> StoredWeight:
        if name not in self._tensors:
            raise UnsupportedCheckpoint(f"{self._path} has no weight {name}")
        tensor: torch.Tensor = self._tensors[name].get_tensor(name)
        dtype = self._tensors[name].get_slice(name).get_dtype()
        blocks = tensor.contiguous().view(torch.uint8).numpy().reshape(tensor.shape[0], -1)
        return StoredWeight(tuple(tensor.shape), dtype, blocks)

    def _find_weights(self, shards: dict[Path, Any]) -> dict[str, Any]:
        """Which open file holds each weight."""
        stored = {name: shard for shard in shards.values() for name in shard.keys()}  # noqa: SIM118 - no mapping
        shapes = weight_shapes(self._config, len(stored))
        # A tied head may be stored all the same; it is the embedding again.
        unknown = [name for name in stored.keys() - shapes.keys() - {"lm_head.weight"} if not name.endswith(_NEEDLESS)]
        if unknown:
            raise UnsupportedCheckpoint(
                f"{self._path} holds a weight that a {self._config.architecture} model does not have: {min(unknown)}"
            )
        for name, shape in shapes.items():
            if name not in stored:
                raise UnsupportedCheckpoint(f"{self._path} lacks the weight {name}")
            found = stored[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise UnsupportedCheckpoint(
                    f"{self._path}: {name} has shape {tuple(found.get_shape())}; config.json wants {shape}"
                )
            if found.get_dtype() not in _DTYPES:
                raise UnsupportedCheckpoint(
                    f"{self._path}: {name} is stored as {found.get_dtype()}; supported are {', '.join(_DTYPES)}"
                )
        return {name: stored[name] for name in shapes}


def _weight_files(path: Path) -> list[Path]:
    if (path / _SINGLE_FILE).is_file():
        return [path / _SINGLE_FILE]
    weight_map = read_json(path / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedCheckpoint(
            f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; only safetensors are supported"
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # An index names files beside itself and no others.
        if Path(name).name != name or not (path / name).is_file():
            raise UnsupportedCheckpoint(f"{path} lacks {name}, which {_INDEX_FILE} names")
    return [path / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UnsupportedCheckpoint(f"{file} is cut off or damaged ({error}); fetch the file again") from error
