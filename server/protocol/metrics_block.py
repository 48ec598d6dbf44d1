"""One response's counts and times, and the ``metrics`` object made of them (vLLM's per-request shape)."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.protocol.draft_counts import DraftsBySource


class ResponseObserver(Protocol):
    """Is told what responses do, as it happens. Times in seconds."""

    def first_token(self, seconds: float) -> None:
        """The first text was delivered, this long after the request arrived."""

    def step(self, output: StepOutput, seconds: float | None) -> None:
        """A step's output, this long after the one before it that had tokens; None for the first."""

    def finished(self, reason: FinishReason, metrics: ResponseMetrics) -> None: ...


class ResponseMetrics:
    """Times of one response in seconds, its tokens, and what became of its drafts.

    A step counts as speculative if it verified at least one draft token. Accepted are the tokens that a draft brought
    beside the one of every step, so the answer has ``num_steps`` + accepted tokens.

    Args:
        max_draft_tokens: the most a step may propose for this response.
    """

    def __init__(self, received_at: float, max_draft_tokens: int, observer: ResponseObserver) -> None:
        self.received_at = received_at
        self._observer = observer
        self._max_draft_tokens = max_draft_tokens
        self.submitted_at: float | None = None
        self.first_text_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self._engine_queue_s = 0.0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._num_steps = 0
        self._draft_ms = 0.0
        self._verify_ms = 0.0
        self.drafts = DraftsBySource()

    def record(self, output: StepOutput, now: float) -> None:
        self.num_cached_tokens = output.num_cached_tokens
        self._engine_queue_s = output.queue_s
        if output.text and self.first_text_at is None:
            self.first_text_at = now
            self._observer.first_token(now - self.received_at)
        if output.token_ids:
            gap = None if self.last_token_at is None else now - self.last_token_at
            self._observer.step(output, gap)
            if self.first_token_at is None:
                self.first_token_at = now
            self.last_token_at = now
            self.num_output_tokens += len(output.token_ids)
            self._num_steps += 1
        if output.num_draft_tokens:
            self.drafts.add(output.draft_source, output.num_draft_tokens, output.num_gained)
        self._draft_ms += output.draft_ms
        self._verify_ms += output.verify_ms

    def finish(self, reason: FinishReason, now: float) -> None:
        self.finished_at = now
        self._observer.finished(reason, self)

    @property
    def queue_s(self) -> float | None:
        """From the request's arrival to the first pass it has a part in."""
        return None if self.submitted_at is None else self.submitted_at - self.received_at + self._engine_queue_s

    def block(self) -> dict[str, Any]:
        generation_s = None
        if self.first_token_at is not None and self.last_token_at is not None:
            generation_s = self.last_token_at - self.first_token_at
        mean_itl_s = (
            generation_s / (self.num_output_tokens - 1) if generation_s and self.num_output_tokens > 1 else None
        )
        ttft_s = None if self.first_text_at is None else self.first_text_at - self.received_at
        return {
            "time_to_first_token_ms": _ms(ttft_s),
            "generation_time_ms": _ms(generation_s),
            "queue_time_ms": _ms(self.queue_s),
            "mean_itl_ms": _ms(mean_itl_s),
            "tokens_per_second": None if mean_itl_s is None else round(1.0 / mean_itl_s, 3),
            "num_steps": self._num_steps,
            "speculative_decoding": self._speculative_decoding(),
        }

    def _speculative_decoding(self) -> dict[str, Any]:
        """vLLM's shape, and beside it who guessed, and the time of the steps, which other responses may share."""
        total = self.drafts.total
        return {
            "num_spec_tokens": self._max_draft_tokens,
            **total.block(),
            "acceptance_histogram": total.histogram(self._max_draft_tokens),
            "acceptance_histogram_by_draft_length": total.histograms_by_length(),
            "by_source": self.drafts.block_by_source(),
            "draft_time_ms": round(self._draft_ms, 3),
            "verify_time_ms": round(self._verify_ms, 3),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
