"""``lmres version``: the versions that matter in a report of a problem."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from lmres.cli.command import Command, Output
from lmres.policy import SCHEMA_VERSION


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _configure(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def _run(arguments: argparse.Namespace, output: Output) -> int:
    versions = {
        "lmres": _version("lmres"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "policy_schema_version": SCHEMA_VERSION,
    }
    shown = "\n".join(f"{name} {value or 'not installed'}" for name, value in versions.items())
    output.emit(versions, shown)
    return 0


COMMAND = Command(name="version", help="print versions", configure=_configure, run=_run)
