"""Blocks of GGUF's older and larger families, written anew as blocks the native kernels read, value for value.

Each function takes stored rows ``[num_rows, bytes_per_row]`` and returns rows of the other form. A block of Q4_0 is an
f16 scale and 16 bytes, weight ``i`` in the low half of byte ``i`` and weight ``16 + i`` in the high one; Q4_1 has an
f16 minimum after the scale, Q5_0 the weights' fifth bits in 4 bytes; Q8_0 is a scale and 32 int8. A block of Q4_K
is eight groups of 32 weights under one scale of scales and one scale of minima (ggml's ``block_q4_K``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]

Q4_K_BYTES = 144
_Q4_K_GROUPS = 8

_overflow_shows = np.errstate(over="ignore", invalid="ignore")  # as scales that are infinite


@_overflow_shows
def q4_0_to_q4_1(rows: _Bytes) -> _Bytes:
    """Exact: (q - 8) * scale is q * scale + minimum with a minimum of -8 scales."""
    stored = rows.reshape(-1, 18)
    blocks = np.empty((len(stored), 20), dtype=np.uint8)
    blocks[:, :2] = stored[:, :2]
    blocks[:, 2:4] = (_f16(stored, 0) * np.float16(-8)).view(np.uint8)
    blocks[:, 4:] = stored[:, 2:]
    return blocks.reshape(len(rows), -1)


def q4_0_to_q8_0(rows: _Bytes) -> _Bytes:
    """Exact: the same scale, q - 8 as int8."""
    stored = rows.reshape(-1, 18)
    return _q8_0(stored[:, :2], _nibbles(stored[:, 2:]) - 8).reshape(len(rows), -1)


def q5_0_to_q8_0(rows: _Bytes) -> _Bytes:
    """Exact: the same scale, q - 16 as int8."""
    stored = rows.reshape(-1, 22)
    fifth_bits = np.unpackbits(stored[:, 2:6], axis=1, bitorder="little").view(np.int8)
    return _q8_0(stored[:, :2], _nibbles(stored[:, 6:]) + fifth_bits * np.int8(16) - 16).reshape(len(rows), -1)


@_overflow_shows
def q4_k_to_q4_1(rows: _Bytes) -> _Bytes:
    """The same 4 bits a weight. Scale and minimum of a group, which Q4_K stores as products, are rounded to f16.

    That moves a weight by less than 0.008 of a step and 0.0005 of the minimum; the step itself hid 30 times more.
    """
    stored = rows.reshape(-1, Q4_K_BYTES)
    scales, minima = _q4_k_scales(stored[:, 4:16])
    blocks = np.empty((len(stored), _Q4_K_GROUPS, 20), dtype=np.uint8)
    blocks[..., :2] = _products(_f16(stored, 0), scales)
    blocks[..., 2:4] = _products(_f16(stored, 2), -minima.astype(np.float32))
    # Two groups share 32 bytes: one in the low halves, the next in the high ones.
    pairs = stored[:, 16:].reshape(-1, _Q4_K_GROUPS // 2, 1, 32)
    quants = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, _Q4_K_GROUPS, 2, 16)
    blocks[..., 4:] = quants[:, :, 0] | quants[:, :, 1] << 4
    return blocks.reshape(len(rows), -1)


def _q4_k_scales(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Scales and minima of 6 bits, ``[num_blocks, 8]`` each, of 12 bytes.

    The first four of both lie in the low 6 bits of bytes 0-3 and 4-7. The others have their low 4 bits in the halves
    of bytes 8-11 and their high 2 bits at the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _products(scale: npt.NDArray[np.float16], factors: npt.NDArray[np.uint8 | np.float32]) -> _Bytes:
    """``[num_blocks, 1]`` times ``[num_blocks, 8]`` as the bytes of f16, ``[num_blocks, 8, 2]``."""
    return (scale.astype(np.float32) * factors).astype(np.float16)[..., None].view(np.uint8)


def _f16(blocks: _Bytes, start: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(stored: _Bytes) -> npt.NDArray[np.int8]:
    """The 4-bit numbers of ``[num_blocks, 16]`` bytes in the weights' order, ``[num_blocks, 32]``."""
    return np.concatenate([stored & 15, stored >> 4], axis=1).view(np.int8)


def _q8_0(scales: _Bytes, quants: npt.NDArray[np.int8]) -> _Bytes:
    return np.concatenate([scales, quants.view(np.uint8)], axis=1)
