"""Measuring what a pass of a model costs, in about a second."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from statistics import median_low

import numpy as np
import torch

from outrider.kernels.cpu.availability import selected_instruction_set, usable_cpus
from outrider.kernels.operations import NULL_PAGE, RaggedBatch
from outrider.kvcache.storage import KVStorage
from outrider.server.cli.machine import read_processor
from outrider.server.engine.cost_table import CostTable, Curve
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.checkpoint import fingerprint_files
from outrider.verify.transformer import Transformer

CHUNK_ROWS = 16
CONTEXTS = (1024, 4096, 16384, 65536)  # less than the first is lost in what passes differ by anyway
MAX_LOGIT_ROWS = 32  # the logits of more would be memory that the engine has no other use for
MAX_STORAGE_BYTES = 64 << 20
MAX_RUNS = 9


def profile_key(
    settings: EngineSettings, fingerprint: str, max_context: int, draft_fingerprint: str = ""
) -> dict[str, str | int]:
    """All that a profile depends on. ``settings`` are resolved; the fingerprints are those of the checkpoints."""
    return {
        "model": fingerprint,
        "draft": draft_fingerprint,
        "draft_quantize": settings.draft_quantize if draft_fingerprint else "",
        "kernels": settings.kernels,
        "build": _build(settings.kernels),
        "instruction_set": selected_instruction_set() if settings.kernels == "cpu" else "",
        "num_threads": settings.num_threads or usable_cpus(),
        "quantize": settings.quantize,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "page_size": settings.page_size,
        "max_step_tokens": settings.max_step_tokens,
        "max_context": max_context,
        "processor": read_processor().model,
        "outrider": next((found.version for found in distributions(name="outrider")), ""),
    }


def _build(kernels: str) -> str:
    """Which build of the kernels computes: versions say nothing of who works on them."""
    if kernels != "cpu":
        return f"torch {torch.__version__}"
    from outrider.kernels.cpu import _native

    return fingerprint_files([Path(str(_native.__file__))])


@dataclass(frozen=True, slots=True)
class Shape:
    """One pass to be measured: rows of one sequence, after so many tokens that are cached."""

    num_rows: int
    num_context_tokens: int = 0


def profile(model: Transformer, page_size: int, max_rows: int, max_context: int, budget_s: float = 1.0) -> CostTable:
    """Measure passes of up to ``max_rows`` rows after up to ``max_context`` tokens, for ``budget_s`` seconds.

    Two shapes are always measured, however slow the model; a slower one gets fewer points. The keys and values
    lie in pages of their own, given back at the end: as many as fit ``MAX_STORAGE_BYTES``, which is more than
    stays in a cache between two passes, so longer contexts only go on as these do.
    """
    deadline = time.perf_counter() + budget_s
    group = model.kv_layers
    num_tokens = max(page_size, min(max_context, MAX_STORAGE_BYTES // group.bytes_per_token))
    storage = KVStorage([group], num_pages=1 + -(-num_tokens // page_size), page_size=page_size)
    storage.layers(group.name).zero_()
    shapes = shapes_to_measure(max_rows, min(num_tokens, max_context))
    _Bench(model, storage).run(shapes[0])  # the first pass of all pays for what is made at first use
    bench = _Bench(model, storage)
    for shape in shapes[:2]:
        bench.run(shape)
    while (following := bench.next(shapes, deadline - time.perf_counter())) is not None:
        bench.run(following)
    return bench.table()


def shapes_to_measure(max_rows: int, max_tokens: int) -> list[Shape]:
    """All shapes, the ones that say most first. ``max_tokens``: of context and rows together."""
    sizes = row_sizes(min(max_rows, max_tokens))
    chunk = min(CHUNK_ROWS, sizes[-1])
    longest = max_tokens - chunk
    contexts = [n for n in CONTEXTS if n < longest] + [longest] * (longest > 0)
    ends = [Shape(n, context) for context in (0, *contexts[-1:]) for n in (1, chunk)]
    coarse_to_fine = [*sizes[::4], *sizes[2::4], *sizes[1::2]]
    between = [Shape(n, context) for context in contexts for n in (1, chunk)]
    return list(dict.fromkeys([*ends, *map(Shape, coarse_to_fine), *between]))


def row_sizes(max_rows: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, ... and ``max_rows``."""
    powers = [2**i for i in range(2, max_rows.bit_length())]
    sizes = {1, 2, 3, 5, *powers, *(power * 3 // 2 for power in powers), min(CHUNK_ROWS, max_rows), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


@dataclass(frozen=True, slots=True)
class _Run:
    forward_s: float
    logits_s: float | None  # None: none were computed

    @property
    def total_s(self) -> float:
        return self.forward_s + (self.logits_s or 0.0)


class _Bench:
    """Runs passes and remembers how long they took."""

    def __init__(self, model: Transformer, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage
        self._page_table = np.arange(NULL_PAGE + 1, storage.num_pages, dtype=np.int32)
        self._runs: defaultdict[Shape, list[_Run]] = defaultdict(list)

    def run(self, shape: Shape) -> None:
        expected_s = self._expected_s(shape)
        self._run_once(shape)
        if self._runs[shape][-1].total_s > 2 * expected_s:  # whatever came in between, the lower of the two counts
            self._run_once(shape)

    def _run_once(self, shape: Shape) -> None:
        token_ids = torch.arange(shape.num_rows) * 7919 % self._model.config.vocab_size
        batch = self._batch(shape)
        started = time.perf_counter()
        hidden = self._model.forward(token_ids, batch, self._storage)
        computed = time.perf_counter()
        logits_s = None
        if shape.num_rows <= MAX_LOGIT_ROWS and shape.num_context_tokens == 0:
            self._model.logits(hidden)
            logits_s = time.perf_counter() - computed
        self._runs[shape].append(_Run(computed - started, logits_s))

    def next(self, shapes: list[Shape], left_s: float) -> Shape | None:
        """Which shape to run next, of those that can be run in the time that is left.

        Each once, then the one that has taken the least time so far: short passes are most of all passes, need
        several runs to be told apart, and are cheap to repeat. Between two runs of a shape there are other shapes.
        """

        def urgency(shape: Shape) -> tuple[bool, float]:
            return bool(self._runs[shape]), sum(run.total_s for run in self._runs[shape])

        fitting = [s for s in shapes if len(self._runs[s]) < MAX_RUNS and self._expected_s(s) < left_s]
        return min(fitting, key=urgency, default=None)

    def table(self) -> CostTable:
        plain = {shape.num_rows: runs for shape, runs in self._runs.items() if runs and not shape.num_context_tokens}
        forward = {n: [run.forward_s for run in runs] for n, runs in plain.items()}
        logits = {n: [run.logits_s for run in runs if run.logits_s is not None] for n, runs in plain.items()}
        chunk_rows = min(CHUNK_ROWS, max(plain))
        return CostTable(
            forward=Curve.fitted(forward),
            logits=Curve.fitted({n: runs for n, runs in logits.items() if runs}),
            attention=self._attention(1),
            chunk_attention=self._attention(chunk_rows),
            chunk_rows=chunk_rows,
        )

    def _attention(self, num_rows: int) -> Curve:
        """What contexts add to a pass of so many rows. Where there was no time to measure any: nothing."""
        without_s = median_low(run.forward_s for run in self._runs[Shape(num_rows)])
        samples = {
            shape.num_context_tokens: [run.forward_s - without_s for run in runs]
            for shape, runs in self._runs.items()
            if runs and shape.num_rows == num_rows and shape.num_context_tokens
        }
        return Curve.fitted({0: [0.0], **samples})

    def _expected_s(self, shape: Shape) -> float:
        """How long a run may take; of a shape that was never run, rather too long than too short."""
        if runs := self._runs[shape]:
            return max(run.total_s for run in runs)

        def scaled(other: Shape, run: _Run) -> float:
            more_rows = max(1.0, shape.num_rows / other.num_rows)
            return run.total_s * more_rows * (2.0 if shape.num_context_tokens > other.num_context_tokens else 1.0)

        return min((scaled(other, run) for other, runs in self._runs.items() for run in runs), default=math.inf)

    def _batch(self, shape: Shape) -> RaggedBatch:
        start, stop = shape.num_context_tokens, shape.num_context_tokens + shape.num_rows
        positions = np.arange(start, stop, dtype=np.int64)
        size = self._storage.page_size
        return RaggedBatch(
            cu_seqlens_q=np.array([0, shape.num_rows], dtype=np.int32),
            seq_lens=np.array([stop], dtype=np.int32),
            page_tables=self._page_table[None],
            positions=positions,
            slot_mapping=self._page_table[positions // size].astype(np.int64) * size + positions % size,
        )
