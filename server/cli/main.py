"""The command ``outrider``: finds the subcommand, and imports nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# Each is a module of this package, its words joined by "_", with `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = {
    "serve": "serve a model over WebSocket",
    "chat": "talk to a server in the terminal",
    "bench": "measure a server, or two side by side",
    "bench drafts": "measure what speculation gains, by category",
    "bench kernels": "measure the kernels beside what memory and processor can do",
    "bench quality": "measure what quantisation costs beside float32",
    "distill": "make a draft for a model, so that it streams faster",
    "models": "list and fetch models",
    "doctor": "say what this machine has and what is missing",
}

DESCRIPTION = """\
Streams a language model's answer over a WebSocket. Small guesses of the next tokens are checked by the
model in one pass, so the answer comes sooner and every token is exactly the model's own.
"""

EPILOG = """\
examples:
  outrider serve                          the default model on 127.0.0.1:8800
  outrider chat                           talk to it
  outrider COMMAND --help                 the manual of a command

exit codes:
  0  done        1  failed; the last line on stderr says why
  2  wrong usage of the command line        130  interrupted
"""


class CommandFailed(Exception):
    """A command cannot do what it was asked; the message is for the person who asked."""

    exit_code = 1


class WrongUsage(CommandFailed):
    """The command line asks for what makes no sense."""

    exit_code = 2


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and shows defaults that say something."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32} | settings)
        self._action_max_length = 17  # argparse forgets by how much names of commands are indented

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        silent = default is None or default is False or default == [] or default == argparse.SUPPRESS
        if action.help is None or silent or "%(default)" in action.help:
            return action.help
        return action.help + " (default: %(default)s)"


class ShowVersion(argparse.Action):
    """Like argparse's own, but looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"outrider {version('outrider')}")
        parser.exit()


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments: only the subcommand they name is imported."""
    parser = argparse.ArgumentParser("outrider", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and leave")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=HelpFormatter)
        if name == chosen:
            module = import_module(f"outrider.server.cli.{name.replace(' ', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    if (two_words := " ".join(arguments[:2])) in COMMANDS:
        arguments = [two_words, *arguments[2:]]
    args = build_parser(arguments).parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except CommandFailed as failure:
        print(f"outrider {args.command}: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `outrider models list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
