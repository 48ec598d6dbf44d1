"""``outrider doctor``: what this machine has, what will be used, what is missing and how to get it."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from outrider.kernels.cpu.availability import (
    instruction_sets,
    native_problem,
    selected_instruction_set,
    usable_cpus,
)
from outrider.server.cli.machine import available_memory, gpu_driver, read_processor
from outrider.server.engine.settings import KERNELS

DESCRIPTION = """\
Looks at this machine as `outrider serve` would, without starting anything or going online, and says what
was found, which kernels will be used, and for everything missing how to get it.
"""

EPILOG = """\
examples:
  outrider doctor                         for people
  outrider doctor --json                  for programs: {"ready": true, "findings": [...]}

environment variables:
  OUTRIDER_CPU_ISA                        the instruction set that the cpu kernels use; else the best one

exit codes:
  0  a model can be served      1  something is missing; the lines marked MISSING say how to get it
"""

_LOW_MEMORY = 2 << 30  # bytes; the default model takes one for its weights and one for keys and values


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``missing``: nothing can be served; ``warn``: but badly; ``note``: worth knowing."""

    topic: str
    state: Literal["ok", "note", "warn", "missing"]
    text: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    findings = [finding for examine in EXAMINATIONS for finding in examine()]
    ready = all(finding.state != "missing" for finding in findings)
    if args.json:
        print(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            _show(finding)
        print("\nReady: outrider serve" if ready else "\nNot ready: see what is marked MISSING.")
    return 0 if ready else 1


def _show(finding: Finding) -> None:
    mark = {"ok": "", "note": "note: ", "warn": "WARNING: ", "missing": "MISSING: "}[finding.state]
    print(f"{finding.topic:<9} {mark}{finding.text}")
    if finding.remedy:
        print(f"{'':<9} -> {finding.remedy}")


def examine_machine() -> Iterator[Finding]:
    processor = read_processor()
    simd = " ".join(processor.simd) or "no SIMD flags known"
    text = f"{processor.model}, {processor.num_cores} cores, {simd}"
    yield Finding("cpu", "ok", text, facts=asdict(processor))
    if (memory := available_memory()) is not None:
        is_low = memory < _LOW_MEMORY
        remedy = "end other programs, or take less for keys and values: outrider serve --kv-cache-mib" if is_low else ""
        text = f"{memory / 2**30:.1f} GiB available"
        yield Finding("memory", "note" if is_low else "ok", text, remedy, {"available_bytes": memory})


def examine_python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    missing = [name for name in _dependencies() if _version_of(name) is None]
    if missing:
        remedy = f"{sys.executable} -m pip install -c constraints.txt {' '.join(missing)}"
        yield Finding("packages", "missing", ", ".join(missing), remedy, {"missing": missing})
    else:
        versions = {name: _version_of(name) for name in _dependencies()}
        yield Finding("packages", "ok", f"all {len(versions)} that Outrider needs", facts=versions)


def examine_torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a CUDA build is not here
        yield Finding("torch", "missing", f"it cannot be imported ({error})", "install torch==2.13.0 again with pip")
        return
    threads = torch.get_num_threads()
    facts: dict[str, Any] = {"version": torch.__version__, "num_threads": threads}
    yield Finding("torch", "ok", f"{torch.__version__}, {threads} threads", facts=facts)

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory
            gpu = {"name": properties.name, "memory_bytes": memory}
            yield Finding("gpu", "ok", f"{properties.name}, {memory / 2**30:.0f} GiB", facts=gpu)
    elif driver := gpu_driver():
        remedy = f"install a build of torch for it (this one is {torch.__version__})"
        yield Finding("gpu", "note", f"an {driver} GPU is here, but torch cannot use it", remedy)
    else:
        yield Finding("gpu", "ok", "none")

    if triton := _version_of("triton"):
        yield Finding("triton", "ok", triton, facts={"version": triton})
    elif torch.cuda.is_available():
        yield Finding("triton", "note", "not installed; GPU kernels need it", 'pip install "outrider[gpu]"')
    else:
        yield Finding("triton", "ok", "not installed; only GPUs need it")


def examine_kernels() -> Iterator[Finding]:
    facts: dict[str, Any] = {"used": "reference", "known": [name for name in KERNELS if name != "auto"]}
    if (problem := native_problem()) is not None:
        yield Finding("kernels", "warn", "reference: plain torch, the slow path", problem, facts)
        return
    facts |= {"used": "cpu", "instruction_sets": instruction_sets(), "num_threads": usable_cpus()}
    try:
        selected = facts["instruction_set"] = selected_instruction_set()
    except ValueError as error:
        yield Finding("kernels", "missing", str(error), "set it to one of these, or not at all", facts)
        return
    usable = ", ".join(facts["instruction_sets"])
    text = f"cpu: native, using {selected} (this processor can run {usable}), {facts['num_threads']} threads"
    yield Finding("kernels", "ok", text, facts=facts)


def examine_model() -> Iterator[Finding]:
    from outrider.verify.checkpoint.default_model import DEFAULT_MODEL

    path = DEFAULT_MODEL.path
    facts = {"name": DEFAULT_MODEL.name, "path": str(path)}
    remedy = "outrider models pull, or name another model: outrider serve --model"
    if not path.is_file():
        yield Finding("model", "missing", f"{DEFAULT_MODEL.name} is not at {path}", remedy, facts)
    elif _sha256(path) != DEFAULT_MODEL.sha256:
        yield Finding("model", "missing", f"{path} is damaged: its SHA-256 is wrong", remedy, facts)
    else:
        yield Finding("model", "ok", f"{DEFAULT_MODEL.name} at {path}", facts=facts)


def examine_drafts() -> Iterator[Finding]:
    from outrider.draft.shipped import shipped_drafts

    drafts = shipped_drafts()
    for draft in drafts:
        facts = {"path": str(draft.path), "kind": draft.kind, "target": draft.target, "num_bytes": draft.num_bytes}
        yield Finding(
            "draft",
            "ok",
            f"{draft.kind} for {draft.target}, {draft.num_bytes / 1e6:.1f} MB (--drafter hybrid)",
            facts=facts,
        )
    if not drafts:
        text = "no draft model comes with this build; the suffix drafter guesses"
        yield Finding("draft", "note", text, "make one: outrider distill, or name one: outrider serve --draft-model")


def examine_extras() -> Iterator[Finding]:
    if _version_of("matplotlib") is None:
        yield Finding("plots", "note", "matplotlib is not installed", 'for bench --plot: pip install "outrider[plot]"')


EXAMINATIONS: tuple[Callable[[], Iterator[Finding]], ...] = (
    examine_machine,
    examine_python,
    examine_torch,
    examine_kernels,
    examine_model,
    examine_drafts,
    examine_extras,
)


def _dependencies() -> list[str]:
    """What the installed Outrider requires on every machine, extras left out."""
    lines = [line for line in requires("outrider") or [] if "extra ==" not in line]
    return [match[0] for line in lines if (match := re.match(r"[\w.-]+", line))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
