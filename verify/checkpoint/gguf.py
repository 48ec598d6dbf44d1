"""A checkpoint in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from outrider.verify.checkpoint.checkpoint import fingerprint_files
from outrider.verify.checkpoint.config import ModelConfig, UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf_config import ROPE_FACTORS, read_config
from outrider.verify.checkpoint.gguf_metadata import GGUFHeader, TensorInfo, read_header
from outrider.verify.checkpoint.weights import StoredWeight, weight_shapes

QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFCheckpoint:
    """A ``Checkpoint`` over a memory-mapped GGUF file.

    Raises:
        UnsupportedCheckpoint: the file is damaged, or its architecture, a tensor's type or a tensor itself
            is not one we know.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._path = path
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(header.buffer, dtype=np.uint8)
        self._config = read_config(header)
        self._fingerprint = fingerprint_files([path])
        self._tensors = self._find_weights(header)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def has(self, name: str) -> bool:
        return name in self._tensors

    def weight(self, name: str) -> StoredWeight:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise UnsupportedCheckpoint(f"{self._path} has no weight {name}")
        quantization = gguf.GGMLQuantizationType(tensor.type_id)
        num_rows = tensor.shape[0]
        stored = self._bytes[tensor.start : tensor.start + _num_bytes(tensor, quantization)].reshape(num_rows, -1)
        if self._is_permuted(name):
            stored = stored[self._row_order(num_rows)]
        return StoredWeight(tensor.shape, quantization.name, stored)

    def _find_weights(self, header: GGUFHeader) -> dict[str, TensorInfo]:
        shapes = weight_shapes(self._config, len(header.tensors))
        wanted = {name: (_gguf_name(name), shape) for name, shape in shapes.items()}
        unknown = header.tensors.keys() - {gguf_name for gguf_name, _ in wanted.values()} - {ROPE_FACTORS}
        if unknown:
            raise UnsupportedCheckpoint(
                f"{self._path} holds a tensor that a {self._config.architecture} model does not have: {min(unknown)}"
            )
        tensors = {}
        for name, (gguf_name, shape) in wanted.items():
            tensor = header.tensors.get(gguf_name)
            if tensor is None:
                raise UnsupportedCheckpoint(f"{self._path} lacks the tensor {gguf_name}")
            if tensor.shape != shape:
                raise UnsupportedCheckpoint(
                    f"{self._path}: tensor {gguf_name} has shape {tensor.shape}; its configuration wants {shape}"
                )
            self._check_stored(tensor)
            tensors[name] = tensor
        return tensors

    def _check_stored(self, tensor: TensorInfo) -> None:
        try:
            quantization = gguf.GGMLQuantizationType(tensor.type_id)
        except ValueError:
            raise UnsupportedCheckpoint(
                f"{self._path}: tensor {tensor.name} is of type {tensor.type_id}, which is unknown"
            ) from None
        if quantization.name not in QUANTIZATIONS:
            raise UnsupportedCheckpoint(
                f"{self._path}: tensor {tensor.name} is quantised as {quantization.name}; "
                f"supported are {', '.join(QUANTIZATIONS)}"
            )
        block_size, _ = gguf.GGML_QUANT_SIZES[quantization]
        if tensor.shape[-1] % block_size:
            raise UnsupportedCheckpoint(
                f"{self._path} is damaged: rows of {tensor.name} are no whole number of {quantization.name} blocks"
            )
        if tensor.start + _num_bytes(tensor, quantization) > len(self._bytes):
            raise UnsupportedCheckpoint(
                f"{self._path} is cut off: tensor {tensor.name} runs past the end of the file; fetch the file again"
            )

    def _is_permuted(self, name: str) -> bool:
        return self._config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name)

    def _row_order(self, num_rows: int) -> npt.NDArray[np.intp]:
        """Which stored row is each row in Hugging Face order.

        llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its halves, so its converter
        interleaves the halves of each head of q and k in files of the llama architecture.
        """
        half = self._config.head_dim // 2
        return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{kind}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _num_bytes(tensor: TensorInfo, quantization: gguf.GGMLQuantizationType) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    num_values = 1
    for length in tensor.shape:
        num_values *= length
    return num_values // block_size * block_bytes
