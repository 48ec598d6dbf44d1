"""Builds the native CPU kernels, ``outrider.kernels.cpu._native``; everything else is in ``pyproject.toml``.

Every file is compiled for the plainest processor of its kind, except ``isa_NAME.cpp``, which may use the
instruction set NAME. Which of those runs is chosen when the module is loaded, so one build serves all machines.

Wide instructions must stay in their own files. A template or inline function of a header that several files use is
compiled in each of them, and the linker keeps the first copy it meets, for everyone. So the files are linked from the
plainest to the widest: a copy with wide instructions wins only where nobody else has one. What no build can see to, the
sources must keep: an ``isa_*.cpp`` has no globals with constructors (they run on every machine, when the module is
loaded), and includes no header that has some, such as <iostream>.

Without a compiler the install succeeds without the module. pip hides what is printed here unless asked with ``-v``, so
``outrider doctor`` and ``outrider serve`` tell.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

NATIVE = Path("kernels/cpu/native")

# Not -march=native: the processor that runs is not always the one that compiles. Nothing may reorder or contract
# float arithmetic, or instruction sets would disagree about a bit. -fno-lto: link-time optimisation would choose
# among copies in its own order.
COMMON_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-lto"]
COMMON_FLAGS += ["-pthread", "-g0"]

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
_AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12 warns of its own <avx512fintrin.h>

# By file name, from the plainest to the widest: the processors that have it (None: all), and its flags.
INSTRUCTION_SETS: dict[str, tuple[set[str] | None, list[str]]] = {
    "isa_scalar.cpp": (None, ["-O2", "-ftree-vectorize"]),  # half the time to compile, and as fast
    "isa_neon.cpp": ({"aarch64", "arm64"}, ["-march=armv8.2-a+dotprod+fp16"]),
    "isa_avx2.cpp": ({"x86_64", "amd64"}, _AVX2),
    "isa_avx512.cpp": ({"x86_64", "amd64"}, [*_AVX512, *_AVX2]),
}


class BuildNative(build_ext):
    """Compiles the files side by side, each with its own flags, and takes failure for an answer."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except (CCompilerError, BaseError) as error:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # an older one must not pass for it
            self.warn(f"the native CPU kernels are not built, so Outrider will be slow: {error}")
            self.warn("when the cause is removed, install again: `outrider doctor` says how")

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            (NATIVE.parent / Path(self.get_ext_fullpath(ext.name)).name).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def _build(self, ext: Extension) -> None:
        try:
            import pybind11
        except ImportError as error:
            raise CompileError("pybind11 is not installed; pip does it, unless told --no-build-isolation") from error
        ext.include_dirs = [pybind11.get_include()]
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *, extra_postargs: list[str], **settings: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                objects: list[str] = compile_all([source], extra_postargs=extra_postargs + flags(source), **settings)
                return objects

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [file for files in pool.map(compile_one, sorted(sources, key=width)) for file in files]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all


def flags(source: str) -> list[str]:
    """What this file is compiled with beside the common flags."""
    if Path(source).name.startswith("bind"):
        return ["-O1"]  # checks and calls: nothing to optimise but the time that pybind11's templates take
    return INSTRUCTION_SETS.get(Path(source).name, (None, []))[1]


def width(source: str) -> tuple[int, str]:
    """Sorts files of no instruction set first, then from the plainest to the widest."""
    name = Path(source).name
    return ([*INSTRUCTION_SETS].index(name) + 1 if name in INSTRUCTION_SETS else 0, name)


def sources() -> list[str]:
    """The files this machine's build consists of."""
    machine = sysconfig.get_platform().rpartition("-")[2].lower()  # also right in a cross build
    found = sorted(NATIVE.glob("*.cpp"))
    unknown = [path.name for path in found if path.name.startswith("isa_") and path.name not in INSTRUCTION_SETS]
    if unknown:
        raise SystemExit(f"setup.py has no flags for {', '.join(unknown)}: add them to INSTRUCTION_SETS")
    left_out = {name for name, (machines, _) in INSTRUCTION_SETS.items() if machines and machine not in machines}
    return [path.as_posix() for path in found if path.name not in left_out]


def choose_compiler() -> None:
    """Take a C++ compiler that is here, where the one that Python was built with is not."""
    usual = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    if "CXX" not in os.environ and shutil.which(usual) is None:
        found = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if found is not None:
            os.environ["CXX"] = found


if __name__ == "__main__":
    choose_compiler()
    native = Extension(
        "outrider.kernels.cpu._native",
        sources(),
        # Also what only other processors compile: setuptools puts it into the source distribution.
        depends=[*(path.as_posix() for path in sorted(NATIVE.iterdir()) if path.suffix in (".cpp", ".h")), "setup.py"],
        extra_compile_args=COMMON_FLAGS,
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,  # setuptools then does not miss the file
    )
    setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
