"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from outrider.server.bench.measures import Measurement, Ratio, Summary, ratio
from outrider.server.bench.rounds import Result
from outrider.server.cli.machine import read_processor

Cell = Callable[[Summary], str]

COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("TTFT p50", lambda s: _ms(s.ttft_p50_s)),
    ("p95", lambda s: _ms(s.ttft_p95_s)),
    ("TPOT p50", lambda s: _ms(s.tpot_p50_s)),
    ("ICL p95", lambda s: _ms(s.icl_p95_s)),
    ("tok/s a stream", lambda s: _number(s.stream_tokens_per_second)),
    ("tok/s in all", lambda s: _number(s.total_tokens_per_second)),
    ("acceptance", lambda s: _number(s.acceptance_length, 2)),
    ("tokens", lambda s: "-" if s.num_output_tokens is None else str(s.num_output_tokens)),
    ("failed", lambda s: f"{s.num_failed}/{s.num_requests}"),
)
# The figures whose ratio is printed.
RATIOS: tuple[tuple[str, Callable[[Summary], float | None]], ...] = (
    ("tokens/s in all", lambda s: s.total_tokens_per_second),
    ("tokens/s a stream", lambda s: s.stream_tokens_per_second),
    ("TTFT p50 (less is better)", lambda s: s.ttft_p50_s),
    ("TPOT p50 (less is better)", lambda s: s.tpot_p50_s),
)
LEGEND = """\
Times in ms, seen by the client. TTFT: sent to first text. TPOT: (E2E - TTFT)/(n - 1). ICL: between pieces of text,
each of which holds all tokens of a step. tok/s a stream: tokens/E2E, mean over requests. tok/s in all: tokens over
wall time. acceptance: mean tokens per step that verified a draft, the target's own included. Token counts are the
server's."""


def machine() -> dict[str, Any]:
    processor = read_processor()
    return {
        "processor": processor.model,
        "num_cores": processor.num_cores,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "outrider": version("outrider"),
    }


def table(results: Sequence[Result]) -> str:
    """One line for each contender and concurrency."""
    header = ("streams", "contender", *(name for name, _ in COLUMNS))
    rows = [header]
    for result in results:
        summary = result.summary
        rows.append((str(result.concurrency), result.contender, *(cell(summary) for _, cell in COLUMNS)))
    return aligned(rows, left=(1,))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lines with the cells of ``rows`` below each other, flush left in the columns ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def ratios(first: Result, second: Result) -> str:
    """How the first compares with the second, with the spread over rounds."""
    lines = [f"{first.contender} / {second.contender}, {num_streams(first.concurrency)}, {len(first.rounds)} rounds:"]
    for name, found in compared(first, second).items():
        if found is None:
            lines.append(f"  {name:<26} -")
        else:
            lines.append(f"  {name:<26} {found.median:.2f}x  (rounds {found.lowest:.2f} to {found.highest:.2f})")
    equal, total = equal_token_counts(first, second)
    lines.append(f"  same number of tokens for {equal} of {total} answers")
    return "\n".join(lines)


def compared(first: Result, second: Result) -> dict[str, Ratio | None]:
    ours, theirs = first.round_summaries, second.round_summaries
    return {name: ratio([figure(s) for s in ours], [figure(s) for s in theirs]) for name, figure in RATIOS}


def equal_token_counts(first: Result, second: Result) -> tuple[int, int]:
    """Answers for which both counted the same input and output tokens, and all that neither failed."""
    pairs = [
        (a, b)
        for a, b in zip(_measurements(first), _measurements(second), strict=True)
        if a.error is None and b.error is None
    ]
    equal = sum(
        (a.num_input_tokens, a.num_output_tokens) == (b.num_input_tokens, b.num_output_tokens) for a, b in pairs
    )
    return equal, len(pairs)


def failures(results: Sequence[Result]) -> list[str]:
    """A sentence for each request that failed."""
    return [
        f"{result.contender}, line {measurement.line}: {measurement.error}"
        for result in results
        for measurement in _measurements(result)
        if measurement.error is not None
    ]


def as_json(workload: dict[str, Any], machine: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Everything, each request's times included. Times in seconds."""
    comparisons = [
        {
            "first": first.contender,
            "second": second.contender,
            "concurrency": first.concurrency,
            "ratios": {name: found and asdict(found) for name, found in compared(first, second).items()},
        }
        for first, second in pairs(results)
    ]
    return {
        "workload": workload,
        "machine": machine,
        "results": [{**asdict(result), "summary": asdict(result.summary)} for result in results],
        "comparisons": comparisons,
    }


def pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """The first contender with each other one, at the same concurrency."""
    ours = {result.concurrency: result for result in reversed(results)}
    return [(ours[r.concurrency], r) for r in results if r is not ours[r.concurrency]]


def _measurements(result: Result) -> list[Measurement]:
    return [measurement for passes in result.rounds for one in passes for measurement in one.measurements]


def num_streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
