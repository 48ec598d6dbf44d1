"""Which texts a file holds, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.server.bench.prompts import InvalidWorkload
from outrider.server.bench.texts import load_texts


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_text_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text('{"text": "not read as JSON"}\n\nÄ second line.\n')
    assert load_texts(path) == ['{"text": "not read as JSON"}\n\nÄ second line.\n']


def test_each_json_line_is_a_text_of_its_own_with_all_that_was_said(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "texts.jsonl",
        {"text": "one"},
        {"prompt": "two\u2028and a half"},
        "",
        {"id": 3, "turns": ["three", "four"]},
        {"messages": [{"role": "user", "content": "five"}, {"role": "assistant", "content": "six"}]},
    )
    path.write_text(path.read_text().replace("\\u2028", "\u2028"))
    assert load_texts(path) == ["one", "two\u2028and a half", "three\n\nfour", "five\n\nsix"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "texts.jsonl holds no text"),
        (({"text": ""},), "texts.jsonl holds no text"),
        (({"text": "a"}, "{"), "texts.jsonl, line 2: not JSON"),
        ((["a"],), "line 1: a line must be a JSON object"),
        (({"answer": "a"},), "line 1: it has none of the fields 'text', 'prompt', 'turns', 'messages'"),
        (({"text": 5},), "line 1: 'text' must be text"),
        (({"messages": [{"role": "user"}]},), "line 1: 'messages' must be text"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_line_and_fault(
    tmp_path: Path, lines: tuple[object, ...], message: str
) -> None:
    with pytest.raises(InvalidWorkload, match=message):
        load_texts(write_lines(tmp_path / "texts.jsonl", *lines))


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload, match=r"cannot read .*: No such file"):
        load_texts(tmp_path / "none.txt")
    (tmp_path / "image.txt").write_bytes(b"\xff\xd8")
    with pytest.raises(InvalidWorkload, match="is not UTF-8 text"):
        load_texts(tmp_path / "image.txt")
