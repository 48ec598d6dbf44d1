"""What speculation gains: sums by category, source and position, and the command over servers of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.server.bench import drafts_report
from outrider.server.bench.categories import by_category, decode_speed, stream_speed
from outrider.server.bench.measures import Measurement, Pass
from outrider.server.bench.own_server import OwnServer, ServerDidNotStart
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.rounds import Result
from outrider.server.bench.speculation import Speculation, merged, speculation_of
from outrider.server.cli.main import main

PROMPTS = [Prompt(1, (), "code"), Prompt(2, (), "prose"), Prompt(3, (), "code")]


def answer(line: int, e2e_s: float, num_tokens: int = 11, text: str = "t", **fields: Any) -> Measurement:
    """An answer whose first text came after 0.5 s."""
    return Measurement(line, (0.5, e2e_s), e2e_s, 7, num_tokens, text_digest=text, **fields)


def result(name: str, *rounds: list[Measurement]) -> Result:
    """Of each round, the prompts out of order and in two passes."""
    return Result(name, 1, tuple((Pass(9.0, tuple(one[1:])), Pass(1.0, tuple(one[:1]))) for one in rounds))


def test_a_categorys_speed_is_its_tokens_over_its_streams_time_and_ratios_are_of_rounds() -> None:
    fast = result(
        "a", [answer(1, 1.0), answer(2, 2.0), answer(3, 3.0)], [answer(3, 1.0), answer(2, 2.0), answer(1, 1.0)]
    )
    slow = result(
        "b", [answer(1, 4.0), answer(2, 2.0), answer(3, 4.0)], [answer(1, 4.0), answer(2, 2.0), answer(3, 4.0)]
    )
    ours, theirs = by_category(fast, PROMPTS), by_category(slow, PROMPTS)
    assert list(ours) == ["code", "prose", "all"]
    assert ours["code"].speed(stream_speed) == pytest.approx(44 / 6)
    assert ours["code"].speed(decode_speed) == pytest.approx(40 / 4)
    assert ours["prose"].speed(stream_speed) == pytest.approx(11 / 2)
    assert ours["all"].speed(stream_speed) == pytest.approx(66 / 10)
    found = ours["code"].ratio(theirs["code"], stream_speed)
    assert found is not None
    assert (found.lowest, found.median, found.highest) == (2.0, 3.0, 4.0)
    assert ours["all"].same_texts(theirs["all"]) == (6, 6)


def test_texts_that_differ_and_answers_that_failed_are_not_counted_as_the_same() -> None:
    failed = Measurement(3, (), None, error="gone")
    ours = by_category(result("a", [answer(1, 1.0), answer(2, 1.0), failed]), PROMPTS)
    theirs = by_category(result("b", [answer(1, 1.0), answer(2, 1.0, text="u"), answer(3, 1.0)]), PROMPTS)
    assert ours["all"].same_texts(theirs["all"]) == (1, 2)


def test_speculation_is_summed_over_requests_by_source_and_position() -> None:
    suffix = Speculation(1, 3, 2, (1, 1, 1), (1, 1, 0))
    model = Speculation(2, 4, 1, (2, 1, 1), (1, 0, 0))
    first = Speculation(3, 7, 3, (3, 2, 2), (2, 1, 0), {"suffix": suffix, "model": model}, 5, 1.5, 50.0)
    second = Speculation(1, 1, 1, (1,), (1,), {"suffix": Speculation(1, 1, 1, (1,), (1,))}, 3, 0.5, 30.0)
    total = merged([first, None, second])
    assert total == Speculation(
        4,
        8,
        4,
        (4, 2, 2),
        (3, 1, 0),
        {"model": model, "suffix": Speculation(2, 4, 3, (2, 1, 1), (2, 1, 0))},
        8,
        2.0,
        80.0,
    )
    assert (total.acceptance_length, total.acceptance_rate, total.tokens_per_step) == (2.0, 0.5, 1.5)
    assert (total.draft_ms_per_step, total.verify_ms_per_step) == (0.25, 10.0)
    assert merged([]).acceptance_length is None
    assert merged([]).tokens_per_step is None


def test_what_another_server_does_not_say_is_empty() -> None:
    counts = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 4}
    assert speculation_of({"speculative_decoding": counts}) == Speculation(2, 6, 4)
    assert speculation_of({}) is None


def test_the_tables_name_categories_sources_and_the_best_fixed_length() -> None:
    drafts = Speculation(1, 2, 1, (1, 1), (1, 0), {"suffix": Speculation(1, 2, 1, (1, 1), (1, 0))}, 2, 1.0, 9.0)
    ours = result("speculating", [answer(line, 1.0, speculation=drafts) for line in (1, 2, 3)])
    off = result("off", [answer(line, 1.5) for line in (1, 2, 3)])
    fixed = result("fixed 1", [answer(1, 0.75), answer(2, 2.0), answer(3, 0.75)])
    parts = drafts_report.parts_of([ours, off, fixed], PROMPTS)
    lines = {
        line.split()[0]: line.split() for line in drafts_report.category_table(parts, "speculating", "off").split("\n")
    }
    assert lines["prose"][1:6] == ["1", "7.3", "11.0", "1.50", "(1.50-1.50)"]
    assert lines["all"][6:] == ["3/3", "2.00", "1.50", "50%", "0.50", "4.50"]
    assert ["prose", "suffix", "1", "2", "50%", "2.00", "100%", "0%"] in [
        line.split() for line in drafts_report.source_table(parts["speculating"]).split("\n")
    ]
    sweep = [line.split() for line in drafts_report.sweep_table(parts, "speculating", ["off", "fixed 1"]).split("\n")]
    assert sweep[1][0] == "code"
    assert sweep[1][-4:-1] == ["fixed", "1", "0.50"]  # 10 tokens in 0.5 s after the first text, against 0.25 s
    assert sweep[2][-3:-1] == ["off", "2.00"]
    written = json.loads(json.dumps(drafts_report.as_json(parts, "speculating")))
    assert written["off"]["all"]["ratio_of_first"]["median"] == pytest.approx(1.5)
    assert written["speculating"]["code"]["speculation"]["by_source"]["suffix"]["num_accepted"] == 2


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerDidNotStart, match=r"there is no model '.*absent"):
        await OwnServer.start(["--model", str(tmp_path / "absent.gguf")])


def test_the_command_compares_servers_of_its_own_and_both_give_the_same_text(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "drafts.json"
    lines = [{"turns": ["abcabcabc"], "category": "code"}, {"turns": ["xyz"], "category": "prose"}]
    questions.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines]))
    arguments = ["--model", str(tiny_model), "--per-category", "1", "--max-tokens", "24", "--rounds", "1"]
    arguments += ["--temperature", "0,0.7", "--sweep", "0,2", "--json", str(out), "--options", "--kv-cache-mib 64"]
    assert main(["bench", "drafts", str(questions), *arguments, "--draft-options", "--drafter suffix"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "2 prompts of questions.jsonl",
        "--- 1 stream, temperature 0.7 ---",
        "drafter suffix, always 2 tokens",
    ):
        assert expected in printed
    written = json.loads(out.read_text())
    assert [table["temperature"] for table in written["by_category"]] == [0.0, 0.7]
    for table in written["by_category"]:
        assert list(table["contenders"]) == ["speculating", "off", "fixed 2"]
        for contender in table["contenders"].values():
            assert contender["all"]["same_texts_as_first"] == [2, 2]
        assert table["contenders"]["off"]["all"]["speculation"]["num_draft_tokens"] == 0
        assert table["contenders"]["speculating"]["all"]["speculation"]["num_all_steps"] > 0
    fixed = written["by_category"][0]["contenders"]["fixed 2"]["all"]["speculation"]
    assert 0 < len(fixed["drafted_per_position"]) <= 2


@pytest.mark.parametrize("arguments", [["--sweep", "1,65"], ["--temperature", "0,hot"], ["--temperature", "-1"]])
def test_wrong_usage_exits_with_2(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "drafts", str(tmp_path / "x.jsonl"), *arguments])
    assert refused.value.code == 2
