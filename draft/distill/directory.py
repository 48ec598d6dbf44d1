"""Where a run keeps what it has, so that the same command goes on after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.draft.distill.settings import DistillSettings


class RunRefused(Exception):
    """The directory cannot be used for this run; the message says why and what to do."""


class RunDirectory:
    """``out`` holds the draft when all is done, ``out/work`` what a run needs to go on.

    Opening it takes it: no other process can work in it until this one ends. ``target``: what identifies the target
    of the run, by name.

    Raises:
        RunRefused: it belongs to another run, to another process, or to something else.
        OSError: it cannot be written.
    """

    def __init__(self, out: Path, settings: DistillSettings, target: Mapping[str, Any]) -> None:
        self.out = out
        self.work = out / "work"
        wanted = {**target, **_fields(settings)}
        described = self.work / "run.json"
        if not described.exists():
            if out.exists() and (not out.is_dir() or any(path.name != "work" for path in out.iterdir())):
                raise RunRefused(f"{out} is not empty and holds no run that could go on; name another directory")
            self.work.mkdir(parents=True, exist_ok=True)
        self._lock = _take(self.work, out)
        try:
            if not described.exists():
                write_text(described, json.dumps(wanted, indent=1) + "\n")
            _check_same(out, _read(described), wanted)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give it back to others; the end of the process does so too."""
        os.close(self._lock)

    @property
    def conversations(self) -> Path:
        return self.work / "conversations.jsonl"

    @property
    def training_state(self) -> Path:
        return self.work / "training.safetensors"

    @property
    def dtype(self) -> Path:
        """Holds the name of the dtype that the run computes in, once it is chosen."""
        return self.work / "dtype"

    @property
    def validation(self) -> Path:
        return self.work / "validation.json"


def write_text(path: Path, text: str) -> None:
    """Write a small file, all of it or nothing."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _check_same(out: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise RunRefused(
                f"{out} holds a run with {name} {found.get(name)!r}, not {value!r}; "
                "go on with the same options and model, or name another directory"
            )


def _fields(settings: DistillSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in DistillSettings.__dataclass_fields__}


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunRefused(f"{path} is damaged ({error}); name another directory") from error
    return found


def _take(work: Path, out: Path) -> int:
    """A lock that the system gives back when this process ends, however it does."""
    lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunRefused(f"another process is at work in {out}; wait for it or end it") from error
    return lock
