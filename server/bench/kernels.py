"""How near each operation comes to what the machine could do at the most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Bound = Literal["memory", "int8", "f32"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be moved and computed at the least, with no time in between in which only one of them is done."""

    num_bytes: int = 0  # read from memory, or written to it
    int8_macs: int = 0  # multiply-adds of int8
    f32_macs: int = 0  # multiply-adds of floats


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine did when it did nothing else."""

    bytes_per_s: float
    int8_macs_per_s: float
    f32_macs_per_s: float

    def limits_s(self, work: Work) -> dict[Bound, float]:
        """How long each part of the machine would need for its share."""
        return {
            "memory": work.num_bytes / self.bytes_per_s,
            "int8": work.int8_macs / self.int8_macs_per_s,
            "f32": work.f32_macs / self.f32_macs_per_s,
        }

    def limit_s(self, parts: Iterable[Work]) -> float:
        """The shortest possible time: the parts follow each other, and each takes as long as its slower share.

        A processor multiplies int8 and floats with the same units, so those two add up.
        """
        total = 0.0
        for work in parts:
            limits = self.limits_s(work)
            total += max(limits["memory"], limits["int8"] + limits["f32"])
        return total

    def bound(self, parts: Sequence[Work]) -> Bound:
        """Which part of the machine would need the longest for all of it."""
        shares: dict[Bound, float] = {"memory": 0.0, "int8": 0.0, "f32": 0.0}
        for work in parts:
            for name, seconds in self.limits_s(work).items():
                shares[name] += seconds
        return max(shares, key=lambda name: shares[name])

    @staticmethod
    def of(readings: Sequence[Ceilings]) -> Ceilings:
        """Those of a while: how fast memory usually was, and how fast the processor ever was.

        What memory gives changes with what others take; a processor that was slower had something else to do.
        """
        return Ceilings(
            median(reading.bytes_per_s for reading in readings),
            max(reading.int8_macs_per_s for reading in readings),
            max(reading.f32_macs_per_s for reading in readings),
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to measure. ``run`` makes ``num_calls`` calls, each of which does ``parts``."""

    name: str
    parts: tuple[Work, ...]
    run: Callable[[], None]
    num_calls: int
    num_rows: int
    num_context_tokens: int | None = None  # before the rows; None: it has nothing to do with them
    weights: str = ""  # form and shape

    @property
    def num_bytes(self) -> int:
        return sum(work.num_bytes for work in self.parts)

    @property
    def num_macs(self) -> int:
        return sum(work.int8_macs + work.f32_macs for work in self.parts)


@dataclass(slots=True)
class Measured:
    """An operation's times, round by round, with the ceilings of the same round."""

    operation: Operation
    seconds: list[float] = field(default_factory=list)  # of one call
    ceilings: list[Ceilings] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def percents(self) -> list[float]:
        """Of the limit, round by round; 100 is as fast as can be."""
        parts = self.operation.parts
        return [
            100 * ceilings.limit_s(parts) / seconds
            for seconds, ceilings in zip(self.seconds, self.ceilings, strict=True)
        ]

    @property
    def bound(self) -> Bound:
        return Ceilings.of(self.ceilings).bound(self.operation.parts)


def measure(
    operations: Sequence[Operation], read_ceilings: Callable[[], Ceilings], num_rounds: int, report: Report
) -> list[Measured]:
    """Run every operation once a round, each right after the ceilings were read.

    ``read_ceilings`` leaves nothing of the model in the caches, so what an operation reads comes from memory, as in
    a pass. A first round, which pays for what is made at first use, does not count.
    """
    measured = [Measured(operation) for operation in operations]
    for round_index in range(num_rounds + 1):
        readings: list[Ceilings] = []
        seconds: list[float] = []
        for index, operation in enumerate(operations):
            report(f"round {round_index} of {num_rounds}: {operation.name} ({index + 1} of {len(operations)})")
            readings.append(read_ceilings())
            started = time.perf_counter()
            operation.run()
            seconds.append((time.perf_counter() - started) / operation.num_calls)
        if round_index == 0:
            continue
        for one, took_s in zip(measured, seconds, strict=True):
            one.seconds.append(took_s)
            one.ceilings.append(Ceilings.of(readings))
    return measured


COLUMNS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("rows", lambda m: str(m.operation.num_rows)),
    ("context", lambda m: "-" if m.operation.num_context_tokens is None else str(m.operation.num_context_tokens)),
    ("ms", lambda m: f"{m.median_s * 1e3:.3f}"),
    ("GB/s", lambda m: f"{m.operation.num_bytes / m.median_s / 1e9:.1f}"),
    ("GMAC/s", lambda m: f"{m.operation.num_macs / m.median_s / 1e9:.1f}"),
    ("limit", lambda m: m.bound),
    ("% of it", lambda m: f"{median(m.percents):.0f}"),
    ("rounds", lambda m: f"{min(m.percents):.0f} to {max(m.percents):.0f}"),
)
LEGEND = """\
ms: one call, median of the rounds. % of it: the time that the slower of memory and processor needs at the least, over
the time taken. Weights and keys come from memory, as they do in a pass; activations, and with them norm, rotary and
write_kv, lie in the caches, where more than 100 % is possible. pass: all layers and the head in one go; 1, 5 and 8 rows
with logits for each, 512 with logits for the last. Of the attention, exponentials do not count as work."""


def table(measured: Sequence[Measured]) -> str:
    """One line for each operation."""
    rows = [("operation", "weights", *(name for name, _ in COLUMNS))]
    rows += [(m.operation.name, m.operation.weights, *(cell(m) for _, cell in COLUMNS)) for m in measured]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def ceilings_text(measured: Sequence[Measured]) -> str:
    """The ceilings, with their range over the rounds."""
    rounds = measured[0].ceilings
    figures = (
        ("memory", [c.bytes_per_s for c in rounds], "GB/s"),
        ("int8", [c.int8_macs_per_s for c in rounds], "GMAC/s"),
        ("f32", [c.f32_macs_per_s for c in rounds], "GMAC/s"),
    )
    return ", ".join(
        f"{name} {median(values) / 1e9:.1f} {unit} ({min(values) / 1e9:.1f} to {max(values) / 1e9:.1f})"
        for name, values, unit in figures
    )


def as_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything, round by round. Times in seconds."""
    return {
        "ceilings": [
            {
                "bytes_per_s": ceilings.bytes_per_s,
                "int8_macs_per_s": ceilings.int8_macs_per_s,
                "f32_macs_per_s": ceilings.f32_macs_per_s,
            }
            for ceilings in measured[0].ceilings
        ],
        "operations": [
            {
                "name": m.operation.name,
                "weights": m.operation.weights,
                "num_rows": m.operation.num_rows,
                "num_context_tokens": m.operation.num_context_tokens,
                "num_bytes": m.operation.num_bytes,
                "num_macs": m.operation.num_macs,
                "bound": m.bound,
                "seconds": m.seconds,
                "percents": m.percents,
            }
            for m in measured
        ],
    }
