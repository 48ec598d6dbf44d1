"""``prediction``: it reaches the engine as tokens, is counted in the usage, and is refused where it is none."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.protocol.prediction import MAX_PREDICTION_CHARS


def predicted(peer: Any, content: Any, **fields: Any) -> str:
    """The prediction that reaches the engine, as text."""
    peer.create_id(prediction={"type": "content", "content": content}, **fields)
    return "".join(map(chr, peer.submitted[-1].prediction_token_ids))


def test_a_prediction_reaches_the_engine_beside_the_prompt(peer: Any) -> None:
    assert predicted(peer, "é 🐎\n") == "é 🐎\n"
    assert peer.prompts == ["user:hi"]


def test_the_parts_of_a_prediction_are_one_text(peer: Any) -> None:
    assert predicted(peer, [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]) == "abc"


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}, {"type": "content", "content": []}])
def test_without_one_there_is_none(peer: Any, prediction: Any) -> None:
    peer.create_id(prediction=prediction)
    assert peer.submitted[0].prediction_token_ids == ()


def test_no_more_of_it_is_kept_than_an_answer_can_be_long(peer: Any) -> None:
    context = peer.shared.model.max_context
    assert predicted(peer, "x" * (context + 1)) == "x" * context


def test_a_request_that_waits_for_a_place_keeps_its_prediction(new_peer: Any) -> None:
    peer = new_peer(max_in_flight=1)
    first = peer.create_id()
    peer.create("later", stream_id="b", prediction={"type": "content", "content": "abc"})
    assert len(peer.submitted) == 1
    peer.finish(first)
    assert "".join(map(chr, peer.submitted[1].prediction_token_ids)) == "abc"


@pytest.mark.parametrize(
    ("prediction", "param", "words"),
    [
        ("text", "prediction", ["object", "string"]),
        ([], "prediction", ["object", "array"]),
        ({"content": "a"}, "prediction.type", ["'content'", "None"]),
        ({"type": "static", "content": "a"}, "prediction.type", ["'content'", "'static'"]),
        ({"type": "content"}, "prediction.content", ["string or an array", "null"]),
        ({"type": "content", "content": 3}, "prediction.content", ["string or an array", "integer"]),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]", ["object", "string"]),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content[0].type", ["'text'", "'image'"]),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", ["string", "null"]),
        ({"type": "content", "content": "a", "weight": 1}, "prediction", ["unknown field", "'weight'"]),
        ({"type": "content", "content": "x" * (MAX_PREDICTION_CHARS + 1)}, "prediction.content",
         [str(MAX_PREDICTION_CHARS + 1), str(MAX_PREDICTION_CHARS)]),
    ],
)  # fmt: skip
def test_what_is_no_prediction_is_refused_with_its_place(
    peer: Any, prediction: Any, param: str, words: list[str]
) -> None:
    (frame,) = peer.create("hi", prediction=prediction)
    assert (frame["type"], frame["error"]["param"]) == ("error", param)
    for word in words:
        assert word in frame["error"]["message"]
    assert peer.submitted == []


def test_usage_says_how_much_of_a_prediction_was_right_and_counts_none_of_the_rest_as_output(peer: Any) -> None:
    response_id = peer.create_id(prediction={"type": "content", "content": "abcdef"})
    peer.output(response_id, "abc", num_draft_tokens=3, num_accepted=2, draft_source="prediction")
    peer.output(response_id, "x", num_draft_tokens=3, num_accepted=0, draft_source="prediction")
    peer.output(response_id, "yz", num_draft_tokens=2, num_accepted=1, draft_source="suffix")
    usage = peer.finish(response_id)[-1]["response"]["usage"]
    assert usage["output_tokens"] == 6
    assert usage["output_tokens_details"] == {
        "reasoning_tokens": 0, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4,
    }  # fmt: skip
