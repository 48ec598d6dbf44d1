"""Random weights in every form the native kernels read, and what they multiply, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.verify.checkpoint.weights import StoredWeight

GROUP_FORMATS = ("Q4_0", "Q4_1", "Q8_0")  # of whole groups of 32 inputs
FORMATS = (*GROUP_FORMATS, "Q8_CHANNEL", "BF16", "F32")
QUANTIZED = (*GROUP_FORMATS, "Q8_CHANNEL")


@dataclass(frozen=True)
class FormedWeight:
    """One matrix: its stored bytes, and the values they stand for."""

    format: str
    blocks: npt.NDArray[np.uint8]  # [out_features, bytes_per_row]
    channel_scales: npt.NDArray[np.float32] | None  # [out_features], only Q8_CHANNEL
    values: npt.NDArray[np.float64]  # [out_features, in_features]

    @property
    def stored(self) -> StoredWeight:
        """As a checkpoint would hand it over; not for Q8_CHANNEL, which no file has."""
        return StoredWeight(self.values.shape, self.format, self.blocks)


def random_weight(format: str, out_features: int, in_features: int, seed: int) -> FormedWeight:
    """Normal values of a size that keeps results near 1."""
    random = np.random.default_rng([seed, out_features, in_features])
    dense = (random.standard_normal((out_features, in_features)) / in_features**0.5).astype(np.float32)
    if format == "F32":
        return FormedWeight(format, dense.view(np.uint8), None, dense.astype(np.float64))
    if format == "BF16":
        rounded = torch.from_numpy(dense).bfloat16()
        blocks = rounded.view(torch.int16).numpy().view(np.uint8)
        return FormedWeight(format, blocks, None, rounded.double().numpy())
    if format == "Q8_CHANNEL":
        quants = random.integers(-127, 128, dense.shape, dtype=np.int8)
        scales = (random.uniform(0.5, 2.0, out_features) / 70 / in_features**0.5).astype(np.float32)
        values = quants.astype(np.float64) * scales[:, None].astype(np.float64)
        return FormedWeight(format, quants.view(np.uint8), scales, values)
    kind = gguf.GGMLQuantizationType[format]
    blocks = gguf.quantize(dense, kind)
    return FormedWeight(format, blocks, None, gguf.dequantize(blocks, kind).astype(np.float64))


def pack(weights: list[FormedWeight], bias: npt.NDArray[np.float32] | None = None) -> _native.PackedLinear:
    """Weights of one form, stacked row on row."""
    scales = [weight.channel_scales for weight in weights if weight.channel_scales is not None]
    return _native.pack_linear(
        weights[0].format,
        weights[0].values.shape[1],
        [weight.blocks for weight in weights],
        np.concatenate(scales) if scales else None,
        bias,
    )


def as_int8(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What rows are once quantised to int8, scale = largest magnitude / 127 for each row and group of 32 inputs.

    Rounded to nearest, ties to even, where float32 says they are. ``[num_rows, in_features]`` both ways.
    """
    num_rows, in_features = x.shape
    padded = np.zeros((num_rows, -(-in_features // 32), 32), dtype=np.float32)
    padded.reshape(num_rows, -1)[:, :in_features] = x
    largest = np.abs(padded).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    quantized = np.rint(padded * inverse).astype(np.float64) * (largest / np.float32(127)).astype(np.float64)
    return quantized.reshape(num_rows, -1)[:, :in_features]


def bits(tensor: Tensor | npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The bits of float32 values, all NaNs the same."""
    array = np.ascontiguousarray(tensor.numpy() if isinstance(tensor, Tensor) else tensor)
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def same_bits(a: Tensor | npt.NDArray[np.float32], b: Tensor | npt.NDArray[np.float32]) -> bool:
    return a.shape == b.shape and bool(np.array_equal(bits(a), bits(b)))
