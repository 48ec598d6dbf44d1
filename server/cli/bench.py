"""``outrider bench``: measure a server, or two side by side."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.server.bench import drafts_report, report
from outrider.server.bench.baseline import BaselineUnavailable, Transformers
from outrider.server.bench.contenders import Contender, Server
from outrider.server.bench.plot import PlotUnavailable, load_matplotlib, save_plot
from outrider.server.bench.prompts import InvalidWorkload, Prompt, load_prompts
from outrider.server.bench.rounds import Result, run_rounds
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.source import SourceNotFound, resolve_source

DEFAULT_URL = "ws://127.0.0.1:8800/v1/responses"
MAX_FAILURES_SHOWN = 10
DESCRIPTION = """\
Sends the prompts of a file to a server that runs, and reports what a client sees: time to first token, time per
token, pauses, tokens/s, acceptance length, failures.

`outrider bench drafts` measures what speculation gains, `outrider bench kernels` and `outrider bench quality` what lies
below: see their --help.

PROMPTS is a file of JSON lines, each with "prompt" (a user message), "messages" (a dialogue) or "turns" (as in
Spec-Bench; the first turn is used). Where lines have a "category", there is a table by category too.

A URL is ws://HOST/v1/responses (this server) or http://HOST/v1/chat/completions (any server that streams OpenAI's
chat completions).
"""
EPILOG = """\
examples:
  outrider bench questions.jsonl --limit 20 --concurrency 1,4
  outrider bench questions.jsonl --compare http://127.0.0.1:8080/v1/chat/completions --rounds 5
  outrider bench questions.jsonl --limit 20 --max-tokens 64 --baseline transformers --concurrency 4

