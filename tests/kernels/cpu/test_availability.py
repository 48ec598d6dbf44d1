"""Where the native kernels are missing everyone is told, and they take no more of a machine than they may."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from unbuilt_copy import unbuilt_copy

from outrider.kernels.cpu.availability import (
    instruction_sets,
    native_problem,
    selected_instruction_set,
    usable_cpus,
)

built = pytest.mark.skipif(native_problem() is not None, reason="the native kernels are not built")


def run(code: str, **environment: str) -> str:
    """What the code prints; a Python of its own, since an imported module stays."""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@built
def test_the_best_instruction_set_is_taken_unless_one_is_named() -> None:
    assert "scalar" in instruction_sets()
    code = "from outrider.kernels.cpu.availability import *; print(selected_instruction_set())"
    for name in instruction_sets():
        assert run(code, OUTRIDER_CPU_ISA=name) == name + "\n"
    if "OUTRIDER_CPU_ISA" not in os.environ:
        assert selected_instruction_set() == instruction_sets()[0]


@built
def test_an_instruction_set_that_is_not_there_is_refused_by_name() -> None:
    code = "from outrider.kernels.cpu.availability import *\n"
    code += "try: selected_instruction_set()\nexcept ValueError as error: print(error)"
    message = run(code, OUTRIDER_CPU_ISA="abacus")
    assert "OUTRIDER_CPU_ISA" in message
    assert "abacus" in message


def test_kernels_that_are_not_built_are_told_with_a_command_that_builds_them(tmp_path: Path) -> None:
    code = "from outrider.kernels.cpu.availability import native_problem; print(native_problem())"
    problem = run(code, **unbuilt_copy(tmp_path))
    assert "not built" in problem
    assert f"{sys.executable} -m pip install" in problem
    assert "apt install g++" in run(code, PYTHONPATH=str(tmp_path), PATH=str(tmp_path))


def test_kernels_that_cannot_be_loaded_are_not_taken_for_unbuilt(tmp_path: Path) -> None:
    environment = unbuilt_copy(tmp_path)
    (tmp_path / f"outrider/kernels/cpu/_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"built for another machine")
    code = "from outrider.kernels.cpu.availability import native_problem; print(native_problem())"
    assert "cannot be loaded" in run(code, **environment)


def test_unbuilt_kernels_are_refused_by_name_and_never_chosen(tmp_path: Path) -> None:
    code = """
from outrider.kernels.operations import load_operations
from outrider.server.engine.settings import EngineSettings
def attempt(make):
    try: print(make())
    except ValueError as error: print(error)
attempt(lambda: load_operations("cpu"))
attempt(lambda: EngineSettings("m", "m").resolved().kernels)
attempt(lambda: EngineSettings("m", "m", quantize="int8").resolved())
"""
    named, chosen, quantized = run(code, **unbuilt_copy(tmp_path)).splitlines()
    assert "not built" in named
    assert chosen == "reference"
    assert quantized.startswith("quantize must be none with the reference kernels, not 'int8'; ")
    assert "not built" in quantized


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
)
def test_no_more_processors_are_used_than_are_allowed_and_paid_for(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    allowed = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path) == (allowed if limit is None else min(limit, allowed))
