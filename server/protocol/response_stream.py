"""One response as its client sees it: the events from ``response.created`` to the one terminal event."""

from __future__ import annotations

from outrider.server.engine.request import FinishReason, StepOutput
from outrider.server.protocol import events
from outrider.server.protocol.events import Event
from outrider.server.protocol.items import Message
from outrider.server.protocol.metrics_block import ResponseMetrics
from outrider.server.protocol.outbox import Outbox
from outrider.server.protocol.parse import CreateRequest
from outrider.server.protocol.prompt import PromptBuilder
from outrider.verify.sampling_params import TokenLogprob

_MIN_LOGPROB = -9999.0  # what OpenAI sends for a token that cannot come; JSON has no infinity

# finish reason: (terminal event, response status)
_ENDINGS = {
    FinishReason.STOP: ("completed", "completed"),
    FinishReason.LENGTH: ("incomplete", "incomplete"),
    # The one shape of a cancellation that the official clients' types accept.
    FinishReason.CANCELLED: ("incomplete", "cancelled"),
    FinishReason.ERROR: ("failed", "failed"),
}


class ResponseStream:
    """Writes a response's events to the outbox, numbered from 0.

    The message item is opened by the first text, or at the end if a finished answer is empty.
    """

    def __init__(
        self,
        response_id: str,
        item_id: str,
        stream_id: str | None,
        request: CreateRequest,
        *,
        created_at: int,
        metrics: ResponseMetrics,
        prompts: PromptBuilder,
        outbox: Outbox,
    ) -> None:
        self.metrics = metrics
        self.announced = False
        self.last_event_at = metrics.received_at
        self._response_id = response_id
        self._item_id = item_id
        self._stream_id = stream_id
        self._request = request
        self._created_at = created_at
        self._prompts = prompts
        self._outbox = outbox
        self._sequence_number = 0
        self._status = "in_progress"
        self._item_is_open = False
        self._texts: list[str] = []
        self._logprobs: list[Event] | None = [] if request.params.logprobs is not None else None
        self._unsent_logprobs: list[Event] = []  # of tokens whose text is still held back
        self._unsent_draft_counts = {"num_tokens": 0, "num_draft_tokens": 0, "num_accepted": 0}

    @property
    def text(self) -> str:
        """Everything delivered so far."""
        return "".join(self._texts)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What this response adds to its conversation."""
        answer = (Message(role="assistant", content=self.text),) if self._texts else ()
        return self._request.messages + answer

    def announce(self, now: float, *, queued: bool = False) -> None:
        self.announced = True
        self._status = "queued" if queued else "in_progress"
        self._emit(events.snapshot("created", self._snapshot()), now)
        if queued:
            self._emit(events.snapshot("queued", self._snapshot()), now)

    def start(self, now: float) -> None:
        self._status = "in_progress"
        self._emit(events.snapshot("in_progress", self._snapshot()), now)

    def keep_alive(self, now: float) -> None:
        """Say again where the response stands: clients count silence, and pings are not events to them."""
        self._emit(events.snapshot(self._status, self._snapshot()), now)

    def steer_failed(self, steer: Event, now: float) -> None:
        self._emit(events.steer_failed(steer), now)

    def output(self, output: StepOutput, now: float) -> None:
        """One step's tokens; at most one delta."""
        self.metrics.record(output, now)
        if self._logprobs is not None:
            self._unsent_logprobs.extend(self._spell(logprob) for logprob in output.logprobs)
        if self._request.include_draft_tokens:
            self._unsent_draft_counts["num_tokens"] += len(output.token_ids)
            self._unsent_draft_counts["num_draft_tokens"] += output.num_draft_tokens
            self._unsent_draft_counts["num_accepted"] += output.num_gained
        if output.text:
            self._open_item(now)
            self._texts.append(output.text)
            self._emit_delta(output.text, now)

    def finish(self, reason: FinishReason, error: str | None, now: float) -> None:
        """Close what is open and end the response."""
        kind, self._status = _ENDINGS[reason]
        if not self._request.generate and reason is FinishReason.LENGTH:
            kind = self._status = "completed"  # a prefill that kept all of the prompt has no answer to cut
        if self._request.generate and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._open_item(now)
        if self._item_is_open:
            self._close_item(now)
        self.metrics.finish(reason, now)
        response = self._snapshot()
        response["usage"] = self._usage(reason)
        response["metrics"] = self.metrics.block()
        if self._status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if reason is FinishReason.ERROR:
            response["error"] = {"code": "server_error", "message": error or "The engine failed; try again."}
        self._emit(events.snapshot(kind, response), now, closing=True)

    def _open_item(self, now: float) -> None:
        if self._item_is_open:
            return
        self._item_is_open = True
        self._emit(events.output_item("added", events.message_item(self._item_id, "in_progress", [])), now)
        self._emit(events.content_part("added", self._item_id, events.output_text("", None)), now)

    def _close_item(self, now: float) -> None:
        self._emit(events.text_done(self._item_id, self.text, self._spelled_logprobs()), now, closing=True)
        self._emit(events.content_part("done", self._item_id, self._part()), now, closing=True)
        self._emit(events.output_item("done", self._item()), now, closing=True)

    def _emit_delta(self, text: str, now: float) -> None:
        draft_counts = None
        if self._request.include_draft_tokens:
            draft_counts = self._unsent_draft_counts
            self._unsent_draft_counts = dict.fromkeys(draft_counts, 0)
        self.last_event_at = now
        if self._logprobs is None and self._outbox.join_delta(self._item_id, text, draft_counts):
            return
        event = events.text_delta(self._item_id, text, self._unsent_logprobs)
        if draft_counts is not None:
            event["outrider"] = draft_counts
        if self._logprobs is None:
            self._outbox.put_delta(self._number(event))
        else:
            self._logprobs.extend(self._unsent_logprobs)
            self._unsent_logprobs = []
            self._emit(event, now)

    def _emit(self, event: Event, now: float, *, closing: bool = False) -> None:
        self.last_event_at = now
        self._outbox.seal(self._item_id)
        self._outbox.put(self._number(event), closing=closing)

    def _number(self, event: Event) -> Event:
        number = self._sequence_number
        self._sequence_number += 1
        return events.numbered(event, number, self._stream_id)

    def _snapshot(self) -> Event:
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "error": None,
            "incomplete_details": None,
            **self._request.echo,
            "output": [self._item()] if self._item_is_open and self._status != "in_progress" else [],
            "usage": None,
        }

    def _item(self) -> Event:
        return events.message_item(
            self._item_id, "completed" if self._status == "completed" else "incomplete", [self._part()]
        )

    def _part(self) -> Event:
        logprobs = None if self._logprobs is None else self._spelled_logprobs()
        return events.output_text(self.text, logprobs)

    def _spelled_logprobs(self) -> list[Event]:
        return [] if self._logprobs is None else self._logprobs + self._unsent_logprobs

    def _usage(self, reason: FinishReason) -> Event:
        metrics = self.metrics
        # Without a token and unfinished, nothing says how far the prefill came.
        prefilled = metrics.num_output_tokens > 0 or reason in (FinishReason.STOP, FinishReason.LENGTH)
        num_written = metrics.num_prompt_tokens - metrics.num_cached_tokens if prefilled else 0
        return events.usage(
            metrics.num_prompt_tokens,
            metrics.num_cached_tokens,
            num_written,
            metrics.num_output_tokens,
            metrics.drafts.of_source("prediction"),
        )

    def _spell(self, token: TokenLogprob) -> Event:
        top = [self._spell_one(token_id, logprob) for token_id, logprob in token.top]
        return self._spell_one(token.token_id, token.logprob) | {"top_logprobs": top}

    def _spell_one(self, token_id: int, logprob: float) -> Event:
        return {
            "token": self._prompts.token_text(token_id),
            "bytes": list(self._prompts.token_bytes(token_id)),
            "logprob": max(logprob, _MIN_LOGPROB),
        }
