"""The command line as a person meets it: help, versions, mistakes, interruptions."""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from outrider.server.cli import main as cli

OUTRIDER = str(Path(sysconfig.get_path("scripts")) / "outrider")


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OUTRIDER, *arguments], capture_output=True, text=True, timeout=60)


def add_command(monkeypatch: pytest.MonkeyPatch, name: str, command: ModuleType) -> None:
    monkeypatch.setitem(cli.COMMANDS, name, "made by a test")
    monkeypatch.setitem(sys.modules, f"outrider.server.cli.{name.replace(' ', '_')}", command)


def test_help_names_every_command_and_the_exit_codes() -> None:
    shown = outrider("--help")
    assert shown.returncode == 0
    for name, summary in cli.COMMANDS.items():
        assert name in shown.stdout
        assert summary in shown.stdout
    assert "exit codes:" in shown.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_command_is_a_manual(command: str) -> None:
    shown = outrider(*command.split(), "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"usage: outrider {command}" in shown.stdout
    assert "example" in shown.stdout


def test_help_imports_no_command() -> None:
    code = "import sys\nfrom outrider.server.cli.main import build_parser\nbuild_parser(['--help']).format_help()\n"
    code += "print(*(name for name in sys.modules if name.startswith('outrider.')))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(shown.split()) == {"outrider.server", "outrider.server.cli", "outrider.server.cli.main"}


def test_the_version_is_the_installed_one() -> None:
    assert outrider("--version").stdout == f"outrider {version('outrider')}\n"


def test_an_unknown_command_is_a_usage_error_that_names_the_known() -> None:
    shown = outrider("swerve")
    assert shown.returncode == 2
    assert "swerve" in shown.stderr
    assert all(name in shown.stderr for name in cli.COMMANDS)


def test_no_command_is_a_usage_error() -> None:
    assert outrider().returncode == 2


def test_the_exit_code_is_the_commands_own(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ModuleType("answer")
    command.add_arguments = lambda parser: parser.add_argument("--code", type=int)  # type: ignore[attr-defined]
    command.run = lambda args: args.code  # type: ignore[attr-defined]
    add_command(monkeypatch, "answer", command)
    assert cli.main(["answer", "--code", "7"]) == 7


def test_a_command_may_have_two_words_and_a_path_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bench", "bench depth"):
        command = ModuleType(name)
        command.add_arguments = lambda parser: parser.add_argument("what", nargs="?")  # type: ignore[attr-defined]
        command.run = lambda args: print(f"{args.command}: {args.what}") or 0  # type: ignore[attr-defined]
        add_command(monkeypatch, name, command)
    for arguments in (["bench", "depth"], ["bench", "depth", "5"], ["bench", "./depth"], ["bench", "depths"]):
        assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "bench depth: None\nbench depth: 5\nbench: ./depth\nbench: depths\n"


def test_an_interrupted_command_says_nothing_and_returns_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command = ModuleType("wait")
    command.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    command.run = run  # type: ignore[attr-defined]
    add_command(monkeypatch, "wait", command)
    assert cli.main(["wait"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    # `outrider models list | true`
    writer = subprocess.Popen([OUTRIDER, "models", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait(timeout=60) == 0
    assert errors == ""


def test_defaults_are_shown_unless_they_say_nothing() -> None:
    parser = argparse.ArgumentParser(formatter_class=cli.HelpFormatter)
    parser.add_argument("--port", type=int, default=8800, help="where to listen")
    parser.add_argument("--quiet", action="store_true", help="say less")
    parser.add_argument("--name", help="what to call it")
    shown = parser.format_help()
    assert "where to listen (default: 8800)" in shown
    assert "say less\n" in shown
    assert "what to call it\n" in shown
