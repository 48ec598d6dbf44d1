"""Copies of Outrider with nothing built: as it is where no compiler was, or to build in."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("server", "draft", "verify", "kvcache", "kernels")
NATIVE = [path.relative_to(ROOT) for end in ("cpp", "h") for path in (ROOT / "kernels/cpu/native").glob(f"*.{end}")]
"""The C++ files, from the root."""


def copy_project(to: Path) -> None:
    """Put into ``to`` all that an installation is made from."""
    _copy_folders(to)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)


def unbuilt_copy(folder: Path) -> dict[str, str]:
    """Make a copy in ``folder``; the environment variables with which Python imports it, not what is installed."""
    _copy_folders(folder / "outrider")
    return {"PYTHONPATH": str(folder)}


def _copy_folders(to: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
