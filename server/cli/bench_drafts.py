"""``outrider bench drafts``: what speculation gains on this machine, with servers of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.server.bench import drafts_report, report
from outrider.server.bench.categories import decode_speed
from outrider.server.bench.contenders import Server
from outrider.server.bench.own_server import OwnServer, ServerDidNotStart
from outrider.server.bench.prompts import InvalidWorkload, Prompt, load_prompts
from outrider.server.bench.rounds import Result, run_rounds
from outrider.server.cli.bench import MAX_FAILURES_SHOWN, concurrencies, natural, positive, say
from outrider.server.cli.main import CommandFailed

DESCRIPTION = """\
Starts `outrider serve` twice, with and without speculation, and lets the two answer the prompts of a file by turns:
tokens/s of both and their ratio by category, acceptance by source and position, times of drafting and verifying, and
whether both gave the same text. With --sweep, the controller that picks draft lengths competes with every fixed length.

PROMPTS is a file of JSON lines as `outrider bench` takes it; "category" says which line of the tables it goes into.
Everything a step does is in the times: they are taken by a client at the other end of a socket.
"""
EPILOG = """\
examples:
  outrider bench drafts questions.jsonl --per-category 4 --rounds 3
  outrider bench drafts questions.jsonl --per-category 2 --concurrency 1,4,8 --temperature 0,0.7 --json drafts.json
  outrider bench drafts questions.jsonl --per-category 2 --sweep
  outrider bench drafts questions.jsonl --draft-options '--drafter suffix' --options '--num-threads 1'

A server keeps the prompts of earlier rounds in its prefix cache, as it would in use. Where every round is to pay for
its prompts, give it less room than a round needs: --options '--kv-cache-mib 64'.

The exit code is 0 only if no request failed.
"""
CONTROLLER = "speculating"
OFF = "off"


@dataclass(frozen=True, slots=True)
class Setting:
    """One table: a number of streams at one temperature."""

    concurrency: int
    temperature: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file of JSON lines")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", default="default", help="as for `outrider serve`")
    what.add_argument("--options", metavar="OPTIONS", default="", help="options of `outrider serve` for all servers")
    what.add_argument(
        "--draft-options", metavar="OPTIONS", default="", help="options for those that speculate, such as --drafter"
    )
    what.add_argument(
        "--sweep",
        metavar="N[,N...]",
        type=lengths,
        nargs="?",
        const=list(range(9)),
        help="compete with drafts of these fixed lengths too; 0,1,...,8 if none are named",
    )
    how = parser.add_argument_group("workload")
    how.add_argument("--limit", metavar="N", type=positive, help="use the first N prompts")
    how.add_argument("--per-category", metavar="N", type=positive, help="of each category the first N prompts")
    how.add_argument(
        "--concurrency", metavar="N[,N...]", type=concurrencies, default=[1], help="streams at a time (default: 1)"
    )
    how.add_argument(
        "--temperature", metavar="T[,T...]", type=temperatures, default=[0.0], help="of the answers (default: 0)"
    )
    how.add_argument("--max-tokens", metavar="N", type=positive, default=128, help="where an answer is cut")
    how.add_argument("--rounds", metavar="N", type=positive, default=3, help="times that every prompt is sent")
    how.add_argument("--warmup", metavar="N", type=natural, default=2, help="turns before the first that counts")
    how.add_argument(
        "--timeout", metavar="S", type=float, default=300.0, help="longest silence of a server, in seconds"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures, those of each request too")


def run(args: argparse.Namespace) -> int:
    try:
        prompts = load_prompts(args.prompts, args.limit, args.per_category)
        measured, servers = asyncio.run(measure(args, prompts))
    except (InvalidWorkload, ServerDidNotStart) as error:
        raise CommandFailed(str(error)) from error
    machine = report.machine() | {"servers": servers}
    show(args, prompts, machine, measured)
    failures = [failure for results in measured.values() for failure in report.failures(results)]
    for sentence in failures[:MAX_FAILURES_SHOWN]:
        print(f"outrider bench drafts: {sentence}", file=sys.stderr)
    if failures:
        print(f"outrider bench drafts: {len(failures)} requests failed", file=sys.stderr)
    return 1 if failures else 0


async def measure(
    args: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[dict[Setting, list[Result]], dict[str, str]]:
    """Start the servers and let them run; the results of each setting, and what the servers say of themselves."""
    common = ["--model", args.model, *shlex.split(args.options)]
    drafting = [*common, *shlex.split(args.draft_options)]
    options = {CONTROLLER: drafting, OFF: [*common, "--no-speculation"]}
    if fixed := fixed_lengths(args):
        options["fixed"] = [*drafting, "--no-adaptive-drafts", "--max-draft-tokens", str(max(fixed))]
    measured: dict[Setting, list[Result]] = {}
    async with AsyncExitStack() as stack:
        servers: dict[str, OwnServer] = {}
        for name, chosen in options.items():
            say(f"starting the server: {name}")
            servers[name] = await OwnServer.start(chosen)
            stack.push_async_callback(servers[name].aclose)
        for temperature in args.temperature:
            async with AsyncExitStack() as connections:
                contenders = make_contenders(args, temperature, servers)
                for contender in contenders:
                    connections.push_async_callback(contender.aclose)
                for concurrency in args.concurrency:
                    setting = Setting(concurrency, temperature)
                    measured[setting] = await run_rounds(
                        contenders, prompts, concurrency, num_rounds=args.rounds, num_warmups=args.warmup, report=say
                    )
        say("")
    return measured, {name: server.ready for name, server in servers.items()}


def make_contenders(args: argparse.Namespace, temperature: float, servers: dict[str, OwnServer]) -> list[Server]:
    """Who competes: the fixed lengths share a server, which takes each request's own length for what it drafts."""

    def contender(name: str, server: str, num_draft_tokens: int | None = None) -> Server:
        return Server(
            name,
            servers[server].url,
            max_tokens=args.max_tokens,
            temperature=temperature,
            max_draft_tokens=num_draft_tokens,
            takes_seeds=True,
            timeout_s=args.timeout,
        )

    fixed = [contender(fixed_name(length), "fixed", length) for length in fixed_lengths(args)]
    return [contender(CONTROLLER, CONTROLLER), contender(OFF, OFF), *fixed]


