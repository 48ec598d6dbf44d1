"""``outrider doctor``: it sees what is there, and whatever is not it says how to get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from unbuilt_copy import unbuilt_copy

from outrider.draft.shipped import shipped_drafts
from outrider.kernels.cpu.availability import native_problem
from outrider.server.cli.machine import available_memory, read_processor
from outrider.verify.checkpoint.default_model import DEFAULT_MODEL

OUTRIDER = str(Path(sysconfig.get_path("scripts")) / "outrider")

X86 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7B13
flags\t\t: fpu sse4_2 fma f16c avx avx2 rdrand

processor\t: 1
model name\t: something else
flags\t\t: avx512f
"""

ARM = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd crc32 asimddp sve i8mm bf16
CPU implementer\t: 0x41
"""


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [OUTRIDER, "doctor", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=110)


def by_topic(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["topic"]: finding for finding in report["findings"]}


def test_a_machine_with_everything_is_ready(default_model: Path) -> None:
    examined = doctor("--json")
    report = json.loads(examined.stdout)
    assert (examined.returncode, report["ready"]) == (0, True), report
    findings = by_topic(report)
    assert 1 <= findings["cpu"]["facts"]["num_cores"] <= len(os.sched_getaffinity(0))
    assert findings["torch"]["facts"]["version"].split("+")[0] == version("torch").split("+")[0]
    assert findings["packages"]["facts"]["starlette"] == version("starlette")
    kernels = findings["kernels"]["facts"]
    assert kernels["used"] in kernels["known"]
    if kernels["used"] == "cpu":
        assert kernels["instruction_set"] in kernels["instruction_sets"]
    assert findings["model"]["facts"]["path"] == str(default_model)
    drafts = [finding for finding in report["findings"] if finding["topic"] == "draft"]
    if shipped := shipped_drafts():
        assert [draft["facts"]["path"] for draft in drafts] == [str(draft.path) for draft in shipped]
        assert all(draft["state"] == "ok" for draft in drafts)
    else:
        assert [draft["state"] for draft in drafts] == ["note"]
        assert "outrider distill" in drafts[0]["remedy"]


def test_all_that_is_missing_is_named_with_a_remedy(tmp_path: Path) -> None:
    # Earlier on the path than what is installed: a torch that cannot be imported, an Outrider that needs more.
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    information = tmp_path / "outrider-9.dist-info"
    information.mkdir()
    needs = "Requires-Dist: numpy>=2\nRequires-Dist: absent-package>=1\nRequires-Dist: optional-one; extra == 'gpu'\n"
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: outrider\nVersion: 9\n{needs}")

    environment = {"PYTHONPATH": str(tmp_path), "OUTRIDER_CACHE": str(tmp_path / "cache")}
    examined = doctor("--json", **environment)
    report = json.loads(examined.stdout)
    assert (examined.returncode, report["ready"]) == (1, False)
    missing = {topic: finding for topic, finding in by_topic(report).items() if finding["state"] == "missing"}
    assert set(missing) == {"packages", "torch", "model"}
    assert missing["packages"]["facts"] == {"missing": ["absent-package"]}
    assert "libcudart" in missing["torch"]["text"]
    assert "outrider models pull" in missing["model"]["remedy"]
    assert all(finding["remedy"] for finding in missing.values())

    shown = doctor(**environment)
    assert shown.returncode == 1
    assert sum("MISSING" in line for line in shown.stdout.splitlines()[:-1]) == 3
    assert all(finding["remedy"] in shown.stdout for finding in missing.values())


def test_kernels_that_are_not_built_are_a_warning_with_a_remedy_and_a_model_can_be_served(
    tmp_path: Path, default_model: Path
) -> None:
    environment = unbuilt_copy(tmp_path)
    examined = doctor("--json", **environment)
    report = json.loads(examined.stdout)
    assert (examined.returncode, report["ready"]) == (0, True), report
    kernels = by_topic(report)["kernels"]
    assert (kernels["state"], kernels["facts"]["used"]) == ("warn", "reference")
    assert "pip install" in kernels["remedy"]
    shown = doctor(**environment).stdout
    assert "kernels   WARNING: reference" in shown
    assert kernels["remedy"] in shown


@pytest.mark.skipif(native_problem() is not None, reason="the native kernels are not built")
def test_the_instruction_set_that_the_environment_names_is_shown_or_refused() -> None:
    named = by_topic(json.loads(doctor("--json", OUTRIDER_CPU_ISA="scalar").stdout))["kernels"]
    assert (named["state"], named["facts"]["instruction_set"]) == ("ok", "scalar")
    refused = by_topic(json.loads(doctor("--json", OUTRIDER_CPU_ISA="abacus").stdout))["kernels"]
    assert refused["state"] == "missing"
    assert all(word in refused["text"] for word in ("OUTRIDER_CPU_ISA", "abacus", "scalar"))


def test_a_damaged_model_is_not_taken_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not looked at here')\n")
    damaged = tmp_path / "models" / DEFAULT_MODEL.path.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"GGUF")
    report = json.loads(doctor("--json", PYTHONPATH=str(tmp_path), OUTRIDER_CACHE=str(tmp_path)).stdout)
    model = by_topic(report)["model"]
    assert (model["state"], str(damaged) in model["text"]) == ("missing", True)


@pytest.mark.parametrize(
    ("text", "model", "simd"),
    [
        (X86, "AMD EPYC 7B13", ("avx2", "fma", "f16c")),
        (ARM, None, ("asimd", "asimddp", "i8mm", "bf16", "sve")),
        ("", None, ()),
    ],
)
def test_the_processor_is_read_from_cpuinfo(
    tmp_path: Path, text: str, model: str | None, simd: tuple[str, ...]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    processor = read_processor(tmp_path / "cpuinfo")
    assert processor.simd == simd
    assert processor.model == model if model else processor.model != ""


def test_only_the_cores_this_process_may_use_count() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from outrider.server.cli.machine import read_processor; print(read_processor().num_cores)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_available_memory_is_in_bytes_and_unknown_where_the_system_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n")
    assert available_memory(tmp_path / "meminfo") == 20_480_000_000
    assert available_memory(tmp_path / "absent") is None
