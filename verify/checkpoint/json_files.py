"""The small JSON files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.verify.checkpoint.config import UnsupportedCheckpoint


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file.

    Raises:
        UnsupportedCheckpoint: the file holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedCheckpoint(f"{path} holds no JSON object")
    return content


def token_ids(path: Path, key: str) -> tuple[int, ...]:
    """The ids at ``key`` of a JSON file: none, one, or a list of them.

    Raises:
        UnsupportedCheckpoint: there is something else.
    """
    value = read_json(path).get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise UnsupportedCheckpoint(f"{path}: {key} is {value!r}, which is no token id and no list of them")
    return tuple(ids)
