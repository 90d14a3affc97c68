"""The shape of a subcommand, and how it prints.

A subcommand is a module with one ``COMMAND``; ``main`` lists them. Each prints for people, or with ``--json``
exactly one JSON value on standard output, through ``Output.emit``. Errors are raised as ``LmresError`` and
turned into a message and an exit code in one place, ``main``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lmres.errors import ConfigError


class UsageError(ConfigError):
    """The command line can not be understood. ``program`` and ``usage`` are for the message to people."""

    def __init__(self, message: str, *, program: str, usage: str) -> None:
        super().__init__(message)
        self.program = program
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """argparse exits with 2 on a usage error; here it is a UsageError, and no option may be abbreviated."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        argparse.ArgumentParser.__init__(self, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, program=self.prog, usage=self.format_usage())


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command's result goes."""

    json: bool

    def emit(self, value: object, text: str) -> None:
        """Prints the result: ``value`` as JSON or ``text`` for people. Called once in a command."""
        if self.json:
            text = json.dumps(value, indent=2, allow_nan=False)
        # A terminal that can not show a character must not turn a report into a traceback.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.rstrip("\n").encode(encoding, "backslashreplace").decode(encoding), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand. ``run`` returns the exit code, or raises LmresError."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json`` is valid before and after the subcommand: absent in one place it must not undo the other."""
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON value instead of text"
    )
