"""From a checkpoint's weights to the form in which the native kernels keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from outrider.kernels.cpu import gguf_blocks
from outrider.kernels.cpu.availability import usable_cpus
from outrider.kernels.cpu.quantization import (
    GROUP_SIZE,
    Quantizer,
    quantize_q4_1,
    quantize_q8_0,
    quantize_q8_channels,
)
from outrider.kernels.operations import Weight

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Result = TypeVar("_Result")

_FLOATS = ("F32", "F16", "BF16")
_GROUP_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # by precision
_QUANTIZERS: dict[str, Quantizer] = {"Q4_1": quantize_q4_1, "Q8_0": quantize_q8_0}

# Stored forms that another form holds as they are. The others become Q8_0 by way of their values: its steps are a
# quarter as wide as those of 6 bits (Q6_K), an eighth of those of 5.
_REWRITES: dict[tuple[str, str], Callable[[_Bytes], _Bytes]] = {
    ("Q4_0", "Q4_1"): gguf_blocks.q4_0_to_q4_1,
    ("Q4_0", "Q8_0"): gguf_blocks.q4_0_to_q8_0,
    ("Q5_0", "Q8_0"): gguf_blocks.q5_0_to_q8_0,
    ("Q4_K", "Q4_1"): gguf_blocks.q4_k_to_q4_1,
}

# Squared error to sum of squares. Even steps over the range of a group lose less than this, whatever its values are:
# more means that f16 cannot hold the scales, which are too large or next to nothing.
_MOST_LOST = {"Q4_1": 0.1, "Q8_0": 1e-3}

_CHUNK_VALUES = 1 << 17  # what one thread converts at a time stays in its second-level cache


@dataclass(frozen=True, slots=True)
class PackedForm:
    """``blocks`` of several weights, each ``[out_features, bytes_per_row]``, all of one native format."""

    format: str
    blocks: list[_Bytes]
    channel_scales: _Floats | None = None  # [sum of out_features], of Q8_CHANNEL


def packed_form(weights: Sequence[Weight], quantize: str) -> PackedForm:
    """The form for weights that are stacked into one layer: the smallest that loses nothing measurable of any.

    What the native kernels can read is kept as it is. ``quantize`` says what weights stored as floats become:
    ``none``: floats; ``int8``: Q8_0; ``int4``: Q4_1; for both Q8_CHANNEL where in_features are no whole groups of 32.

    Raises:
        ValueError: a weight holds NaN or infinity.
    """
    for format in _candidates({_own_form(weight, quantize) for weight in weights}):
        if format == "Q8_CHANNEL":
            channels = [_quantized_channels(weight) for weight in weights]
            return PackedForm(format, [blocks for blocks, _ in channels], np.concatenate([s for _, s in channels]))
        blocks = [_converted(weight, format) for weight in weights]
        if all(block is not None for block in blocks):
            return PackedForm(format, [block for block in blocks if block is not None])
    raise AssertionError("F32 holds every weight")


def _own_form(weight: Weight, quantize: str) -> str:
    """The form of a weight that shares its layer with no other."""
    stored, has_whole_groups = weight.quantization, weight.shape[-1] % GROUP_SIZE == 0
    if stored in _FLOATS:
        if quantize == "none":
            return "BF16" if stored == "BF16" else "F32"  # BF16 has not the precision of F16
        return {"int8": "Q8_0", "int4": "Q4_1"}[quantize] if has_whole_groups else "Q8_CHANNEL"
    if stored in _GROUP_BYTES:
        return stored
    if (stored, "Q4_1") in _REWRITES:
        return "Q4_1"
    return "Q8_0" if has_whole_groups else "F32"


def _candidates(forms: set[str]) -> Iterator[str]:
    """What does justice to all of these forms, then what is more precise, should a weight not fit."""
    grouped = list(_GROUP_BYTES)
    if forms.issubset(grouped):
        yield from grouped[max(map(grouped.index, forms)) :]
    elif len(forms) == 1:
        yield from forms - {"F32"}
    yield "F32"


def _converted(weight: Weight, format: str) -> _Bytes | None:
    """The weight's blocks in another form, ``[out_features, bytes_per_row]``; None if that cannot hold it."""
    if weight.quantization == format:
        blocks = np.ascontiguousarray(weight.blocks)
        if not _is_finite(blocks, format):
            raise _damaged(weight)
        return blocks
    if format == "F32":
        floats = np.ascontiguousarray(weight.dense().numpy()).view(np.uint8)
        if not _is_finite(floats, format):
            raise _damaged(weight)
        return floats
    if (weight.quantization, format) in _REWRITES:
        return _rewritten(weight, format)
    return _quantized(weight, format)


