"""What became of drafts, as servers report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class Speculation:
    """Over the steps that verified a draft, but for ``num_all_steps`` and the times. 0 and empty where not said.

    A step's times count for each request that had a part in it, so a sum over requests is one over (request, step).
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted: int
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    by_source: Mapping[str, Speculation] = field(default_factory=dict)  # suffix, model, prediction
    num_all_steps: int = 0  # those without a draft too
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per step, the one the target adds included: 1 + accepted/steps."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Over all steps, those without a draft too."""
        return 1 + self.num_accepted / self.num_all_steps if self.num_all_steps else None

    @property
    def draft_ms_per_step(self) -> float | None:
        return self.draft_ms / self.num_all_steps if self.num_all_steps else None

    @property
    def verify_ms_per_step(self) -> float | None:
        return self.verify_ms / self.num_all_steps if self.num_all_steps else None


def merged(parts: Iterable[Speculation | None]) -> Speculation:
    """All together; None counts nothing."""
    known = [part for part in parts if part is not None]
    sources = sorted({source for part in known for source in part.by_source})
    return Speculation(
        sum(part.num_steps for part in known),
        sum(part.num_draft_tokens for part in known),
        sum(part.num_accepted for part in known),
        _summed(part.drafted_per_position for part in known),
        _summed(part.accepted_per_position for part in known),
        {source: merged(part.by_source.get(source) for part in known) for source in sources},
        sum(part.num_all_steps for part in known),
        sum(part.draft_ms for part in known),
        sum(part.verify_ms for part in known),
    )


def speculation_of(metrics: Mapping[str, Any]) -> Speculation | None:
    """From the metrics of a response in vLLM's per-request shape; what only Outrider says is read where it is there."""
    counts = metrics.get("speculative_decoding")
    if not counts:
        return None
    by_source = {source: _counts(part) for source, part in (counts.get("by_source") or {}).items()}
    return _counts(
        counts,
        by_source=by_source,
        num_all_steps=metrics.get("num_steps") or 0,
        draft_ms=counts.get("draft_time_ms") or 0.0,
        verify_ms=counts.get("verify_time_ms") or 0.0,
    )


def _counts(counts: Mapping[str, Any], **more: Any) -> Speculation:
    return Speculation(
        counts["num_spec_steps"],
        counts["num_draft_tokens"],
        counts["num_accepted_draft_tokens"],
        tuple(counts.get("num_draft_tokens_per_pos") or ()),
        tuple(counts.get("num_accepted_tokens_per_pos") or ()),
        **more,
    )


def _summed(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))
