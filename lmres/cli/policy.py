"""``lmres policy``: shows the effective policy, checks a file, prints the JSON Schema."""

from __future__ import annotations

import argparse
import json

from lmres.cli.command import Command, Output, add_json_option
from lmres.errors import ConfigError
from lmres.policy import policy_digest, policy_schema, policy_to_dict, policy_to_yaml
from lmres.rendezvous.edge.policy_file import load_policy


def _configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the effective policy: the file's fields over the defaults")
    show.add_argument("file", metavar="FILE", nargs="?", help="policy file; without it: the defaults")
    show.set_defaults(action=_show)
    check = actions.add_parser("check", help="check a file: exit 0, or 64 with every problem found")
    check.add_argument("file", metavar="FILE", help="policy file")
    check.set_defaults(action=_check)
    schema = actions.add_parser("schema", help="print the JSON Schema of a policy file")
    schema.set_defaults(action=_schema)
    for action in (show, check, schema):
        add_json_option(action)


def _run(arguments: argparse.Namespace, output: Output) -> int:
    code: int = arguments.action(arguments, output)
    return code


def _show(arguments: argparse.Namespace, output: Output) -> int:
    policy = load_policy(arguments.file)
    output.emit(policy_to_dict(policy), policy_to_yaml(policy))
    return 0


def _check(arguments: argparse.Namespace, output: Output) -> int:
    try:
        digest = policy_digest(load_policy(arguments.file))
    except ConfigError as error:
        if not output.json:
            raise
        output.emit({"file": arguments.file, "valid": False, "error": str(error)}, "")
        return int(error.exit_code)
    output.emit(
        {"file": arguments.file, "valid": True, "digest": digest},
        f"policy {arguments.file}: valid (digest {digest[:12]})",
    )
    return 0


def _schema(arguments: argparse.Namespace, output: Output) -> int:
    schema = policy_schema()
    output.emit(schema, json.dumps(schema, indent=2))
    return 0


COMMAND = Command(
    name="policy", help="show the effective policy, check a file, print the schema", configure=_configure, run=_run
)
