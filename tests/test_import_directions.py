"""Who may know whom: the folders form a line, and imports point one way along it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "server": ("server", "draft", "verify", "kvcache", "kernels"),
    "draft": (
        "draft",
        "verify.transformer",
        "verify.checkpoint",
        "verify.random_numbers",
        "verify.rope",
        "kvcache",
        "kernels",
    ),
    "verify": ("verify", "kvcache", "kernels"),
    "kvcache": ("kvcache", "kernels"),
    "kernels": ("kernels",),
    "clients": ("clients",),
}
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy", "outrider"} | sys.stdlib_module_names
SOURCE_FOLDERS = ("server", "draft", "verify", "kvcache", "kernels")

# The server process holds these from its first moment; importing torch would cost it seconds.
TORCH_FREE = [
    "kernels/cpu/availability.py",
    "server/cli",
    "server/protocol",
    "server/ws",
    "server/bench",
    "server/engine/client.py",
    "server/engine/request.py",
    "server/engine/settings.py",
    "server/engine/supervisor.py",
    "verify/sampling_params.py",
    "verify/checkpoint/chat_template.py",
    "verify/checkpoint/source.py",
    "verify/checkpoint/tokenizer.py",
]


def python_files(*places: str) -> list[Path]:
    """The Python files at these paths from the root, folders with all below them."""
    found = [
        file for place in places for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    assert found, f"no Python file in {places}"
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("outrider", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_names(path: Path) -> Iterator[str]:
    """Every name the file imports, in full: ``from a.b import c`` gives ``a.b.c``; inside functions too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(("outrider", *package[: len(package) - node.level + 1])) if node.level else ""
            prefix = ".".join(filter(None, (base, node.module)))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def is_within(name: str, packages: tuple[str, ...] | set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_the_design_lets_it(folder: str) -> None:
    allowed = tuple(f"outrider.{part}" for part in MAY_IMPORT[folder])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(folder)
        for name in imported_names(path)
        if is_within(name, ("outrider",)) and not is_within(name, allowed)
    ]
    assert wrong == []


def test_kernels_depend_on_torch_triton_and_numpy_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("kernels")
        for name in imported_names(path)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT
    ]
    assert wrong == []


def test_the_protocol_does_no_input_or_output() -> None:
    forbidden = {"asyncio", "threading", "socket", "starlette", "uvicorn", "websockets", "torch"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("server/protocol")
        for name in imported_names(path)
        if is_within(name, forbidden)
    ]
    assert wrong == []


@pytest.mark.parametrize("place", TORCH_FREE)
def test_the_server_process_never_loads_torch(place: str) -> None:
    modules = [module_name(path) for path in python_files(place)]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "print(*{'torch', 'transformers', 'scipy'} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []


def test_nothing_unpickles() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(*SOURCE_FOLDERS, "clients")
        for name in [*imported_names(path), *attribute_names(path)]
        if is_within(name, {"pickle", "cloudpickle", "dill", "joblib", "shelve", "torch.load"})
    ]
    assert wrong == []


def test_templates_render_in_the_sandbox_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(*SOURCE_FOLDERS)
        for name in [*imported_names(path), *attribute_names(path)]
        if is_within(name, {"jinja2.Template", "jinja2.Environment", "jinja2.environment", "jinja2.NativeEnvironment"})
    ]
    assert wrong == []


def attribute_names(path: Path) -> Iterator[str]:
    """Every dotted name the file uses, such as ``torch.load``."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
