"""Token trees: several guesses for a position, each with guesses of its own behind it.

``parents`` says of each drafted token which one it follows, -1 for those that follow the sequence itself; empty for a
chain, in which each follows the one before. Row 0 of a pass is the last verified token, row ``i + 1`` is drafted token
``i``: so the rows of a tree are its nodes, and ``parents[i] + 1`` is the row of a row's parent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.kernels.operations import MAX_TREE_ROWS


def is_tree(parents: Sequence[int], num_draft_tokens: int) -> bool:
    """Whether ``parents`` describe a tree of so many tokens that one pass can verify."""
    return len(parents) == num_draft_tokens < MAX_TREE_ROWS and all(
        -1 <= parent < index for index, parent in enumerate(parents)
    )


def children(parents: Sequence[int], num_draft_tokens: int, row: int) -> Sequence[int]:
    """The drafted tokens that follow ``row``, in the drafter's order."""
    if not parents:
        return range(row, min(row + 1, num_draft_tokens))
    return [index for index, parent in enumerate(parents) if parent == row - 1]


def depths(parents: Sequence[int]) -> npt.NDArray[np.int64]:
    """``[num_draft_tokens + 1]``: how many drafted tokens lead to each row, itself included; 0 for row 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return np.array(found, dtype=np.int64)


def row_masks(parents: Sequence[int]) -> npt.NDArray[np.uint64]:
    """``RaggedBatch.tree_masks`` ``[num_draft_tokens + 1]``: of each row, a bit for each of its path's rows."""
    masks = [1]
    for row, parent in enumerate(parents, start=1):
        masks.append(masks[parent + 1] | 1 << row)
    return np.array(masks, dtype=np.uint64)