def _rewritten(weight: Weight, format: str) -> _Bytes | None:
    rewrite = _REWRITES[weight.quantization, format]
    num_rows, in_features = weight.shape
    blocks = np.empty((num_rows, in_features // GROUP_SIZE * _GROUP_BYTES[format]), dtype=np.uint8)

    def rewrite_rows(rows: slice) -> None:
        blocks[rows] = rewrite(weight.blocks[rows])

    _each_chunk(weight, rewrite_rows)
    return blocks if _is_finite(blocks, format) else None


def _quantized(weight: Weight, format: str) -> _Bytes | None:
    quantizer, read = _QUANTIZERS[format], _float_reader(weight)
    num_rows, in_features = weight.shape
    blocks = np.empty((num_rows, in_features // GROUP_SIZE * _GROUP_BYTES[format]), dtype=np.uint8)

    def quantize_rows(rows: slice) -> tuple[float, float]:
        floats = read(rows)
        groups = quantizer(floats.reshape(-1, GROUP_SIZE))
        blocks[rows] = groups.blocks.reshape(len(floats), -1)
        return groups.squared_error, float(np.einsum("ij,ij->", floats, floats, dtype=np.float64))

    lost, total = np.sum(_each_chunk(weight, quantize_rows), axis=0)
    return blocks if lost <= _MOST_LOST[format] * total else None  # NaN, of infinite scales, is not less


def _quantized_channels(weight: Weight) -> tuple[_Bytes, _Floats]:
    """int8 as bytes ``[out_features, in_features]``, and the rows' scales ``[out_features]``."""
    read = _float_reader(weight)
    quants, scales = np.empty(weight.shape, dtype=np.int8), np.empty(weight.shape[0], dtype=np.float32)

    def quantize_rows(rows: slice) -> None:
        quants[rows], scales[rows] = quantize_q8_channels(read(rows))

    _each_chunk(weight, quantize_rows)
    return quants.view(np.uint8), scales


def _float_reader(weight: Weight) -> Callable[[slice], _Floats]:
    """Reads rows of a weight as float32, contiguous. Only what is no float in its file is unpacked as a whole.

    It raises ValueError if one is NaN or infinite.
    """
    blocks, stored = weight.blocks, weight.quantization
    dense = None if stored in _FLOATS else weight.dense().numpy()

    def read(rows: slice) -> _Floats:
        if dense is not None:
            floats = dense[rows]
        elif stored == "BF16":
            floats = (np.ascontiguousarray(blocks[rows]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            floats = np.ascontiguousarray(blocks[rows]).view("<f2" if stored == "F16" else "<f4").astype(np.float32)
        if not np.isfinite(floats).all():
            raise _damaged(weight)
        return floats

    return read


def _each_chunk(weight: Weight, work: Callable[[slice], _Result]) -> list[_Result]:
    """Do ``work`` for slices of the weight's rows, several at a time; its results in order."""
    num_rows, in_features = weight.shape
    step = max(1, _CHUNK_VALUES // in_features)
    with ThreadPoolExecutor(usable_cpus()) as threads:
        return list(threads.map(work, (slice(start, start + step) for start in range(0, num_rows, step))))


def _is_finite(blocks: _Bytes, format: str) -> bool:
    """Whether scales and minima, or else the floats, are all numbers; ``blocks``: contiguous rows of a native form."""
    if format == "F32":
        words, exponent = blocks.view(np.uint32), 0x7F800000
    elif format == "BF16":
        words, exponent = blocks.view(np.uint16), 0x7F80
    else:
        groups = blocks.reshape(-1, _GROUP_BYTES[format])[:, : 4 if format == "Q4_1" else 2]
        words, exponent = np.ascontiguousarray(groups).view(np.uint16), 0x7C00
    rows = max(1, _CHUNK_VALUES // words.shape[1])
    return all(((words[i : i + rows] & exponent) != exponent).all() for i in range(0, len(words), rows))


def _damaged(weight: Weight) -> ValueError:
    shape = " x ".join(map(str, weight.shape))
    return ValueError(
        f"a weight of {shape}, stored as {weight.quantization}, holds NaN or infinity: the checkpoint is damaged, "
        "fetch it again"
    )
