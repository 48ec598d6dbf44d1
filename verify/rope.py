"""Rotary position embedding: the angle of each position, with the usual stretches for long contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.kernels.operations import RaggedBatch
from outrider.verify.checkpoint.config import RopeConfig


class RotaryTable:
    """Cosines and sines of every position up to ``max_positions``, each ``[max_positions, head_dim // 2]``."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config, head_dim)[None, :]
        scale = attention_scale(config)
        self._cos = angles.cos() * scale
        self._sin = angles.sin() * scale

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at int64 ``positions`` ``[n]``: each ``[n, head_dim // 2]``."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The same of positions ``start .. stop - 1``, without a copy."""
        return self._cos[start:stop], self._sin[start:stop]

    def of(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Of the rows of a pass. One sequence's stand in a row, and need no copy: most passes have no more."""
        if batch.num_seqs == 1 and batch.tree_masks is None:
            start = int(batch.positions[0])
            return self.span(start, start + batch.num_tokens)
        return self.at(torch.from_numpy(batch.positions))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 ``[head_dim // 2]`` (Su et al. 2021, 3.2.2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.scaling:
        case "none":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(config, frequencies)
        case "yarn":
            return _yarn(config, frequencies, head_dim)


def attention_scale(config: RopeConfig) -> float:
    """What YaRN multiplies queries and keys by (Peng et al. 2023, eq. 22); 1 without YaRN."""
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1.0 else 1.0


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1's stretch: long wavelengths by ``factor``, short ones not, a linear passage in between."""
    wavelengths = 2 * math.pi / frequencies
    original = config.original_max_position
    passage = (original / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = passage.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, 3.2): dimensions that turn often are kept, slow ones stretched."""

    def dimension_of(rotations: float) -> float:
        """The (fractional) pair of dimensions that turns ``rotations`` times over the original context."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return frequencies / config.factor * (1 - kept) + frequencies * kept
