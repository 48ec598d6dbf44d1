"""What a pass costs on this machine, in milliseconds: measured once, and kept in the user's cache for a week."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from tempfile import NamedTemporaryFile

from outrider.verify.checkpoint.cache import cache_dir

_MAX_AGE_S = 7 * 24 * 3600  # the machine may have been busy when it was measured, or may have changed
_MAX_FILES = 32  # of 1 kB

VERIFIED_ROWS = 2  # that a step with drafts gives a sequence, about

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds over a size, never descending; straight lines between the measured points.

    Before the first point it costs what the first does. Beyond the last it goes on as steeply as from half the
    last size on, or in proportion where there is no such point.

    Raises:
        ValueError: the points are not of this kind.
    """

    sizes: tuple[int, ...]  # ascending
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        monotone = all(a <= b for a, b in zip(self.ms, self.ms[1:], strict=False))
        if not self.sizes or len(self.sizes) != len(self.ms) or not ascending or not monotone:
            raise ValueError(f"sizes must ascend and milliseconds not descend: {self.sizes}, {self.ms}")
        if self.sizes[0] < 0 or not all(math.isfinite(ms) and ms >= 0 for ms in self.ms):
            raise ValueError(f"no sizes and milliseconds: {self.sizes}, {self.ms}")

    @staticmethod
    def fitted(seconds: Mapping[int, Sequence[float]]) -> Curve:
        """The curve through the median of each size's runs, smoothed where a larger size seemed cheaper."""
        sizes = sorted(seconds)
        # The lower of two: what disturbs a run makes it longer.
        medians = [median_low(seconds[size]) for size in sizes]
        values = smoothed(medians, [len(seconds[size]) for size in sizes])
        return Curve(tuple(sizes), tuple(max(0.0, value) * 1000 for value in values))

    def __call__(self, size: int) -> float:
        sizes, ms = self.sizes, self.ms
        after = bisect_right(sizes, size)
        if after == 0:
            return ms[0]
        if after < len(sizes):
            share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
            return ms[after - 1] + share * (ms[after] - ms[after - 1])
        if size == sizes[-1]:
            return ms[-1]
        half = bisect_right(sizes[:-1], sizes[-1] / 2) - 1
        slope = (ms[-1] - ms[half]) / (sizes[-1] - sizes[half]) if half >= 0 else ms[-1] / max(1, sizes[-1])
        return ms[-1] + slope * (size - sizes[-1])


