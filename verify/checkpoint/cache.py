"""The user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$OUTRIDER_CACHE``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``. It may not exist yet."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "outrider"
    return Path.home() / ".cache" / "outrider"
