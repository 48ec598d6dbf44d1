"""Measuring what a draft model costs, in a fraction of a second."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from outrider.draft.model import DraftNetwork
from outrider.draft.model_rows import ragged_batch
from outrider.kernels.draft_model import ChainLimits
from outrider.kernels.operations import NULL_PAGE, Operations, RaggedBatch
from outrider.kvcache.storage import KVStorage
from outrider.server.engine.cost_table import CostTable, Curve

SIZES = (1, 2, 4, 8, 16, 32)  # rows, sequences
CHAIN_STEPS = 4
CONTEXT_TOKENS = 64  # before the rows; longer contexts cost a layer or two next to nothing
NUM_ROUNDS = 7


def add_draft(
    table: CostTable,
    network: DraftNetwork,
    operations: Operations,
    page_size: int,
    max_sequences: int,
    budget_s: float = 0.3,
) -> CostTable:
    """``table`` with the costs of a draft model, measured with up to ``max_sequences`` sequences at a time.

    The smallest sizes are always measured, however slow the model; the others as often as ``budget_s`` allows.
    """
    deadline = time.perf_counter() + budget_s
    bench = _Bench(network, operations, page_size, min(max_sequences, SIZES[-1]))
    rows: defaultdict[int, list[float]] = defaultdict(list)
    steps: defaultdict[int, list[float]] = defaultdict(list)
    bench.settle(1)  # the first of all pays for what is made at first use
    bench.chain(1)
    for number in range(NUM_ROUNDS):
        for size in SIZES:
            if size > bench.max_sequences or (time.perf_counter() > deadline and (number > 0 or size > 1)):
                continue
            rows[size].append(_seconds(lambda size=size: bench.settle(size)))  # type: ignore[misc]
            steps[size].append(_seconds(lambda size=size: bench.chain(size)) / CHAIN_STEPS)  # type: ignore[misc]
    return replace(table, draft_step=Curve.fitted(steps), draft_rows=Curve.fitted(rows))


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class _Bench:
    """Sequences of ``CONTEXT_TOKENS`` tokens in pages of their own, given back at the end."""

    def __init__(self, network: DraftNetwork, operations: Operations, page_size: int, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self._network = network
        self._operations = operations
        pages_each = -(-(CONTEXT_TOKENS + CHAIN_STEPS) // page_size)
        first = NULL_PAGE + 1
        self._tables = [list(range(first + pages_each * i, first + pages_each * (i + 1))) for i in range(max_sequences)]
        self._storage = KVStorage([network.kv_layers], first + pages_each * max_sequences, page_size)
        self._storage.layers(network.kv_layers.name).zero_()
        self._hidden = self._residual(self._batch(max_sequences))

    def settle(self, num_sequences: int) -> None:
        """The row of one verified token each."""
        self._residual(self._batch(num_sequences))

    def chain(self, num_sequences: int) -> None:
        """A chain each."""
        shape = (num_sequences, CHAIN_STEPS)
        limits = ChainLimits(
            np.full(num_sequences, CHAIN_STEPS, dtype=np.int64),
            np.zeros(num_sequences),
            np.zeros(num_sequences),
            np.zeros(shape, dtype=np.uint64),
        )
        positions = torch.arange(CONTEXT_TOKENS, CONTEXT_TOKENS + CHAIN_STEPS).repeat(num_sequences)
        cos, sin = self._network.rotary.at(positions)
        self._operations.draft_chain(
            self._network.packed,
            self._hidden[:num_sequences].clone(),
            self._batch(num_sequences),
            cos.view(*shape, -1),
            sin.view(*shape, -1),
            self._storage.layers(self._network.kv_layers.name),
            limits,
        )

    def _batch(self, num_sequences: int) -> RaggedBatch:
        runs = [(table, CONTEXT_TOKENS, CONTEXT_TOKENS + 1) for table in self._tables[:num_sequences]]
        return ragged_batch(runs, self._storage.page_size)

    def _residual(self, batch: RaggedBatch) -> torch.Tensor:
        token_ids = torch.arange(batch.num_seqs) * 7919 % self._network.vocab_size
        size = self._network.feature_size
        features = torch.zeros(batch.num_seqs, size) if size else None
        return self._network.residual(token_ids, features, batch, self._storage)
