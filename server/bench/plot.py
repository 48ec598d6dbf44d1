"""Results as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.server.bench.measures import Summary
from outrider.server.bench.rounds import Result

FIGURES: tuple[tuple[str, Callable[[Summary], float | None]], ...] = (
    ("tokens/s in all", lambda s: s.total_tokens_per_second),
    ("tokens/s a stream", lambda s: s.stream_tokens_per_second),
    ("TTFT p50 [ms]", lambda s: s.ttft_p50_s and s.ttft_p50_s * 1000),
    ("ICL p95 [ms]", lambda s: s.icl_p95_s and s.icl_p95_s * 1000),
)


class PlotUnavailable(Exception):
    """matplotlib is missing; the message says how to get it."""


def load_matplotlib() -> Any:
    """``matplotlib.pyplot``, drawing to files.

    Raises:
        PlotUnavailable: it is not installed.
    """
    try:
        import matplotlib
        import matplotlib.pyplot as pyplot
    except ModuleNotFoundError as error:
        raise PlotUnavailable("--plot needs matplotlib; get it with: pip install 'outrider[plot]'") from error
    matplotlib.use("agg")
    return pyplot


def save_plot(results: Sequence[Result], title: str, path: Path) -> None:
    """A panel per figure: contenders side by side, grouped by concurrency, whiskers for the range over rounds."""
    pyplot = load_matplotlib()
    names = list(dict.fromkeys(result.contender for result in results))
    levels = list(dict.fromkeys(result.concurrency for result in results))
    found = {(result.contender, result.concurrency): result for result in results}
    picture, axes = pyplot.subplots(1, len(FIGURES), figsize=(4 * len(FIGURES), 3.6), layout="constrained")
    width = 0.8 / len(names)
    for panel, (label, figure) in zip(axes, FIGURES, strict=True):
        for place, name in enumerate(names):
            results_of_name = [found[name, level] for level in levels]
            heights = [figure(result.summary) or 0.0 for result in results_of_name]
            ranges = [[figure(s) or 0.0 for s in result.round_summaries] for result in results_of_name]
            below = [max(height - min(values), 0.0) for height, values in zip(heights, ranges, strict=True)]
            above = [max(max(values) - height, 0.0) for height, values in zip(heights, ranges, strict=True)]
            positions = [level + (place - (len(names) - 1) / 2) * width for level in range(len(levels))]
            panel.bar(positions, heights, width, yerr=[below, above], capsize=3, label=name)
        panel.set_xticks(range(len(levels)), [f"{level} streams" if level > 1 else "1 stream" for level in levels])
        panel.set_title(label)
        panel.grid(axis="y", alpha=0.3)
    axes[0].legend()
    picture.suptitle(title, fontsize="medium")
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
