"""Which slots the rows of token trees attend to, from the masks of a ``RaggedBatch``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.kernels.operations import MAX_TREE_ROWS, RaggedBatch


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The way from the cached tokens to each row of a tree."""

    is_tree: npt.NDArray[np.bool_]  # [num_seqs]
    num_cached: npt.NDArray[np.int64]  # [num_seqs], tokens before the pass
    slots: npt.NDArray[np.int64]  # [num_tokens, MAX_TREE_ROWS], of a row's ancestors and itself, root first, then 0


def tree_paths(batch: RaggedBatch) -> TreePaths:
    """Follow the masks.

    Raises:
        ValueError: they are no trees.
    """
    num_rows = np.diff(batch.cu_seqlens_q)
    is_tree = np.zeros(batch.num_seqs, dtype=np.bool_)
    slots = np.zeros((batch.num_tokens, MAX_TREE_ROWS), dtype=np.int64)
    for sequence, masks in _masks_of_sequences(batch):
        is_tree[sequence] = True
        first_row = int(batch.cu_seqlens_q[sequence])
        for row, mask in enumerate(masks):
            path = [bit for bit in range(row + 1) if mask >> bit & 1]
            parent = masks[path[-2]] if len(path) > 1 else 0
            if mask != parent | 1 << row:
                raise ValueError(
                    f"row {row} of sequence {sequence} has tree mask {mask:#x}; it must be its own bit and all of its "
                    "parent's"
                )
            slots[first_row + row, : len(path)] = batch.slot_mapping[[first_row + ancestor for ancestor in path]]
    return TreePaths(is_tree, batch.seq_lens.astype(np.int64) - num_rows, slots)


def _masks_of_sequences(batch: RaggedBatch) -> list[tuple[int, list[int]]]:
    """Of each sequence that is a tree."""
    if batch.tree_masks is None:
        return []
    result = []
    for sequence in range(batch.num_seqs):
        masks = batch.tree_masks[batch.cu_seqlens_q[sequence] : batch.cu_seqlens_q[sequence + 1]].tolist()
        if not any(masks):
            continue
        if len(masks) > MAX_TREE_ROWS:
            raise ValueError(f"sequence {sequence} has a tree of {len(masks)} rows; {MAX_TREE_ROWS} are the most")
        result.append((sequence, masks))
    return result