The exit code is 0 only if no request failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file of JSON lines")

    what = parser.add_argument_group("what is measured")
    what.add_argument("--url", type=server_url, default=DEFAULT_URL, help="the server")
    what.add_argument("--model", help="model name to ask for; without it, what the server serves")
    what.add_argument(
        "--compare", metavar="URL", type=server_url, help="a second server; the two take turns, prompt by prompt"
    )
    what.add_argument("--compare-model", metavar="MODEL", help="model name to ask the second server for")
    what.add_argument(
        "--baseline",
        metavar="transformers[:MODEL]",
        help="take turns with transformers' generate in float32, with the default model or the named GGUF file or "
        "directory; needs --temperature 0",
    )

    how = parser.add_argument_group("workload")
    how.add_argument("--limit", metavar="N", type=positive, help="use the first N prompts")
    how.add_argument("--per-category", metavar="N", type=positive, help="of each category the first N prompts")
    how.add_argument(
        "--concurrency",
        metavar="N[,N...]",
        type=concurrencies,
        default="1",
        help="streams at a time; several numbers are measured one after another. With --baseline, 1 comes first",
    )
    how.add_argument("--max-tokens", metavar="N", type=positive, default=128, help="where an answer is cut")
    how.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 takes the likeliest token")
    how.add_argument("--rounds", metavar="N", type=positive, default=3, help="times that every prompt is sent")
    how.add_argument("--warmup", metavar="N", type=natural, default=1, help="turns before the first that counts")
    how.add_argument(
        "--timeout", metavar="S", type=float, default=300.0, help="longest silence of a server, in seconds"
    )
    drafts = how.add_mutually_exclusive_group()
    drafts.add_argument("--draft-tokens", metavar="N", type=natural, help="ask for at most N draft tokens a step")
    drafts.add_argument("--no-speculation", action="store_true", help="ask for no draft tokens (max_draft_tokens 0)")

    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", type=Path, help="write all figures, those of each request too")
    output.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the figures (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    try:
        if args.plot:
            load_matplotlib()  # better missed now than after the measuring
        if args.baseline and args.temperature:
            raise BaselineUnavailable("the baseline is greedy; measure it with --temperature 0")
        prompts = load_prompts(args.prompts, args.limit, args.per_category)
        results, machine = asyncio.run(measure(args, prompts))
    except (InvalidWorkload, BaselineUnavailable, PlotUnavailable, SourceNotFound, UnsupportedCheckpoint) as error:
        print(f"outrider bench: {error}", file=sys.stderr)
        return 1
    show(args, prompts, workload(args, prompts), machine, results)
    failures = report.failures(results)
    for sentence in failures[:MAX_FAILURES_SHOWN]:
        print(f"outrider bench: {sentence}", file=sys.stderr)
    if failures:
        print(f"outrider bench: {len(failures)} requests failed", file=sys.stderr)
    return 1 if failures else 0


async def measure(args: argparse.Namespace, prompts: Sequence[Prompt]) -> tuple[list[Result], dict[str, Any]]:
    """Start the contenders and let them run; returns their results and what they run on."""
    machine = report.machine()
    contenders: list[Contender] = []
    results: list[Result] = []
    try:
        contenders.append(server(args, "outrider", args.url, args.model))
        if args.compare:
            contenders.append(server(args, "compared", args.compare, args.compare_model))
        if args.baseline:
            say("loading the baseline")
            baseline = await Transformers.start(baseline_model(args.baseline), max_tokens=args.max_tokens)
            contenders.append(baseline)
            machine["baseline"] = baseline.versions
        for concurrency in levels(args):
            results += await run_rounds(
                contenders, prompts, concurrency, num_rounds=args.rounds, num_warmups=args.warmup, report=say
            )
        machine["models"] = {contender.name: contender.model for contender in contenders}
    finally:
        say("")
        for contender in contenders:
            await contender.aclose()
    return results, machine


def server(args: argparse.Namespace, name: str, url: str, model: str | None) -> Server:
    is_ours = name == "outrider"  # only ours is asked for draft lengths: other servers may refuse the field
    return Server(
        name,
        url,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        max_draft_tokens=(0 if args.no_speculation else args.draft_tokens) if is_ours else None,
        takes_seeds=is_ours,
        model=model,
        timeout_s=args.timeout,
    )


def workload(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "prompts": args.prompts.name,
        "num_prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "max_draft_tokens": 0 if args.no_speculation else args.draft_tokens,
        "rounds": args.rounds,
        "url": args.url,
        "compare": args.compare,
        "baseline": args.baseline,
    }


def show(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    workload: dict[str, Any],
    machine: dict[str, Any],
    results: Sequence[Result],
) -> None:
    """Print the tables, write the files."""
    drafts = {None: "the server's choice", 0: "off"}.get(workload["max_draft_tokens"], workload["max_draft_tokens"])
    title = (
        f"{workload['num_prompts']} prompts of {workload['prompts']}, at most {workload['max_tokens']} tokens each, "
        f"temperature {workload['temperature']:g}, draft tokens: {drafts}, {workload['rounds']} rounds"
    )
    versions = ", ".join(f"{name} {value}" for name, value in machine.get("baseline", {}).items())
    print(f"workload  {title}")
    print(
        f"machine   {machine['processor']}, {machine['num_cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, outrider {machine['outrider']}" + (f", {versions}" if versions else "")
    )
    print(f"server    {args.url}" + (f", compared with {args.compare}" if args.compare else ""))
    print("models    " + ", ".join(f"{name}: {model or 'unknown'}" for name, model in machine["models"].items()))
    print("\n" + report.table(results) + "\n")
    for first, second in report.pairs(results):
        print(report.ratios(first, second) + "\n")
    if any(prompt.category for prompt in prompts):
        print(drafts_report.tables(results, prompts) + "\n\n" + drafts_report.LEGEND)
    print(report.LEGEND)
    if args.json:
        args.json.write_text(json.dumps(report.as_json(workload, machine, results), indent=1) + "\n")
    if args.plot:
        save_plot(results, f"{title}\n{machine['processor']}, {machine['num_cores']} cores", args.plot)


def levels(args: argparse.Namespace) -> list[int]:
    """The concurrencies; the claim against the baseline is made for one stream too."""
    return [1, *args.concurrency] if args.baseline and 1 not in args.concurrency else list(args.concurrency)


def baseline_model(baseline: str) -> Path:
    engine, _, source = baseline.partition(":")
    if engine != "transformers":
        raise BaselineUnavailable(f"the only baseline is transformers, not {engine!r}")
    return resolve_source(source or "default")


def say(message: str) -> None:
    """Progress, on one line, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def server_url(value: str) -> str:
    if urlsplit(value).scheme not in ("ws", "wss", "http", "https"):
        raise argparse.ArgumentTypeError(f"must begin with ws:// or http://, not {value!r}")
    return value


def positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {value!r}")
    return int(value)


def natural(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {value!r}")
    return int(value)


def concurrencies(value: str) -> list[int]:
    return [positive(number) for number in value.split(",")]
