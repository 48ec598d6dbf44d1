"""The rows of a draft model: those that wait, and the arrays of a pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE, RaggedBatch
from outrider.kvcache.sequence import SequencePages


@dataclass(frozen=True, slots=True, eq=False)
class PendingRow:
    """A row to compute."""

    token_id: int
    feature: Tensor | None  # [len(taps) * hidden_size] of the position before; None: not known, or no taps


@dataclass(slots=True)
class FollowedSequence:
    """How far the draft's rows of one sequence are computed."""

    pages: SequencePages
    frontier: int = 0  # rows 0 .. frontier - 1 are in the pages
    pending: list[PendingRow] = field(default_factory=list)  # at positions frontier and after
    hidden: Tensor | None = None  # [hidden_size] of row frontier - 1; None where it is not the last that is known
    _frozen_table: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.frontier + len(self.pending)

    @property
    def page_table(self) -> Sequence[int]:
        return self.pages.page_table if self._frozen_table is None else self._frozen_table

    def freeze(self) -> None:
        """Keep the page table as it is now, before the sequence gives its pages back."""
        self._frozen_table = list(self.pages.page_table)

    def restart(self, start: int, first: PendingRow) -> None:
        """Go on from ``start``; the rows before it are in the pages or will be missed."""
        self.frontier, self.pending, self.hidden = start, [first], None

    def add(self, row: PendingRow) -> None:
        """One row more is known."""
        self.pending.append(row)
        self.hidden = None

    def num_slots(self, page_size: int) -> int:
        return len(self.page_table) * page_size

    def num_computable(self, page_size: int) -> int:
        """How many of the pending rows have a slot."""
        return max(0, min(len(self.pending), self.num_slots(page_size) - self.frontier))

    def computed(self, num_rows: int, hidden: Tensor) -> None:
        """``num_rows`` of the pending rows are in the pages, the last of which left ``hidden`` ``[hidden_size]``."""
        self.frontier += num_rows
        # What is left is one row at most, a view of a whole pass's features: a copy lets these go.
        self.pending = [
            PendingRow(row.token_id, None if row.feature is None else row.feature.clone())
            for row in self.pending[num_rows:]
        ]
        self.hidden = None if self.pending else hidden


def ragged_batch(runs: Sequence[tuple[Sequence[int], int, int]], page_size: int) -> RaggedBatch:
    """Rows at positions ``start .. stop - 1`` for each ``(page_table, start, stop)``.

    A row without a page has the null page's slot; it must not be computed.
    """
    max_pages = max(max(len(table), -(-stop // page_size)) for table, _, stop in runs)
    page_tables = np.full((len(runs), max_pages), NULL_PAGE, dtype=np.int32)
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens_q = [0]
    for index, (table, start, stop) in enumerate(runs):
        page_tables[index, : len(table)] = table
        positions += range(start, stop)
        with_page = min(stop, len(table) * page_size)
        slots += [table[pos // page_size] * page_size + pos % page_size for pos in range(start, with_page)]
        slots += [NULL_PAGE * page_size + pos % page_size for pos in range(max(start, with_page), stop)]
        cu_seqlens_q.append(len(positions))
    return RaggedBatch(
        cu_seqlens_q=np.array(cu_seqlens_q, dtype=np.int32),
        seq_lens=np.array([stop for *_, stop in runs], dtype=np.int32),
        page_tables=page_tables,
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
    )
