"""Prometheus metrics, under vLLM's names with our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.server.engine.client import EngineStatus
from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.protocol.draft_counts import NO_SOURCE
from outrider.server.protocol.metrics_block import ResponseMetrics

_PREFIX = "outrider:"
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class ServerMetrics:
    """One server's metrics in a registry of its own. Observes all responses."""

    def __init__(self, engine_status: Callable[[], EngineStatus]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine_status))
        self.connections = self._gauge("num_connections", "Open WebSocket connections.")
        self.slow_consumers = self._counter("slow_consumer_closes", "Connections closed because they read too slowly.")
        self._drafts = self._counter(
            "spec_decode_num_drafts", "Steps that verified at least one draft token.", "source"
        )
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", "source")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "source")
        self._draft_tokens_per_position = self._counter(
            "spec_decode_num_draft_tokens_per_pos", "Draft tokens verified, by position.", "position", "source"
        )
        self._accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", "position", "source"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that reached the engine.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = self._counter("request_success", "Requests that ended, by how.", "finished_reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first delivered text.", _TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens, evenly in a step.", _TOKEN_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last event.", _REQUEST_BUCKETS)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to the first pass with the request.", _REQUEST_BUCKETS
        )

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def step(self, output: StepOutput, seconds: float | None) -> None:
        num_tokens = len(output.token_ids)
        self._generation_tokens.inc(num_tokens)
        if seconds is not None:
            for _ in range(num_tokens):
                self._itl.observe(seconds / num_tokens)
        if output.num_draft_tokens:
            source = output.draft_source or NO_SOURCE
            self._drafts.labels(source).inc()
            self._draft_tokens.labels(source).inc(output.num_draft_tokens)
            self._accepted.labels(source).inc(output.num_gained)
            for position in range(output.num_draft_tokens):
                self._draft_tokens_per_position.labels(str(position), source).inc()
            for position in range(output.num_gained):
                self._accepted_per_position.labels(str(position), source).inc()

    def finished(self, reason: FinishReason, metrics: ResponseMetrics) -> None:
        self._finished.labels(_FINISHED_REASONS[reason]).inc()
        if metrics.queue_s is not None:
            self._queue.observe(metrics.queue_s)
            self._prompt_tokens.inc(metrics.num_prompt_tokens)
        if metrics.finished_at is not None:
            self._e2e.observe(metrics.finished_at - metrics.received_at)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(_PREFIX + name, documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, documentation, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """What the engine last said of itself, read when scraped."""

    def __init__(self, engine_status: Callable[[], EngineStatus]) -> None:
        self._engine_status = engine_status

    def collect(self) -> Iterable[Metric]:
        status = self._engine_status()
        yield _counter("engine_restarts", "Times the engine was restarted.", status.num_restarts)
        stats = status.stats
        if stats is None:
            return
        used = stats.num_pages - stats.num_free_pages - stats.num_reusable_pages
        yield _gauge("num_requests_running", "Requests in the batch.", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests waiting for the batch.", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of pages in use; 1 is all.", used / max(stats.num_pages, 1))
        yield _counter("num_preemptions", "Requests put back for want of pages.", stats.num_preemptions)
        yield _counter("engine_steps", "Passes of the target.", stats.num_steps)
        yield _counter("spec_decode_draft_seconds", "Time spent on drafting.", stats.draft_s)
        yield _counter(
            "spec_decode_verify_seconds", "Time spent on the target's passes and the sampler.", stats.verify_s
        )
        yield _counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, documentation, value=value)
