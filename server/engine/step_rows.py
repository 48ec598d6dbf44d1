"""From a plan to the arrays of one pass: which token, position and slot each row has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE, RaggedBatch
from outrider.server.engine.batcher import ScheduledRows
from outrider.verify.tree import depths, row_masks


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, sequence after sequence."""

    token_ids: Tensor  # int64 [num_tokens]
    batch: RaggedBatch
    logit_rows: Tensor  # int64 [num_logit_rows], rows whose next token is wanted


def layout(scheduled: Sequence[ScheduledRows]) -> StepRows:
    """Lay the scheduled rows end to end. Their pages must have been reserved."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    cu_seqlens_q = [0]
    seq_lens: list[int] = []
    trees: list[tuple[int, npt.NDArray[np.uint64]]] = []  # the first row of each, and its masks
    max_pages = max(len(rows.sequence.pages.page_table) for rows in scheduled)
    page_tables = np.full((len(scheduled), max_pages), NULL_PAGE, dtype=np.int32)
    for index, rows in enumerate(scheduled):
        sequence, start, stop = rows.sequence, rows.start, rows.start + rows.num_rows
        token_ids += sequence.token_ids(start, start + rows.num_tokens)
        token_ids += rows.draft.token_ids
        if rows.draft.parents:
            assert rows.num_tokens == 1, "a tree follows the last known token"
            trees.append((len(positions), row_masks(rows.draft.parents)))
            positions += (start + depths(rows.draft.parents)).tolist()
        else:
            positions += range(start, stop)
        slots += sequence.pages.slots(start, stop)
        page_tables[index, : len(sequence.pages.page_table)] = sequence.pages.page_table
        if rows.predicts:
            logit_rows += range(len(token_ids) - len(rows.draft.token_ids) - 1, len(token_ids))
        cu_seqlens_q.append(len(token_ids))
        seq_lens.append(stop)
    batch = RaggedBatch(
        cu_seqlens_q=np.array(cu_seqlens_q, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        page_tables=page_tables,
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        tree_masks=_masks(trees, len(positions)) if trees else None,
    )
    return StepRows(torch.tensor(token_ids), batch, torch.tensor(logit_rows, dtype=torch.int64))


def _masks(trees: Sequence[tuple[int, npt.NDArray[np.uint64]]], num_rows: int) -> npt.NDArray[np.uint64]:
    masks = np.zeros(num_rows, dtype=np.uint64)
    for first_row, tree in trees:
        masks[first_row : first_row + len(tree)] = tree
    return masks
