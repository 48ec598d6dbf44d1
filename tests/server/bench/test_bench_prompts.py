"""Workload files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.server.bench.prompts import InvalidWorkload, Prompt, load_prompts


def workload(path: Path, *lines: Any) -> Path:
    path /= "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_three_forms_are_read_and_empty_lines_skipped(tmp_path: Path) -> None:
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = workload(tmp_path, {"prompt": "p"}, "", {"turns": ["first", "second"], "id": 3}, {"messages": dialogue})
    assert load_prompts(path) == [
        Prompt(1, ({"role": "user", "content": "p"},)),
        Prompt(3, ({"role": "user", "content": "first"},)),
        Prompt(4, tuple(dialogue)),
    ]
    assert [prompt.line for prompt in load_prompts(path, limit=2)] == [1, 3]


def test_of_each_category_no_more_are_taken_than_asked_for(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "category": category} for category in ("a", "a", "b", "a", "b")]
    path = workload(tmp_path, *lines, {"prompt": "p"})
    found = load_prompts(path, per_category=1)
    assert [(prompt.line, prompt.category) for prompt in found] == [(1, "a"), (3, "b"), (6, "")]
    assert [prompt.line for prompt in load_prompts(path, limit=3, per_category=2)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ([], "must be a JSON object"),
        ({"text": "x"}, "none of the fields"),
        ({"prompt": "p", "category": 3}, "'category' must be text, not 3"),
        ({"prompt": 3}, "prompt must be text that is not empty, not 3"),
        ({"prompt": ""}, "prompt must be text that is not empty"),
        ({"turns": []}, "'turns' must be a list with at least one"),
        ({"turns": [None]}, r"turns\[0\] must be text"),
        ({"messages": {}}, "'messages' must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role must be system, user or assistant, not 'tool'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] must be text"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(tmp_path: Path, line: Any, fault: str) -> None:
    path = workload(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(InvalidWorkload, match=rf"prompts\.jsonl, line 3: .*{fault}"):
        load_prompts(path)


def test_a_bad_line_beyond_the_limit_does_not_matter(tmp_path: Path) -> None:
    assert len(load_prompts(workload(tmp_path, {"prompt": "fine"}, "{"), limit=1)) == 1


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match="holds no prompt"):
        load_prompts(workload(tmp_path, ""))
    with pytest.raises(InvalidWorkload, match=r"cannot read .*absent"):
        load_prompts(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InvalidWorkload, match="not UTF-8"):
        load_prompts(tmp_path / "latin")
