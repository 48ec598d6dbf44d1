"""What is installed is what lies on disk, and nothing on disk hides a package of somebody else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("server", "draft", "verify", "kvcache", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files() -> set[str]:
    """Every Python file that belongs in a wheel, as a path from the root."""
    return {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def pins() -> dict[str, Requirement]:
    """The constraints file by canonical name."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_the_package_list_is_what_lies_on_disk() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    on_disk = {"outrider." + Path(file).parent.as_posix().replace("/", ".") for file in source_files()}
    assert sorted(listed) == sorted(on_disk)


def test_only_the_kernels_folder_has_no_init() -> None:
    # Hugging Face's `kernels` must stay importable with the root on sys.path: a namespace portion hides nothing.
    without = {
        folder
        for folder in {Path(file).parent for file in source_files()}
        if not (ROOT / folder / "__init__.py").exists()
    }
    assert without == {Path("kernels")}


@pytest.mark.parametrize("name", ["__init__.py", "conftest.py", "setup.py", "setup.cfg"])
def test_the_root_is_no_package_and_no_test_folder(name: str) -> None:
    assert not (ROOT / name).exists()


def test_test_folders_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_wheel_holds_every_source_file_and_the_command(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building in the tree leaves files that hide what is missing
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run([*map(str, build), "--no-index", "--quiet"], check=True)

    (wheel,) = tmp_path.glob("outrider-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        assert "outrider = outrider.server.cli.main:main" in archive.read(entry_points).decode()
    assert {name.removeprefix("outrider/") for name in names if name.endswith(".py")} == source_files()
    assert "outrider/kernels/operations.py" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_transformers_does_not_take_our_kernels_folder_for_hugging_faces() -> None:
    code = "import sys; sys.path.insert(0, '.'); from transformers import Qwen3ForCausalLM\n"
    code += "print(getattr(sys.modules.get('kernels'), '__file__', None))"
    python = [sys.executable, "-W", "ignore", "-c", code]
    taken = subprocess.run(python, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    assert not Path(taken).is_relative_to(ROOT)


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *(line for lines in extras.values() for line in lines)]
    for requirement in map(Requirement, declared):
        (pin,) = pins()[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "==", f"{requirement.name} is not pinned to one version"
        assert requirement.specifier.contains(pin.version), f"{requirement} does not admit {pin}"


def test_what_the_dependencies_bring_is_pinned_too() -> None:
    pinned = pins()
    found: set[str] = set()
    waiting = [("outrider", frozenset({"test", "plot"}))]
    while waiting:
        name, extras = waiting.pop()
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # needed on another platform only
            continue
        for requirement in map(Requirement, requirements):
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
            dependency = canonicalize_name(requirement.name)
            if wanted and dependency not in found:
                found.add(dependency)
                waiting.append((dependency, frozenset(requirement.extras)))
    assert found, "outrider is not installed"
    nvidia = re.compile(r"nvidia-|cuda-")  # a CUDA build of torch pins these itself
    assert sorted(name for name in found - pinned.keys() if not nvidia.match(name)) == []
