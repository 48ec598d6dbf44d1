"""Linear layers: dense float32 weights, multiplied in row tiles that keep every row's bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.kernels.operations import Weight
from outrider.kernels.reference.row_tiles import proven_row_counts, split_rows

_proven: dict[tuple[int, int, int], tuple[int, ...]] = {}
"""Row counts by (in_features, out_features, threads): layers repeat shapes, the proof need not."""


class TiledLinear:
    """Weights packed once by oneDNN, where torch has it: 8 rows then cost 1.2 to 1.4 times one row.

    MKL's ordinary product packs all the weights anew at every call, and 8 rows cost 2.6 to 2.8 times one (measured,
    60 layers of 576 x 3072, 2 threads). It serves where oneDNN is missing.
    """

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None) -> None:
        dense = torch.cat([weight.dense() for weight in weights])  # [out_features, in_features]
        self.out_features, self.in_features = dense.shape
        self._bias = bias
        self._has_onednn = torch.backends.mkldnn.is_available()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense) if self._has_onednn else dense.t().contiguous()
        key = (self.in_features, self.out_features, torch.get_num_threads())
        if key not in _proven:
            _proven[key] = proven_row_counts(self._product, *key[:2])
        self._row_counts = _proven[key]

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_rows, in_features]`` to ``[num_rows, out_features]``."""
        if len(x) in self._row_counts:
            return self._product(x)
        parts = []
        start = 0
        for used, computed in split_rows(len(x), self._row_counts):
            tile = x[start : start + used]
            if computed > used:
                tile = tile.index_select(0, _padded_rows(used, computed))
            parts.append(self._product(tile)[:used])
            start += used
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_empty(0, self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        if self._has_onednn:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return product
        product = rows @ self._packed
        return product if self._bias is None else product.add_(self._bias)


@lru_cache(maxsize=256)
def _padded_rows(used: int, computed: int) -> Tensor:
    """Row indices that repeat the last of ``used`` rows up to ``computed``: padding in one operation."""
    return torch.arange(computed).clamp_(max=used - 1)
