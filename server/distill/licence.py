"""Under which licence a model stands, as far as its files say."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.verify.checkpoint.checkpoint import is_gguf

_IN_CARD = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.MULTILINE)


def target_licence(path: Path) -> str | None:
    """The name that a GGUF file's metadata or a directory's model card gives; None where there is none."""
    if is_gguf(path):
        from outrider.verify.checkpoint.gguf_metadata import read_header

        return read_header(path).text("general.license")
    card = path / "README.md"
    found = _IN_CARD.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else None
