"""The ``lmres`` command: finds the subcommand, runs it, turns errors into exit codes.

Exit codes: 0, 64 (usage or configuration), 69 (no such run), and what a subcommand's help says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from lmres.cli import bench, doctor, hold, incidents, policy, status, stop, version
from lmres.cli.command import Command, Output, Parser, UsageError, add_json_option
from lmres.cli.text import clean_lines
from lmres.errors import LmresError

# To add a subcommand: write a module with a COMMAND and list it here.
COMMANDS: Final[tuple[Command, ...]] = (
    status.COMMAND,
    incidents.COMMAND,
    hold.DRAIN,
    hold.READMIT,
    stop.COMMAND,
    doctor.COMMAND,
    bench.COMMAND,
    policy.COMMAND,
    version.COMMAND,
)


def build_parser(commands: Sequence[Command] = COMMANDS) -> Parser:
    """The parser of all subcommands; the chosen one is ``namespace.command``."""
    parser = Parser(prog="lmres", description="Closed-loop recovery for torchrun.")
    add_json_option(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        child = subparsers.add_parser(command.name, help=command.help, description=command.help)
        add_json_option(child)
        command.configure(child)
        child.set_defaults(command=command)
    return parser


def _report(program: str, error: LmresError, output: Output) -> None:
    """An error as the one JSON value, or for people; it may quote what others wrote, so it is cleaned."""
    if output.json:
        output.emit({"error": str(error), "exit_code": int(error.exit_code)}, "")
    else:
        print(f"{program}: {clean_lines(error)}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (usage errors leave through SystemExit with 64)."""
    output = Output(json="--json" in (sys.argv[1:] if argv is None else argv))
    try:
        arguments = build_parser().parse_args(argv)
    except UsageError as error:
        if not output.json:
            print(error.usage, end="", file=sys.stderr)
        _report(error.program, error, output)
        raise SystemExit(int(error.exit_code)) from None
    command: Command = arguments.command
    output = Output(json=getattr(arguments, "json", False))
    try:
        return command.run(arguments, output)
    except LmresError as error:
        _report(f"lmres {command.name}", error, output)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
