"""The directory of a run: whose it is, and that nobody else works in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.draft.distill.directory import RunDirectory, RunRefused
from outrider.draft.distill.settings import DistillSettings

SETTINGS, TARGET = DistillSettings(), {"model": "m", "fingerprint": "abc"}


def opened_elsewhere(out: Path) -> str:
    """What another process is told that opens it."""
    code = (
        "import sys; from pathlib import Path; from outrider.draft.distill.directory import *\n"
        "try: RunDirectory(Path(sys.argv[1]), DistillSettings(), {'model': 'm', 'fingerprint': 'abc'})\n"
        "except RunRefused as refusal: print(refusal)\n"
        "else: print('opened')"
    )
    return subprocess.run([sys.executable, "-c", code, out], check=True, capture_output=True, text=True).stdout.strip()


def test_the_same_command_opens_it_again(tmp_path: Path) -> None:
    assert opened_elsewhere(tmp_path / "out") == "opened"
    assert opened_elsewhere(tmp_path / "out") == "opened"


def test_two_processes_do_not_work_in_it_at_once(tmp_path: Path) -> None:
    taken = RunDirectory(tmp_path / "out", SETTINGS, TARGET)
    assert "another process is at work" in opened_elsewhere(tmp_path / "out")
    taken.close()
    assert opened_elsewhere(tmp_path / "out") == "opened"


@pytest.mark.parametrize(
    ("settings", "target", "problem"),
    [
        (replace(SETTINGS, seed=1), TARGET, "holds a run with seed 0, not 1"),
        (replace(SETTINGS, minutes=3.0), TARGET, "holds a run with minutes 480.0, not 3.0"),
        (SETTINGS, TARGET | {"model": "other"}, "holds a run with model 'm', not 'other'"),
        (SETTINGS, TARGET | {"fingerprint": "d"}, "fingerprint 'abc', not 'd'"),
    ],
)
def test_another_run_is_refused(
    settings: DistillSettings, target: dict[str, str], problem: str, tmp_path: Path
) -> None:
    RunDirectory(tmp_path, SETTINGS, TARGET).close()
    with pytest.raises(RunRefused, match=problem):
        RunDirectory(tmp_path, settings, target)
    RunDirectory(tmp_path, SETTINGS, TARGET).close()


def test_what_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for out in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(RunRefused, match="holds no run"):
            RunDirectory(out, SETTINGS, TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_damaged_description_is_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, SETTINGS, TARGET)
    directory.close()
    (directory.work / "run.json").write_text("{")
    with pytest.raises(RunRefused, match=r"run\.json is damaged"):
        RunDirectory(tmp_path, SETTINGS, TARGET)


@pytest.mark.parametrize(
    "change",
    [
        {"minutes": -1.0},
        {"minutes": float("nan")},
        {"minutes": 0.0},
        {"minutes": 0.0, "tokens": 5},
        {"tokens": -1},
        {"epochs": -0.5},
        {"seed": -1},
        {"layers": 3},
        {"draft_vocab": 1},
        {"unroll": 0},
        {"directness": 1.1},
        {"learning_rate": 0.0},
        {"batch_tokens": 1},
        {"max_turn_tokens": 3},
        {"max_answer_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(change))} must be"):
        DistillSettings(**change)  # type: ignore[arg-type]
