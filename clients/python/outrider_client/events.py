"""What the server sends, typed. Fields and events that are not known here are kept, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar

from .errors import ProtocolError

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens, as the server counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: Json = field(default_factory=dict)
    output_tokens_details: Json = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Input tokens whose keys and values the server already had."""
        return int(self.input_tokens_details.get("cached_tokens", 0))

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the request's ``prediction`` that were guessed from it and found right."""
        return int(self.output_tokens_details.get("accepted_prediction_tokens", 0))

    @property
    def rejected_prediction_tokens(self) -> int:
        """The same, found wrong; they are no part of ``output_tokens``."""
        return int(self.output_tokens_details.get("rejected_prediction_tokens", 0))


@dataclass(frozen=True)
class Drafts:
    """How well drafts did, over the steps that verified one.

    ``mean_acceptance_length`` is tokens per step: 1 + accepted/steps.
    """

    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)  # [i]: those that were i-th, from 0, in a draft
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SpeculativeDecoding(Drafts):
    """All drafts of a response, and those of each source by its name: suffix, model or prediction.

    The times are of whole steps, which other responses may share.
    """

    num_spec_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [i]: steps that accepted i
    by_source: Mapping[str, Drafts] = field(default_factory=dict)
    draft_time_ms: float = 0.0
    verify_time_ms: float = 0.0


@dataclass(frozen=True)
class Metrics:
    """Times in milliseconds, as the server saw them; None where it did not say."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecoding | None = None


@dataclass(frozen=True)
class Response:
    """A response at one moment of its life; ``raw`` is all the server said of it."""

    id: str
    status: Status | str = "in_progress"
    model: str = ""
    output: list[Json] = field(default_factory=list)
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Json | None = None
    incomplete_details: Json | None = None
    previous_response_id: str | None = None
    raw: Json = field(default_factory=dict, repr=False)

    @property
    def output_text(self) -> str:
        """All text of all messages in ``output``."""
        return "".join(
            part.get("text", "")
            for item in self.output
            if item.get("type") == "message"
            for part in item.get("content", ())
            if part.get("type") == "output_text"
        )


@dataclass(frozen=True)
class Event:
    """Any event; ``raw`` is the frame as it came."""

    type: str
    sequence_number: int = -1
    raw: Json = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ResponseEvent(Event):
    """``response.created``, ``.queued``, ``.in_progress`` and the terminal ones."""

    response: Response = field(default_factory=lambda: Response(id=""))


@dataclass(frozen=True)
class OutputItemEvent(Event):
    """``response.output_item.added`` and ``.done``."""

    output_index: int = 0
    item: Json = field(default_factory=dict)


@dataclass(frozen=True)
class ContentPartEvent(Event):
    """``response.content_part.added`` and ``.done``."""

    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    part: Json = field(default_factory=dict)


@dataclass(frozen=True)
class DraftCounts:
    """What a delta is made of: the accepted draft tokens come first, then one more token."""

    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class TextDelta(Event):
    """``response.output_text.delta``: what one step of the model added to the text.

    ``draft`` is there if the request had ``include=["outrider.draft_tokens"]``.
    """

    delta: str = ""
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    logprobs: list[Json] = field(default_factory=list)
    draft: DraftCounts | None = None

    @property
    def text(self) -> str:
        return self.delta


@dataclass(frozen=True)
class TextDone(Event):
    """``response.output_text.done``: the whole text of one part."""

    text: str = ""
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    logprobs: list[Json] = field(default_factory=list)


TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
_EVENTS: dict[str, type[Event]] = {
    **dict.fromkeys(("response.created", "response.queued", "response.in_progress", *TERMINAL), ResponseEvent),
    **dict.fromkeys(("response.output_item.added", "response.output_item.done"), OutputItemEvent),
    **dict.fromkeys(("response.content_part.added", "response.content_part.done"), ContentPartEvent),
    "response.output_text.delta": TextDelta,
    "response.output_text.done": TextDone,
}
T = TypeVar("T")


def parse_event(frame: Json) -> Event:
    """The typed event of a frame; a plain :class:`Event` if its type is not one of ours.

    Raises:
        ProtocolError: a known event lacks its response or its text.
    """
    kind = frame["type"]
    known = _EVENTS.get(kind, Event)
    values = _known_fields(known, frame)
    if known is ResponseEvent:
        values["response"] = _parse_response(frame.get("response"), kind)
    elif known is TextDelta:
        if not isinstance(frame.get("delta"), str):
            raise ProtocolError(f"{kind} has no text in its field 'delta'")
        values["draft"] = _optional(DraftCounts, frame.get("outrider"))
    return known(**{**values, "type": kind, "raw": frame})


def _parse_response(value: Any, kind: str) -> Response:
    if not isinstance(value, Mapping) or not isinstance(value.get("id"), str):
        raise ProtocolError(f"{kind} has no response with an id")
    values = _known_fields(Response, value)
    values["usage"] = _optional(Usage, value.get("usage"))
    values["metrics"] = metrics = _optional(Metrics, value.get("metrics"))
    if metrics is not None:
        speculation = _parse_speculation(value["metrics"].get("speculative_decoding"))
        values["metrics"] = Metrics(**{**vars(metrics), "speculative_decoding": speculation})
    return Response(**{**values, "raw": value})


def _parse_speculation(value: Any) -> SpeculativeDecoding | None:
    if not isinstance(value, Mapping):
        return None
    values = _known_fields(SpeculativeDecoding, value)
    sources = value.get("by_source")
    values["by_source"] = {
        source: drafts
        for source, counts in (sources.items() if isinstance(sources, Mapping) else ())
        if (drafts := _optional(Drafts, counts)) is not None
    }
    return SpeculativeDecoding(**values)


def _optional(cls: type[T], value: Any) -> T | None:
    return cls(**_known_fields(cls, value)) if isinstance(value, Mapping) else None


def _known_fields(cls: type, value: Json) -> dict[str, Any]:
    """The fields of ``value`` that ``cls`` has; a null one is left to the default."""
    return {name: value[name] for name in _field_names(cls) if value.get(name) is not None}


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls) if f.name != "raw")