def fixed_lengths(args: argparse.Namespace) -> list[int]:
    """Those of the sweep but 0, which is the server without speculation: the others' draft model costs it time."""
    return [length for length in args.sweep or () if length > 0]


def fixed_name(length: int) -> str:
    return f"fixed {length}"


def show(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    machine: dict[str, Any],
    measured: dict[Setting, list[Result]],
) -> None:
    """Print the tables, write the file."""
    print(
        f"workload  {len(prompts)} prompts of {args.prompts.name}, at most {args.max_tokens} tokens each, "
        f"{args.rounds} rounds by turns"
    )
    print(
        f"machine   {machine['processor']}, {machine['num_cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, outrider {machine['outrider']}"
    )
    for name, ready in machine["servers"].items():
        print(f"server    {name}: {ready}")
    tables = []
    for setting, results in measured.items():
        parts = drafts_report.parts_of(results, prompts)
        print(f"\n--- {report.num_streams(setting.concurrency)}, temperature {setting.temperature:g} ---\n")
        print(drafts_report.category_table(parts, CONTROLLER, OFF))
        print("\n" + report.table(results) + "\n\n" + report.ratios(results[0], results[1]) + "\n")
        print(drafts_report.source_table(parts[CONTROLLER]))
        if args.sweep:
            names = [fixed_name(length) if length else OFF for length in args.sweep]
            print("\n" + drafts_report.sweep_table(parts, CONTROLLER, names))
            print("\n" + drafts_report.overall_ratios(parts, CONTROLLER, names, decode_speed))
        table = drafts_report.as_json(parts, CONTROLLER)
        tables.append({"concurrency": setting.concurrency, "temperature": setting.temperature, "contenders": table})
    print("\n" + drafts_report.LEGEND + "\n" + report.LEGEND)
    if args.json:
        workload = {
            name: getattr(args, name)
            for name in ("model", "options", "draft_options", "sweep", "max_tokens", "rounds", "per_category", "limit")
        }
        results = [result for found in measured.values() for result in found]
        everything = report.as_json(workload | {"prompts": args.prompts.name}, machine, [])
        everything |= {"by_category": tables, "results": report.as_json({}, {}, results)["results"]}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


def temperatures(value: str) -> list[float]:
    try:
        found = [float(number) for number in value.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= number <= 2 for number in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 2, such as 0,0.7, not {value!r}")
    return found


def lengths(value: str) -> list[int]:
    found = [natural(number) for number in value.split(",")]
    if max(found) > 64:
        raise argparse.ArgumentTypeError(f"must be lengths from 0 to 64, not {value!r}")
    return sorted(set(found))
