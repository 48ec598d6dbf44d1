"""How the native kernels are built: each file for its own processors, and without a compiler not at all."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from unbuilt_copy import NATIVE, ROOT, copy_project

from outrider.kernels.cpu.availability import native_problem

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HAS_COMPILER = shutil.which("c++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
compiles = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler, or Python's header files are not here")

# Stands for the kernels: which instruction set a file is compiled for, and which copy of a template everyone runs.
PROBE = """\
#pragma once
#if defined(__AVX512VNNI__)
#define WIDTH 512
#elif defined(__AVX2__)
#define WIDTH 256
#else
#define WIDTH 128
#endif
template <int N> __attribute__((noinline)) int copy() { return WIDTH; }
"""
ISA_FILE = """\
#include "probe.h"
int NAME_width() { return WIDTH; }
int NAME_copies() { return copy<0>() + copy<1>(); }
"""
BINDINGS = """\
#include <Python.h>
#include "probe.h"
int scalar_width(), avx2_width(), avx512_width(), scalar_copies(), avx2_copies(), avx512_copies();
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__native() {
    scalar_copies(); avx2_copies();
    PyObject* made = PyModule_Create(&module);
    PyModule_AddObject(made, "widths", Py_BuildValue("[iiii]", WIDTH, scalar_width(), avx2_width(), avx512_width()));
    PyModule_AddObject(made, "copies", Py_BuildValue("[ii]", copy<0>(), avx512_copies() - copy<0>()));
    return made;
}
"""


def build(project: Path, **environment: str) -> str:
    """What is printed by a build that succeeds, in place."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(
        command, cwd=project, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert built.returncode == 0, built.stdout
    return built.stdout


def module_of(project: Path) -> Path:
    return project / f"kernels/cpu/_native{SUFFIX}"


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    """A project whose native kernels are small files that tell how they were compiled."""
    copy_project(tmp_path)
    native = tmp_path / "kernels/cpu/native"
    shutil.rmtree(native)
    native.mkdir()
    (native / "probe.h").write_text(PROBE)
    (native / "zz_bindings.cpp").write_text(BINDINGS)  # compiled and linked first, whatever its name
    for name in ("scalar", "avx2", "avx512"):
        (native / f"isa_{name}.cpp").write_text(ISA_FILE.replace("NAME", name))
    (native / "isa_neon.cpp").write_text("#error only for arm64\n")
    return tmp_path


@compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are x86-64's")
def test_wide_instructions_stay_in_the_files_that_are_named_for_them(probes: Path) -> None:
    build(probes)
    code = "import _native; print(_native.widths, _native.copies)"
    folder = module_of(probes).parent
    probed = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    # Every file calls the one copy of the template that the linker keeps: that of the plainest file that has one.
    assert probed.stdout == "[128, 128, 256, 512] [128, 128]\n"


@compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are x86-64's")
def test_a_changed_header_builds_again_and_a_failure_leaves_nothing_old_behind(probes: Path) -> None:
    assert "isa_avx2.cpp" in build(probes)
    assert "isa_avx2.cpp" not in build(probes)
    header = probes / "kernels/cpu/native/probe.h"
    header.write_text(header.read_text() + "#error changed\n")
    os.utime(header, (module_of(probes).stat().st_mtime + 10,) * 2)
    printed = build(probes)
    assert "#error changed" in printed
    assert "the native CPU kernels are not built" in printed
    assert not module_of(probes).exists()


def test_without_a_compiler_the_build_succeeds_says_so_and_leaves_nothing_old_behind(tmp_path: Path) -> None:
    copy_project(tmp_path)
    module_of(tmp_path).touch()
    printed = build(tmp_path, CC="/absent/cc", CXX="/absent/c++")
    assert "the native CPU kernels are not built" in printed
    assert "/absent/c++" in printed
    assert "outrider doctor" in printed
    assert not module_of(tmp_path).exists()


@compiles
def test_where_a_compiler_is_the_kernels_are_built() -> None:
    assert native_problem() is None


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("stamp", ["serve", "test"])
def test_make_builds_again_when_a_native_source_has_changed(tmp_path: Path, stamp: str) -> None:
    copy_project(tmp_path)
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "clients/python").mkdir(parents=True)
    (tmp_path / "clients/python/pyproject.toml").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for made in ("bin/python", f"{stamp}.stamp"):
        (tmp_path / ".venv" / made).touch()

    def is_up_to_date(*changed: str) -> bool:
        ask = ["make", "--question", f".venv/{stamp}.stamp", *(f"--what-if={name}" for name in changed)]
        return subprocess.run(ask, cwd=tmp_path, capture_output=True).returncode == 0

    assert is_up_to_date()
    for source in NATIVE:
        assert not is_up_to_date(source.as_posix())
    assert not is_up_to_date("setup.py")
