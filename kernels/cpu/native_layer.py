"""A layer as the native decoder reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outrider.kernels.operations import DecoderLayer, PackedLinear


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """A ``DecoderLayer`` as the native decoder reads it, attribute by attribute."""

    input_norm: npt.NDArray[np.float32]
    qkv: PackedLinear
    query_key_norm: npt.NDArray[np.float32] | None
    attention_output: PackedLinear
    mlp_norm: npt.NDArray[np.float32]
    gate_up: PackedLinear
    down: PackedLinear
    has_window: bool
    embedding_norm: npt.NDArray[np.float32] | None
    norm_before_residual: bool

    @classmethod
    def of(cls, layer: DecoderLayer) -> NativeLayer:
        """Its vectors share the memory of the layer's."""
        return cls(
            input_norm=_array(layer.input_norm),
            qkv=layer.qkv,
            query_key_norm=None if layer.query_key_norm is None else _array(layer.query_key_norm),
            attention_output=layer.attention_output,
            mlp_norm=_array(layer.mlp_norm),
            gate_up=layer.gate_up,
            down=layer.down,
            has_window=layer.has_window,
            embedding_norm=None if layer.embedding_norm is None else _array(layer.embedding_norm),
            norm_before_residual=layer.norm_before_residual,
        )


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.contiguous().numpy()
    return array
