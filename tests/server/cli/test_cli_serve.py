"""``outrider serve``: it starts, says where it is, ends on a signal, and refuses what it cannot serve."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from unbuilt_copy import unbuilt_copy

from outrider.kernels.cpu.availability import native_problem
from outrider.server.cli import serve
from outrider.server.cli.main import HelpFormatter, WrongUsage
from outrider.server.cli.options import make_settings
from outrider.server.engine.settings import EngineSettings
from outrider.server.protocol.surroundings import ConnectionLimits
from outrider.server.ws.settings import ServerSettings

OUTRIDER = str(Path(sysconfig.get_path("scripts")) / "outrider")


def refused(*arguments: str) -> tuple[int, str]:
    """The exit code and the last line of a server that must not start."""
    ended = subprocess.run([OUTRIDER, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr.splitlines()[-1]


@contextmanager
def running(model: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server whose model is loaded, and its ``HOST:PORT`` and the line that says it is ready."""
    command = [OUTRIDER, "serve", "--port", "0", "--model", str(model), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        address = re.search(r"ws://(\S+)/v1/responses", process.stdout.readline())
        assert address is not None
        ready = process.stdout.readline()
        assert ready.startswith("Ready after ")
        yield process, address[1], ready
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_server_is_ready_when_it_says_so_and_ends_well_on_a_signal(tiny_model: Path, end: signal.Signals) -> None:
    with running(tiny_model, "--model-name", "tiny") as (process, address, _):
        with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["tiny"]
        process.send_signal(end)
        assert process.wait(timeout=30) == 0


def test_the_reference_kernels_are_no_surprise_where_they_were_asked_for(tiny_model: Path) -> None:
    with running(tiny_model, "--kernels", "reference") as (process, _, ready):
        assert "kernels reference," in ready
        process.send_signal(signal.SIGTERM)
        assert "Warning" not in process.communicate(timeout=30)[0]


def test_kernels_that_are_not_built_are_told_in_one_line_with_a_remedy(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, **unbuilt_copy(tmp_path)) as (process, _, ready):
        assert "kernels reference," in ready
        assert process.stdout is not None
        warning = process.stdout.readline()
        assert warning.startswith("Warning: answers come slowly")
        assert "pip install" in warning


@pytest.mark.skipif(native_problem() is not None, reason="the native kernels are not built")
def test_the_native_kernels_say_their_instruction_set_and_threads(tiny_model: Path) -> None:
    with running(tiny_model, "--num-threads", "1", OUTRIDER_CPU_ISA="scalar") as (_, _, ready):
        assert "kernels cpu (scalar, 1 thread)," in ready


@pytest.mark.skipif(native_problem() is not None, reason="the native kernels are not built")
def test_an_instruction_set_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_ISA", "nonsense")
    code, line = refused("--port", "0", "--kernels", "cpu")
    assert code == 1
    assert 'OUTRIDER_CPU_ISA: this CPU and build have no instruction set "nonsense"' in line


def test_a_taken_port_is_told_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, line = refused("--port", port)
    assert code == 1
    assert port in line
    assert "--port" in line


def test_a_model_that_is_not_there_is_named() -> None:
    code, line = refused("--port", "0", "--model", "no/such.gguf")
    assert code == 1
    assert "no/such.gguf" in line


def test_a_checkpoint_that_cannot_be_served_is_refused_before_serving(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    code, line = refused("--port", "0", "--model", str(tmp_path))
    assert code == 1
    assert line.startswith("outrider serve: ")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-running", "0"),
        ("--port", "70000"),
        ("--max-draft-tokens", "-1"),
        ("--kernels", "abacus"),
        ("--quantize", "int2"),
    ],
)
def test_a_setting_out_of_range_is_a_usage_error_that_names_the_option_and_the_value(option: str, value: str) -> None:
    code, line = refused(option, value)
    assert code == 2
    assert option in line
    assert value in line


def test_every_setting_has_an_option_and_its_default_is_the_dataclasss_own() -> None:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    serve.add_arguments(parser)
    args = parser.parse_args([])
    assert make_settings(ConnectionLimits, args) == ConnectionLimits()
    engine = make_settings(EngineSettings, args, model_path="m", model_name="m")
    assert engine == EngineSettings(model_path="m", model_name="m")
    assert make_settings(ServerSettings, args, allow_origins=()) == ServerSettings()

    # given by --model, by --draft-model and by the connection's own options
    not_options = {"model_path", "draft_model_path", "limits"}
    missing = {
        field.name
        for settings in (ConnectionLimits, EngineSettings, ServerSettings)
        for field in fields(settings)
        if not hasattr(args, field.name)
    }
    assert missing <= not_options


def test_a_refused_setting_of_the_program_is_not_blamed_on_an_option() -> None:
    with pytest.raises(WrongUsage, match=r"^max_running must be"):
        make_settings(EngineSettings, argparse.Namespace(), model_path="m", model_name="m", max_running=0)
