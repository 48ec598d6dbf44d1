"""Against an oracle that decodes everything anew at every token and searches by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.server.engine.request import FinishReason
from outrider.server.engine.text_stream import TextStream
from outrider.verify.sampling_params import SamplingParams, TokenLogprob

EOS = 0


class Vocabulary:
    """Tokens that are byte strings; number 0 ends the text and has bytes that must never be seen."""

    def __init__(self, tokens: Sequence[bytes], leading_space_stripped: bool = False) -> None:
        self.tokens = [b"<end>", *tokens]
        self.leading_space_stripped = leading_space_stripped

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


@dataclass
class Answer:
    text: str
    logprobs: list[int]  # of which tokens, by place
    reason: FinishReason | None
    num_tokens: int
    sent: list[tuple[str, int]]  # after each step: text and log-probabilities in all


def stream(
    tokens: Sequence[bytes | None],
    params: SamplingParams,
    steps: Sequence[int] = (),
    leading_space_stripped: bool = False,
) -> Answer:
    """Push the tokens (None: end of text) in steps of these sizes, then one by one, until the answer ends."""
    vocabulary = Vocabulary([token for token in tokens if token is not None], leading_space_stripped)
    text_stream = TextStream(vocabulary, params, frozenset({EOS}), params.max_tokens)
    text, logprobs, sent = "", [], []
    reason = None
    ids = iter(range(1, len(vocabulary.tokens)))
    pushed = 0
    sizes = iter(steps)
    while reason is None and pushed < len(tokens):
        for _ in range(next(sizes, 1)):
            if reason is None and pushed < len(tokens):
                token_id = EOS if tokens[pushed] is None else next(ids)
                reason = text_stream.push(token_id, TokenLogprob(pushed, -1.0))
                pushed += 1
        more, entries = text_stream.take()
        text += more
        logprobs += [entry.token_id for entry in entries]
        sent.append((text, len(logprobs)))
    if reason is None:
        text_stream.finish()
        more, entries = text_stream.take()
        text += more
        logprobs += [entry.token_id for entry in entries]
    assert text_stream.take() == ("", ())
    return Answer(text, logprobs, reason, pushed, sent)


def certain_text(data: bytes) -> str:
    """The characters of ``data`` that no further byte can change.

    Except that CPython's incremental decoder takes a surrogate's first two bytes for a beginning, for one byte more.
    """
    if data[-2:-1] == b"\xed" and 0xA0 <= data[-1] <= 0xBF:
        return certain_text(data[:-2])
    futures = [b"", b"a", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80"]
    texts = [(data + future).decode("utf-8", "replace") for future in futures]
    num_same = 0
    while all(len(text) > num_same and text[num_same] == texts[0][num_same] for text in texts):
        num_same += 1
    return texts[0][:num_same]


def first_stop(text: str, stops: Sequence[str], first_end: int) -> int | None:
    """Where the text must be cut for the stop string that is complete first, at ``first_end`` or later."""
    for end in range(max(first_end, 1), len(text) + 1):
        if lengths := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return end - max(lengths)
    return None


def held_back(text: str, stops: Sequence[str]) -> int:
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    return max((n for n in range(1, len(text) + 1) if text[-n:] in beginnings), default=0)


def oracle(tokens: Sequence[bytes | None], params: SamplingParams) -> Answer:
    """The same answer from whole texts only, in steps of one token."""
    starts: list[int] = []  # per token: how many characters were certain before it
    sent: list[tuple[str, int]] = []
    text, reason, cut = "", None, None
    for n, token in enumerate(tokens, start=1):
        data = b"".join(t for t in tokens[:n] if t is not None)
        before = certain_text(b"".join(t for t in tokens[: n - 1] if t is not None))
        # A stop string counts if its last character became certain with the min_tokens-th token or later.
        certain_too_soon = certain_text(b"".join(t for t in tokens[: max(params.min_tokens - 1, 0)] if t is not None))
        first_end = len(certain_too_soon) + 1 if n >= params.min_tokens else len(data) + 1
        if token is None:
            text = data.decode("utf-8", "replace")
            cut, reason = first_stop(text, params.stop, first_end), FinishReason.STOP
            break
        starts.append(len(before))
        text = certain_text(data)
        cut = first_stop(text, params.stop, first_end)
        if cut is None and n == params.max_tokens:
            text = data.decode("utf-8", "replace")
            cut, reason = first_stop(text, params.stop, first_end), FinishReason.LENGTH
        if cut is not None:
            reason = FinishReason.STOP
        if reason is not None:
            break
        visible = text[: len(text) - held_back(text, params.stop)]
        sent.append((visible, sum(start < len(visible) for start in starts)))
    if reason is None:  # ended from outside: the flush may still complete a stop string
        flushed = data.decode("utf-8", "replace")
        cut = first_stop(flushed, params.stop, len(text) + 1) if n >= params.min_tokens else None
        text = flushed
    if cut is not None:
        text = text[:cut]
        starts = [start for start in starts if start < cut]
    if reason is not None:
        sent.append((text, len(starts)))
    return Answer(text, list(range(len(starts))), reason, n, sent)


ALPHABET = ["a", "b", "ab", "é", "€", "🙂", "\ufffd", "\u0800", "\ud7ff", "\U0010ffff"]
texts = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=4).map("".join)
repetitive = st.text("ab", min_size=1, max_size=6)  # where a match begins inside another
whole_characters = st.lists(st.sampled_from(ALPHABET), max_size=3).map(lambda parts: "".join(parts).encode())
any_bytes = st.lists(
    st.sampled_from(
        [
            0x61,
            0x62,
            0x80,
            0x90,
            0x9F,
            0xA0,
            0xBF,
            0xC0,
            0xC3,
            0xA9,
            0xE0,
            0xE2,
            0x82,
            0xAC,
            0xED,
            0xEF,
            0xF0,
            0xF4,
            0xF5,
        ]
    ),
    max_size=3,
).map(bytes)
token_lists = st.lists(st.one_of(whole_characters, any_bytes, st.none()), min_size=1, max_size=14) | st.lists(
    repetitive.map(str.encode), min_size=1, max_size=8
)
split_texts = st.tuples(texts.map(str.encode), st.lists(st.integers(0, 20), max_size=6)).map(
    lambda drawn: (
        [
            drawn[0][i:j]
            for i, j in zip([0, *sorted(drawn[1])], [*sorted(drawn[1]), len(drawn[0])], strict=True)
            if drawn[0][i:j]
        ]
        or [b"a"]
    )
)
params = st.builds(
    lambda stop, max_tokens, min_tokens: SamplingParams(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=tuple(stop)
    ),
    st.lists(texts, max_size=4) | st.lists(repetitive, min_size=1, max_size=3),
    st.integers(1, 16),
    st.sampled_from([0, 0, 0, 1, 2, 5]),
)


@settings(max_examples=600, deadline=None)
@given(st.one_of(token_lists, split_texts), params)
@example([b"\xed", b"\xa0", b"\x80"], SamplingParams(max_tokens=9))
@example([b"\xf0\x9f", b"\x99"], SamplingParams(max_tokens=2, stop=("\ufffd",)))
@example([b"a", b"a", b"a", b"b"], SamplingParams(max_tokens=9, min_tokens=3, stop=("aa", "aab")))
def test_every_step_sends_exactly_what_the_oracle_says(tokens: list[bytes | None], params: SamplingParams) -> None:
    assert stream(tokens, params) == oracle(tokens, params)


@settings(max_examples=300, deadline=None)
@given(st.one_of(token_lists, split_texts), params, st.lists(st.integers(1, 5), max_size=8))
def test_step_boundaries_change_nothing_but_the_chunks(
    tokens: list[bytes | None], params: SamplingParams, steps: list[int]
) -> None:
    one_by_one, chunked = stream(tokens, params), stream(tokens, params, steps)
    assert (chunked.text, chunked.logprobs, chunked.reason, chunked.num_tokens) == (
        one_by_one.text,
        one_by_one.logprobs,
        one_by_one.reason,
        one_by_one.num_tokens,
    )
    assert set(chunked.sent) <= set(one_by_one.sent)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30), st.lists(st.integers(0, 30), max_size=10))
def test_any_bytes_come_out_as_a_decode_of_the_whole(data: bytes, cuts: list[int]) -> None:
    cuts = sorted(cuts)
    tokens = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert stream(tokens, SamplingParams(max_tokens=1000)).text == data.decode("utf-8", "replace")


def test_half_a_character_waits_and_invalid_bytes_do_not() -> None:
    answer = stream([b"\xf0\x9f", b"\x99\x82", b"\xff", b"x"], SamplingParams(max_tokens=9))
    assert [text for text, _ in answer.sent] == ["", "🙂", "🙂\ufffd", "🙂\ufffdx"]


def test_a_truncated_character_becomes_one_replacement() -> None:
    assert stream([b"x\xf0\x9f", b"\x99"], SamplingParams(max_tokens=2)).text == "x\ufffd"
    assert stream([b"x\xf0\x9f\x99", None], SamplingParams(max_tokens=9)).text == "x\ufffd"


@pytest.mark.parametrize("size", range(1, 9))
def test_a_stop_string_is_found_across_any_token_size(size: int) -> None:
    text = b"one two three STOP four"
    tokens = [text[i : i + size] for i in range(0, len(text), size)]
    answer = stream(tokens, SamplingParams(max_tokens=99, stop=("STOP", "five")))
    assert (answer.text, answer.reason) == ("one two three ", FinishReason.STOP)
    assert answer.num_tokens == -(-len("one two three STOP") // size)


def test_the_stop_string_that_is_complete_first_wins_then_the_longest() -> None:
    assert stream([b"abcdef"], SamplingParams(max_tokens=9, stop=("abcdef", "cd"))).text == "ab"
    assert stream([b"abcdef"], SamplingParams(max_tokens=9, stop=("cd", "bcd", "d"))).text == "a"


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    answer = stream([b"aab", b"aa", b"c", b"aab", None], SamplingParams(max_tokens=9, stop=("aabaad",)))
    assert [text for text, _ in answer.sent] == ["", "", "aabaac", "aabaac", "aabaacaab"]
    assert answer.reason is FinishReason.STOP


def test_a_stop_comes_before_the_token_limit() -> None:
    assert stream([b"a", b"b"], SamplingParams(max_tokens=2, stop=("b",))).reason is FinishReason.STOP
    assert stream([b"a", None], SamplingParams(max_tokens=2)).reason is FinishReason.STOP
    assert stream([b"a", b"b"], SamplingParams(max_tokens=2)).reason is FinishReason.LENGTH


def test_the_smaller_of_two_token_limits_holds() -> None:
    text_stream = TextStream(Vocabulary([b"a"]), SamplingParams(max_tokens=100), frozenset(), max_tokens=2)
    assert [text_stream.push(1, None), text_stream.push(1, None)] == [None, FinishReason.LENGTH]


def test_stop_ids_end_the_answer_without_their_text_or_log_probability() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(2,))
    text_stream = TextStream(Vocabulary([b"a", b"b"]), params, frozenset({EOS}), 9)
    assert text_stream.push(1, TokenLogprob(1, -0.5)) is None
    assert text_stream.push(2, TokenLogprob(2, -0.5)) is FinishReason.STOP
    assert text_stream.take() == ("a", (TokenLogprob(1, -0.5),))


def test_an_ignored_end_of_text_is_a_token_like_any_other() -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    answer = stream([b"a", None, b"b"], params)
    assert (answer.text, answer.reason, answer.logprobs) == ("a<end>b", FinishReason.LENGTH, [0, 1, 2])


def test_log_probabilities_stop_with_the_text() -> None:
    # "S" alone belongs to the stop string; "xS" has a part in the text before it.
    assert stream([b"a", b"S", b"T"], SamplingParams(max_tokens=9, stop=("ST",))).logprobs == [0]
    assert stream([b"a", b"xS", b"T"], SamplingParams(max_tokens=9, stop=("ST",))).logprobs == [0, 1]


def test_log_probabilities_wait_for_their_character() -> None:
    answer = stream([b"\xe2", b"\x82", b"\xac", b"", b"b"], SamplingParams(max_tokens=9))
    assert answer.sent == [("", 0), ("", 0), ("€", 3), ("€", 3), ("€b", 5)]


def test_a_stripped_leading_space_is_the_first_character_only() -> None:
    params = SamplingParams(max_tokens=9, stop=(" c",))
    answer = stream([b"", b" ", b" a", b" b", b" c"], params, leading_space_stripped=True)
    assert [text for text, _ in answer.sent] == ["", "", " a", " a b", " a b"]


def test_finish_releases_what_was_held() -> None:
    text_stream = TextStream(Vocabulary([b"abc\xf0"]), SamplingParams(max_tokens=9, stop=("bcd",)), frozenset(), 9)
    assert text_stream.push(1, TokenLogprob(1, -0.5)) is None
    assert text_stream.take() == ("a", (TokenLogprob(1, -0.5),))
    text_stream.finish()
    text_stream.finish()
    assert text_stream.take() == ("bc\ufffd", ())


def test_the_work_is_linear_in_the_text() -> None:
    """Counted in calls to the tokenizer and in the size of what is kept, not in time."""
    vocabulary = Vocabulary([b"ab", b"\xf0\x9f\x99\x82"])
    text_stream = TextStream(vocabulary, SamplingParams(max_tokens=10**6, stop=("ab" * 50 + "c",)), frozenset(), 10**6)
    text, longest_wait = "", 0
    for i in range(5000):
        text_stream.push(1 + (i % 100 == 99), None)
        more, _ = text_stream.take()
        text += more
        longest_wait = max(longest_wait, 2 * (i + 1) - len(text) - (i + 1) // 100)
    assert longest_wait <= 100
    assert text.startswith("ab" * 99 + "🙂")
