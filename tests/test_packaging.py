"""What is installed is what lies on disk, and nothing on disk hides a package of somebody else.

How the native kernels are built: ``test_native_build.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from unbuilt_copy import FOLDERS, NATIVE, ROOT, copy_project

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


@pytest.mark.parametrize("name", ["__init__.py", "conftest.py", "setup.cfg"])
def test_the_root_is_no_package_and_no_test_folder(name: str) -> None:
    assert not (ROOT / name).exists()


def test_test_folders_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_the_wheel_holds_every_source_file_and_the_command(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building in the tree leaves files that hide what is missing
    copy_project(source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    no_compiler = {"CC": "/absent", "CXX": "/absent"}  # it must do without, and that is quicker
    subprocess.run([*map(str, build), "--no-index", "--quiet"], check=True, env=os.environ | no_compiler)

    (wheel,) = tmp_path.glob("outrider-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "outrider = outrider.server.cli.main:main" in archive.read(entry_points).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    drafts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "draft" / "drafts").glob("*/*")}
    assert any(name.endswith("model.safetensors") for name in drafts)
    others = {"kernels/cpu/_native.pyi", *drafts}
    assert {name.removeprefix("outrider/") for name in names} == source_files() | others
    assert "outrider/kernels/operations.py" in names


def test_the_source_distribution_holds_all_that_builds_the_native_kernels(tmp_path: Path) -> None:
    copy_project(tmp_path)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], cwd=tmp_path, check=True, capture_output=True)
    (archive,) = (tmp_path / "dist").glob("outrider-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    native = {path.as_posix() for path in NATIVE}
    assert any(name.endswith(".h") for name in native)
    assert names >= native | {"setup.py", "kernels/cpu/_native.pyi"} | source_files()


def test_transformers_does_not_take_our_kernels_folder_for_hugging_faces() -> None:
    code = "import sys; sys.path.insert(0, '.'); from transformers import Qwen3ForCausalLM\n"
    code += "print(getattr(sys.modules.get('kernels'), '__file__', None))"
    python = [sys.executable, "-W", "ignore", "-c", code]
    taken = subprocess.run(python, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    assert not Path(taken).is_relative_to(ROOT)


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    declared += (line for lines in extras.values() for line in lines)
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
