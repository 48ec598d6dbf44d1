"""The server events of a text response, shape by shape."""

from __future__ import annotations

from typing import Any

from outrider.server.protocol.draft_counts import NO_DRAFTS, DraftCounts

Event = dict[str, Any]

# One response has one message with one part: the indices are always 0.
_PLACE = {"output_index": 0, "content_index": 0}


def numbered(event: Event, sequence_number: int, stream_id: str | None) -> Event:
    """The event with its number and lane, which follow its type."""
    head: Event = {"type": event["type"], "sequence_number": sequence_number}
    if stream_id is not None:
        head["stream_id"] = stream_id
    return head | event


def snapshot(kind: str, response: Event) -> Event:
    """``response.created``, ``.queued``, ``.in_progress``, ``.completed``, ``.incomplete`` or ``.failed``."""
    return {"type": f"response.{kind}", "response": response}


def output_text(text: str, logprobs: list[Event] | None) -> Event:
    part: Event = {"type": "output_text", "text": text, "annotations": []}
    if logprobs is not None:
        part["logprobs"] = logprobs
    return part


def message_item(item_id: str, status: str, content: list[Event]) -> Event:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def output_item(kind: str, item: Event) -> Event:
    """``response.output_item.added`` or ``.done``."""
    return {"type": f"response.output_item.{kind}", "output_index": 0, "item": item}


def content_part(kind: str, item_id: str, part: Event) -> Event:
    """``response.content_part.added`` or ``.done``."""
    return {"type": f"response.content_part.{kind}", "item_id": item_id, **_PLACE, "part": part}


def text_delta(item_id: str, delta: str, logprobs: list[Event]) -> Event:
    return {"type": "response.output_text.delta", "item_id": item_id, **_PLACE, "delta": delta, "logprobs": logprobs}


def text_done(item_id: str, text: str, logprobs: list[Event]) -> Event:
    return {"type": "response.output_text.done", "item_id": item_id, **_PLACE, "text": text, "logprobs": logprobs}


def usage(
    num_input: int, num_cached: int, num_written: int, num_output: int, prediction: DraftCounts = NO_DRAFTS
) -> Event:
    """Token counts. Rejected predictions are no part of ``output_tokens``: nothing of them is in the answer."""
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_written},
        "output_tokens": num_output,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": prediction.num_accepted,
            "rejected_prediction_tokens": prediction.num_draft_tokens - prediction.num_accepted,
        },
        "total_tokens": num_input + num_output,
    }


def steer_failed(steer: Event) -> Event:
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "This server cannot steer a running response; cancel it and continue from what it said.",
    }
    return {"type": "response.steer.failed", "error": error, "steer": steer}
