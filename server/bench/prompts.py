"""The workload: prompts from a JSONL file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]  # {"role": …, "content": …}


class InvalidWorkload(ValueError):
    """The file cannot be used; the message names file, line and fault."""


@dataclass(frozen=True, slots=True)
class Prompt:
    line: int  # in the file, from 1
    messages: tuple[Message, ...]
    category: str = ""  # empty: the file names none


def load_prompts(path: Path, limit: int | None = None, per_category: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a file, of each category no more than the first ``per_category``.

    Each line is one JSON object with one of

    - ``prompt``: a user message,
    - ``messages``: a dialogue, ``[{"role": "user", "content": "…"}, …]``,
    - ``turns``: user messages, as in Spec-Bench and MT-bench; the first is used,

    and ``category``, if it has one.

    Raises:
        InvalidWorkload: the file cannot be read, a line cannot be used, or there is no prompt.
    """
    try:
        with path.open(encoding="utf-8") as file:
            prompts = list(_prompts(path, file, limit, per_category))
    except OSError as error:
        raise InvalidWorkload(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidWorkload(f"{path} is not UTF-8 text: {error.reason}") from error
    if not prompts:
        raise InvalidWorkload(f"{path} holds no prompt; it needs one JSON object a line")
    return prompts


def _prompts(path: Path, lines: Iterable[str], limit: int | None, per_category: int | None) -> Iterable[Prompt]:
    seen: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if seen.total() == limit:
            return
        if line.strip():
            try:
                fields = json.loads(line)
                prompt = Prompt(number, _messages(fields), _category(fields))
            except json.JSONDecodeError as error:
                raise InvalidWorkload(f"{path}, line {number}: not JSON ({error})") from error
            except InvalidWorkload as error:
                raise InvalidWorkload(f"{path}, line {number}: {error}") from None
            if per_category is None or seen[prompt.category] < per_category:
                seen[prompt.category] += 1
                yield prompt


def _messages(fields: Any) -> tuple[Message, ...]:
    if not isinstance(fields, dict):
        raise InvalidWorkload("a line must be a JSON object")
    if "prompt" in fields:
        return (_message("prompt", "user", fields["prompt"]),)
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns:
            raise InvalidWorkload("'turns' must be a list with at least one message")
        return (_message("turns[0]", "user", turns[0]),)
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise InvalidWorkload("'messages' must be a list of objects with 'role' and 'content'")
        return tuple(_message(f"messages[{i}]", m.get("role"), m.get("content")) for i, m in enumerate(messages))
    raise InvalidWorkload("it has none of the fields 'prompt', 'messages', 'turns'")


def _category(fields: dict[str, Any]) -> str:
    category = fields.get("category") or ""
    if not isinstance(category, str):
        raise InvalidWorkload(f"'category' must be text, not {category!r}")
    return category


def _message(name: str, role: Any, content: Any) -> Message:
    if role not in ("system", "user", "assistant"):
        raise InvalidWorkload(f"{name}: the role must be system, user or assistant, not {role!r}")
    if not isinstance(content, str) or not content:
        raise InvalidWorkload(f"{name} must be text that is not empty, not {content!r}")
    return {"role": role, "content": content}
