"""Whether the native kernels are here, what they may use of this machine, and what to do where they are missing.

No torch here: the server process and ``outrider doctor`` ask before anything is loaded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import sysconfig
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

_MODULE = "outrider.kernels.cpu._native"


def native_problem() -> str | None:
    """Why the native kernels cannot run and what to do, as a sentence; None if they can."""
    try:
        import_module(_MODULE)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == _MODULE:
            return f"the native CPU kernels are not built: {_why_not_built()}"
        return f"the native CPU kernels cannot be loaded ({error}); to build them again, {_install_command()}"
    return None


def instruction_sets() -> list[str]:
    """What the native kernels can use on this processor, best first."""
    from outrider.kernels.cpu import _native

    return _native.instruction_sets()


def selected_instruction_set() -> str:
    """What they do use: the best, or what the environment variable ``OUTRIDER_CPU_ISA`` names.

    Raises:
        ValueError: it names one that is not there.
    """
    from outrider.kernels.cpu import _native

    try:
        return _native.selected_instruction_set()
    except ValueError as error:
        raise ValueError(f"OUTRIDER_CPU_ISA: {error}") from error


def usable_cpus(root: Path = Path("/")) -> int:
    """Processors this process may keep busy: how many it may run on, or for how many a container pays.

    A quota counts in whole processors: with a thread more, one would always stand still and the others wait for it.
    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> list[float]:
    """The processor quotas of this process's control groups and of all around them (Linux, cgroup-v1 and v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:  # "0::/path" (v2) or "3:cpu,cpuacct:/path" (v1)
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # in a container the path may be the host's: then only the top is here
            quotas += _read_quota(mount / folder)
    return quotas


def _read_quota(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError):  # no quota here: "max", or no such file
        return []


def _why_not_built() -> str:
    again = _install_command()
    compilers = ("c++", "g++", "clang++", *shlex.split(sysconfig.get_config_var("CXX") or "")[:1])
    lacks_compiler = not any(map(shutil.which, compilers))
    if lacks_compiler or not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking = "a C++ compiler is missing" if lacks_compiler else "the header files of Python are missing"
        return f"{lacking} (Debian, Ubuntu: apt install g++ python3-dev); install it, then {again}"
    return f"to build them, or to see what goes wrong, {again} -v"


def _install_command() -> str:
    """How to install Outrider again from where it came, nothing else touched."""
    # In the root of a working tree its own metadata is found too, which does not know.
    origins = [found.read_text("direct_url.json") for found in distributions(name="outrider")]
    origin = json.loads(next(filter(None, origins), "{}"))
    command, url = f"run {sys.executable} -m pip install --no-deps", origin.get("url", "")
    if url.startswith("file:"):
        is_editable = origin.get("dir_info", {}).get("editable", False)
        return f"{command} {'-e ' if is_editable else ''}{shlex.quote(unquote(urlsplit(url).path))}"
    source = f"{origin['vcs_info']['vcs']}+{url}" if "vcs_info" in origin else url or "outrider"
    return f"{command} --force-reinstall --no-cache-dir {source}"
