"""``outrider bench kernels``: the native kernels beside what memory and processor can do at the most."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.kernels.cpu.availability import native_problem
from outrider.server.bench import report
from outrider.server.bench.ceilings import MachineCeilings
from outrider.server.bench.kernel_operations import KernelModel
from outrider.server.bench.kernels import LEGEND, Measured, as_json, ceilings_text, measure, table
from outrider.server.cli.bench import positive, say
from outrider.server.cli.main import CommandFailed
from outrider.server.cli.options import add_options, make_settings
from outrider.server.cli.serve import ENGINE_OPTIONS, find_model
from outrider.server.engine.settings import KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

DESCRIPTION = """\
Runs each native operation at the shapes of a model, and says how near it comes to the machine's limits: the speed at
which memory can be read, and at which int8 and floats can be multiplied, both measured between the operations of the
same run. No server is needed; let nothing else run meanwhile.
"""
EPILOG = """\
examples:
  outrider bench kernels
  outrider bench kernels --num-threads 1 --rounds 11
  outrider bench kernels --model Qwen/Qwen3-0.6B --quantize int4 --json kernels.json

environment variables:
  OUTRIDER_CPU_ISA    the instruction set that the kernels use; else the best one
"""
OPTIONS = ("num_threads", "quantize", "kv_cache_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--model", default="default", help="'default', a .gguf file, a Hugging Face directory or a hub id"
    )
    choices = {"quantize": QUANTIZATIONS, "kv_cache_dtype": KV_CACHE_DTYPES}
    add_options(what, EngineSettings, {name: ENGINE_OPTIONS[name] for name in OPTIONS}, choices)
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="times that everything is measured")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures, those of each round too")


def run(args: argparse.Namespace) -> int:
    if (problem := native_problem()) is not None:
        raise CommandFailed(problem)
    settings = make_settings(EngineSettings, args, kernels="cpu", model_path="", model_name="").resolved()
    path, name = find_model(args.model)
    try:
        model = KernelModel(path, settings.num_threads, settings.quantize, settings.kv_cache_dtype)
    except (UnsupportedCheckpoint, ValueError) as error:
        raise CommandFailed(str(error)) from error
    facts = report.machine() | {
        "instruction_set": model.machine.instruction_set,
        "num_threads": model.machine.num_threads,
        "model": name,
        "quantize": settings.quantize,
        "kv_cache_dtype": settings.kv_cache_dtype,
    }
    try:
        measured = measure(list(model.operations()), MachineCeilings(model.machine), args.rounds, say)
    finally:
        say("")
    show(facts, measured)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, **as_json(measured)}, indent=1) + "\n")
    return 0


def show(facts: dict[str, Any], measured: Sequence[Measured]) -> None:
    num_threads = facts["num_threads"]
    print(
        f"machine   {facts['processor']}, {facts['num_cores']} cores, {facts['system']}, outrider {facts['outrider']}"
    )
    print(f"kernels   {facts['instruction_set']}, {num_threads} thread{'s' * (num_threads > 1)}")
    print(f"model     {facts['model']}, quantize {facts['quantize']}, keys and values {facts['kv_cache_dtype']}")
    print(f"limits    {ceilings_text(measured)}; medians of {len(measured[0].seconds)} rounds (lowest to highest)")
    print("\n" + table(measured) + "\n\n" + LEGEND)
