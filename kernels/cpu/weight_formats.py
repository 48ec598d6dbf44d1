"""From a checkpoint's weights to the form in which the native kernels keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.kernels.operations import Weight

GROUP_SIZE = 32
_KEPT = ("Q4_0", "Q4_1", "Q8_0", "BF16", "F32")
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class PackedForm:
    """``blocks`` of several weights, each ``[out_features, bytes_per_row]``, all of one native format."""

    format: str
    blocks: list[npt.NDArray[np.uint8]]
    channel_scales: npt.NDArray[np.float32] | None = None  # [sum of out_features], of Q8_CHANNEL


def packed_form(weights: Sequence[Weight], quantize: str) -> PackedForm:
    """The form for weights that are stacked into one layer."""
    names = {weight.quantization for weight in weights}
    if len(names) == 1 and (name := names.pop()) in _KEPT and (quantize == "none" or name not in _FLOATS):
        return PackedForm(name, [np.ascontiguousarray(weight.blocks) for weight in weights])
    blocks = [weight.dense().numpy() for weight in weights]
    return PackedForm("F32", [np.ascontiguousarray(block).view(np.uint8) for block in blocks])
