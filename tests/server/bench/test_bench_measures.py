"""The definitions of the figures, on numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.server.bench.measures import Measurement, Pass, Ratio, percentile, ratio, summarise
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.report import equal_token_counts, failures, pairs, table
from outrider.server.bench.rounds import Result, run_rounds
from outrider.server.bench.speculation import Speculation

# First text after 0.2 s, end after 1.1 s, 10 tokens in 4 pieces.
ANSWER = Measurement(1, (0.2, 0.5, 0.6, 1.1), 1.1, 7, 10, Speculation(4, 12, 6))


def test_the_figures_of_one_answer() -> None:
    assert ANSWER.ttft_s == 0.2
    assert ANSWER.tpot_s == pytest.approx((1.1 - 0.2) / 9)
    assert ANSWER.gaps_s == pytest.approx([0.3, 0.1, 0.5])
    assert ANSWER.tokens_per_second == pytest.approx(10 / 1.1)
    assert ANSWER.speculation is not None
    assert ANSWER.speculation.acceptance_length == 2.5


def test_what_cannot_be_known_is_none_and_not_zero() -> None:
    silent = Measurement(1, (), 1.0, 7, 0)
    assert (silent.ttft_s, silent.tpot_s, silent.tokens_per_second) == (None, None, None)
    assert Measurement(1, (0.2,), 0.2, 7, 1).tpot_s is None, "one token has no time between tokens"
    uncounted = Measurement(1, (0.2, 0.4), 0.4)
    assert (uncounted.tpot_s, uncounted.tokens_per_second) == (None, None)
    assert Speculation(0, 0, 0).acceptance_length is None


def test_a_summary_counts_what_failed_and_measures_what_did_not() -> None:
    second = Measurement(2, (0.4, 0.9), 2.0, 7, 4, Speculation(1, 4, 4))
    failed = Measurement(3, (0.1,), None, error="gone")
    summary = summarise([Pass(2.0, (ANSWER, second)), Pass(0.5, (failed,))])
    assert (summary.num_requests, summary.num_failed, summary.num_output_tokens) == (3, 1, 14)
    assert summary.ttft_p50_s == pytest.approx(0.3)
    assert summary.icl_p95_s == pytest.approx(0.5)
    assert summary.stream_tokens_per_second == pytest.approx((10 / 1.1 + 2) / 2)
    assert summary.total_tokens_per_second == pytest.approx(14 / 2.5)
    assert summary.acceptance_length == 1 + 10 / 5, "over all steps, not the mean of means"


def test_tokens_are_not_summed_where_one_answer_has_no_count() -> None:
    summary = summarise([Pass(1.0, (ANSWER, Measurement(2, (0.1,), 0.2)))])
    assert summary.num_output_tokens is None
    assert summary.total_tokens_per_second is None


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([], 50) is None


def test_a_ratio_is_the_median_over_rounds_with_its_range() -> None:
    assert ratio([4.0, 9.0, 8.0], [2.0, 3.0, 2.0]) == Ratio(3.0, 2.0, 4.0)
    assert ratio([4.0, None], [2.0, 3.0]) is None
    assert ratio([4.0], [0.0]) is None


class Recorder:
    """A contender that notes who was asked what."""

    def __init__(self, name: str, log: list[tuple[str, list[int], int]], num_tokens: int = 3) -> None:
        self.name = name
        self.model = None
        self._log = log
        self._num_tokens = num_tokens

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> Pass:
        self._log.append((self.name, [prompt.line for prompt in prompts], concurrency))
        return Pass(1.0, tuple(Measurement(p.line, (0.1,), 0.5, 7, self._num_tokens) for p in prompts))

    async def aclose(self) -> None: ...


PROMPTS = [Prompt(line, ({"role": "user", "content": "x"},)) for line in range(1, 6)]


async def test_two_contenders_take_turns_prompt_by_prompt_in_abba_order() -> None:
    log: list[tuple[str, list[int], int]] = []
    results = await run_rounds(
        [Recorder("a", log), Recorder("b", log)], PROMPTS, 2, num_rounds=2, num_warmups=0, report=lambda _: None
    )
    turns = [("abba"[i % 4], lines) for i, lines in enumerate(2 * [1] + 2 * [3] + 2 * [5])]
    assert [(name, lines[0]) for name, lines, _ in log[:6]] == turns
    assert [name for name, _, _ in log[6:]] == list("baabba"), "the second round begins with the other"
    assert [[m.line for one in passes for m in one.measurements] for passes in results[0].rounds] == [
        [1, 2, 3, 4, 5]
    ] * 2


async def test_one_contender_alone_gets_all_prompts_at_once_and_warm_ups_do_not_count() -> None:
    log: list[tuple[str, list[int], int]] = []
    (result,) = await run_rounds([Recorder("a", log)], PROMPTS, 2, num_rounds=1, num_warmups=2, report=lambda _: None)
    assert log == [("a", [1, 2], 2), ("a", [1, 2], 2), ("a", [1, 2, 3, 4, 5], 2)]
    assert result.summary.num_requests == 5


async def test_a_report_says_who_failed_and_how_many_counts_agree() -> None:
    log: list[tuple[str, list[int], int]] = []
    ours, theirs = await run_rounds(
        [Recorder("a", log), Recorder("b", log, num_tokens=4)],
        PROMPTS,
        1,
        num_rounds=1,
        num_warmups=0,
        report=lambda _: None,
    )
    assert pairs([ours, theirs]) == [(ours, theirs)]
    assert equal_token_counts(ours, theirs) == (0, 5)
    assert equal_token_counts(ours, ours) == (5, 5)
    broken = Result("c", 1, ((Pass(1.0, (Measurement(4, (), None, error="no server"),)),),))
    assert failures([ours, broken]) == ["c, line 4: no server"]
    header, first, last = table([ours, broken]).splitlines()
    assert header.split()[:2] == ["streams", "contender"]
    assert first.split()[:2] == ["1", "a"]
    assert last.split()[-2:] == ["-", "1/1"], "nothing is made up for what failed"
