"""Settings as command-line options. A default exists once, in the settings' dataclass; here it is only read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from outrider.server.cli.main import WrongUsage

Settings = TypeVar("Settings")


def defaults(settings: type) -> dict[str, Any]:
    """The default of every field of a settings dataclass that has a plain one."""
    return {field.name: field.default for field in fields(settings) if field.default is not MISSING}


def add_options(
    group: argparse._ArgumentGroup,
    settings: type,
    help_texts: Mapping[str, str],
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Make an option of each field that ``help_texts`` names, in that order; its type is its default's."""
    for name, text in help_texts.items():
        option = "--" + name.replace("_", "-")
        default = defaults(settings)[name]
        if default is False:
            group.add_argument(option, action="store_true", help=text)
        elif default is True:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)
        elif choices and name in choices:
            group.add_argument(option, choices=choices[name], default=default, help=text)
        else:
            metavar = {int: "N", float: "SECONDS"}.get(type(default), name.split("_")[-1].upper())
            group.add_argument(option, type=type(default), default=default, metavar=metavar, help=text)


def make_settings(settings: type[Settings], args: argparse.Namespace, **others: object) -> Settings:
    """The settings that the command line asks for, by option or by default; ``others`` are given here.

    Raises:
        WrongUsage: the settings refuse a value.
    """
    values = {field.name: getattr(args, field.name) for field in fields(settings) if hasattr(args, field.name)}  # type: ignore[arg-type]
    try:
        return settings(**values | others)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")  # the message begins with the field
        option = "--" + name.replace("_", "-") if name in values else name
        raise WrongUsage(f"{option} {problem}") from error
