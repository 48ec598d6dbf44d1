"""From timestamps to numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.server.bench.speculation import Speculation, merged


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request as its client saw it. Times in seconds from the moment it was sent."""

    line: int  # of the prompt in its file
    text_times_s: tuple[float, ...]  # when each piece of text arrived
    e2e_s: float | None  # None: it did not come to its end
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    speculation: Speculation | None = None
    error: str | None = None
    text_digest: str | None = None  # of the whole answer: two that agree gave the same text

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text that is not empty."""
        return self.text_times_s[0] if self.text_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT)/(n - 1)."""
        if self.ttft_s is None or self.e2e_s is None or not self.num_output_tokens or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Of this stream, its first token's wait included."""
        return self.num_output_tokens / self.e2e_s if self.num_output_tokens and self.e2e_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-chunk latencies. A chunk holds all tokens of one step, so these are not times per token."""
        return [late - early for early, late in zip(self.text_times_s, self.text_times_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Pass:
    """Some prompts, run together by one contender."""

    wall_s: float
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What many requests come to. None where nothing could be measured."""

    num_requests: int
    num_failed: int
    num_output_tokens: int | None
    wall_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    icl_p95_s: float | None
    stream_tokens_per_second: float | None  # mean over streams
    total_tokens_per_second: float | None  # all tokens over the wall time
    acceptance_length: float | None  # over all steps of all requests, so that long answers weigh more


def summarise(passes: Iterable[Pass]) -> Summary:
    passes = list(passes)
    requests = [measurement for one in passes for measurement in one.measurements]
    done = [request for request in requests if request.error is None]
    wall_s = sum(one.wall_s for one in passes)
    tokens = [request.num_output_tokens for request in done]
    num_tokens = sum(n for n in tokens if n is not None) if done and None not in tokens else None
    speeds = _known(done, lambda request: request.tokens_per_second)
    ttfts = _known(done, lambda request: request.ttft_s)
    return Summary(
        num_requests=len(requests),
        num_failed=len(requests) - len(done),
        num_output_tokens=num_tokens,
        wall_s=wall_s,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        tpot_p50_s=percentile(_known(done, lambda request: request.tpot_s), 50),
        icl_p95_s=percentile([gap for request in done for gap in request.gaps_s], 95),
        stream_tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
        total_tokens_per_second=num_tokens / wall_s if num_tokens and wall_s else None,
        acceptance_length=merged(request.speculation for request in done).acceptance_length,
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the first contender's figure is the second's, over the rounds."""

    median: float
    lowest: float
    highest: float


def ratio(firsts: Sequence[float | None], seconds: Sequence[float | None]) -> Ratio | None:
    """Round by round; None if any round lacks a figure."""
    pairs = [(a, b) for a, b in zip(firsts, seconds, strict=True) if a is not None and b]
    if not pairs or len(pairs) < len(firsts):
        return None
    ratios = [a / b for a, b in pairs]
    return Ratio(float(np.median(ratios)), min(ratios), max(ratios))


def percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _known(requests: Iterable[Measurement], figure: Callable[[Measurement], float | None]) -> list[float]:
    return [value for request in requests if (value := figure(request)) is not None]
