"""Texts to measure a model on, from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.server.bench.prompts import InvalidWorkload


def load_texts(path: Path) -> list[str]:
    """The texts of a file: of one that ends in ``.jsonl`` one a line, else the whole of it.

    A line is a JSON object with ``text``, or with a prompt as ``load_prompts`` takes it, whose messages are laid end
    to end, all of ``turns`` too.

    Raises:
        InvalidWorkload: the file cannot be read, a line cannot be used, or there is no text.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidWorkload(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidWorkload(f"{path} is not UTF-8 text: {error.reason}") from error
    texts = [content] if path.suffix != ".jsonl" else _texts_of_lines(path, content)
    if not any(texts):
        raise InvalidWorkload(f"{path} holds no text")
    return texts


def _texts_of_lines(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):  # splitlines would cut inside of strings
        if line.strip():
            try:
                texts.append(_text(json.loads(line)))
            except json.JSONDecodeError as error:
                raise InvalidWorkload(f"{path}, line {number}: not JSON ({error})") from error
            except InvalidWorkload as error:
                raise InvalidWorkload(f"{path}, line {number}: {error}") from None
    return texts


def _text(fields: Any) -> str:
    if not isinstance(fields, dict):
        raise InvalidWorkload("a line must be a JSON object")
    for name in ("text", "prompt", "turns", "messages"):
        if name in fields:
            found = fields[name] if isinstance(fields[name], list) else [fields[name]]
            pieces = [piece.get("content") if isinstance(piece, dict) else piece for piece in found]
            texts = [piece for piece in pieces if isinstance(piece, str)]
            if len(texts) < len(pieces):
                raise InvalidWorkload(f"'{name}' must be text")
            return "\n\n".join(texts)
    raise InvalidWorkload("it has none of the fields 'text', 'prompt', 'turns', 'messages'")