def smoothed(values: Iterable[float], weights: Iterable[float]) -> list[float]:
    """The nearest values that never descend, in weighted least squares (pool adjacent violators, Barlow 1972)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, other_total, other_length = blocks.pop()
            mean = (mean * total + other * other_total) / (total + other_total)
            total, length = total + other_total, length + other_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


@dataclass(frozen=True, slots=True)
class CostTable:
    """What one pass costs, as a sum of what was measured apart: the layers, the head, and attention to a context.

    It is a model, and rough in three places. The layers were measured with all rows in one sequence that begins
    with them, so their attention to each other is in ``forward``; rows of many sequences attend to less. Attention
    to more than that is added sequence by sequence, though a crowd keeps the threads busier than one sequence.
    And what the sampler and the text cost is not in it.
    """

    forward: Curve  # rows -> the layers
    logits: Curve  # rows -> the head
    attention: Curve  # tokens before -> what one row takes longer for them
    chunk_attention: Curve  # tokens before -> the same for ``chunk_rows`` rows of one sequence
    chunk_rows: int
    draft_step: Curve | None = None  # sequences -> one token more of the chains of all, by the draft model
    draft_rows: Curve | None = None  # rows -> the draft model's part of what was verified

    def __post_init__(self) -> None:
        if self.chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, not {self.chunk_rows}")

    def pass_ms(self, num_rows: int, num_logit_rows: int | None = None, num_context_tokens: int = 0) -> float:
        """A pass of ``num_rows`` rows; ``num_logit_rows`` of them have logits computed (None: all).

        ``num_context_tokens``: how many tokens stand before the rows, if these are of one sequence. For more
        sequences leave it at 0, and add the ``attention_ms`` of each.
        """
        num_logit_rows = num_rows if num_logit_rows is None else num_logit_rows
        head = self.logits(num_logit_rows) if num_logit_rows else 0.0
        return self.forward(num_rows) + head + self.attention_ms(num_rows, num_context_tokens)

    def attention_ms(self, num_rows: int, num_context_tokens: int) -> float:
        """What a sequence's ``num_rows`` rows take longer for the ``num_context_tokens`` before them.

        One row has to read them; each further row computes with what was read.
        """
        if num_rows < 1 or num_context_tokens < 1:
            return 0.0
        one = self.attention(num_context_tokens)
        if self.chunk_rows == 1:
            return num_rows * one
        further = max(0.0, self.chunk_attention(num_context_tokens) - one) / (self.chunk_rows - 1)
        return one + further * (num_rows - 1)

    def draft_ms(self, num_sequences: int, num_steps: int) -> float:
        """Chains of ``num_steps`` tokens for ``num_sequences`` sequences; 0 without a draft model.

        With what they begin with: the draft's rows of what the last step verified, ``VERIFIED_ROWS`` a sequence.
        """
        if self.draft_step is None or self.draft_rows is None:
            return 0.0
        return self.draft_rows(VERIFIED_ROWS * num_sequences) + self.draft_step(num_sequences) * num_steps

    def __str__(self) -> str:
        largest, longest = self.forward.sizes[-1], self.attention.sizes[-1]
        rows = [(1, self.pass_ms(1)), (5, self.pass_ms(5))]
        passes = [f"{n} row{'s' * (n > 1)} {ms:.1f} ms" for n, ms in rows]
        passes += [f"{largest} rows of a prompt {self.forward(largest):.1f} ms"]
        passes += [f"{longest} tokens of context {self.attention(longest):.1f} ms more"] * (longest > 0)
        text = "a pass of " + ", of ".join(passes)
        return text if self.draft_step is None else f"{text}; a token of a draft {self.draft_step(1):.2f} ms"


def cached_cost_table(key: Mapping[str, str | int], measure: Callable[[], CostTable]) -> CostTable:
    """The table that was kept for ``key``, else a new one, which is kept if that can be done.

    ``key``: everything the costs depend on.
    """
    try:
        path = cache_dir() / "costs" / f"{_digest(key)}.json"
    except RuntimeError as error:  # no home directory
        logger.info("The costs of passes cannot be kept: %s.", error)
        return measure()
    if (table := _load(path, key)) is not None:
        logger.info("Measured at an earlier start: %s.", table)
        return table
    table = measure()
    logger.info("Measured: %s.", table)
    try:
        _save(path, key, table)
    except OSError as error:
        logger.info("The costs of passes cannot be kept, so the next start measures again: %s.", error)
    return table


def _digest(key: Mapping[str, str | int]) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]


def _load(path: Path, key: Mapping[str, str | int]) -> CostTable | None:
    """What the file holds; None if there is none, or none that can be used."""
    try:
        if time.time() - path.stat().st_mtime > _MAX_AGE_S:
            return None
        kept = json.loads(path.read_bytes())
        if kept["key"] != dict(key):
            raise ValueError("it is about something else")
        table = kept["table"]
        curves = {name: _curve(table[name]) for name in ("forward", "logits", "attention", "chunk_attention")}
        drafts = {name: table[name] and _curve(table[name]) for name in ("draft_step", "draft_rows")}
        return CostTable(**curves, **drafts, chunk_rows=int(table["chunk_rows"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        logger.warning("%s cannot be used, so the costs of passes are measured again: %s.", path, error)
        return None


def _curve(kept: Mapping[str, Sequence[float]]) -> Curve:
    return Curve(tuple(map(int, kept["sizes"])), tuple(map(float, kept["ms"])))


def _save(path: Path, key: Mapping[str, str | int], table: CostTable) -> None:
    """Keep a table, whole or not at all, and no more than ``_MAX_FILES`` of them.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump({"key": dict(key), "table": asdict(table)}, file)
    try:
        os.replace(file.name, path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise
    kept = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime)
    for old in kept[:-_MAX_FILES]:
        old.unlink(missing_ok=True)
