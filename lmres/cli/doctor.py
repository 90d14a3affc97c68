"""``lmres doctor``: checks this host and the installed plugin before a run depends on them.

Each check answers for itself: one that breaks is a failed check, never the end of the others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from lmres.cli import checks_health, checks_host, checks_launch
from lmres.cli.command import Command, Output
from lmres.cli.finding import Finding

Check = tuple[str, Callable[[], Finding]]


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """Runs each check; an exception of one becomes its finding."""
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Exception as error:
            findings.append(_broken(name, error))
    return findings


def _broken(name: str, error: Exception) -> Finding:
    return Finding(
        check=name,
        status="fail",
        found=f"the check itself failed: {type(error).__name__}: {error}",
        advice="report this with the output of: lmres version",
    )


def render(findings: Sequence[Finding]) -> str:
    """The findings for people: a line each, and an indented one of what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        found = finding.found.replace("\n", "\n" + " " * (width + 7))
        lines.append(f"{finding.status:<4}  {finding.check:<{width}} {found}")
        if finding.advice:
            lines.append(f"{'':<{width + 6}} -> {finding.advice}")
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    lines.append(f"{len(findings)} checks, {failed} failed, {warned} with a warning")
    return "\n".join(lines)


def _health(policy_file: str | None) -> list[Finding]:
    """The checks of the host's health; one finding if they break as a whole."""
    try:
        return checks_health.check_health(policy_file)
    except Exception as error:
        return [_broken("health", error)]


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        default=os.environ.get("PET_RDZV_ENDPOINT"),
        help="as given to torchrun",
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        # argparse converts a default that is text, and reports a bad one as it does a bad argument.
        default=os.environ.get("PET_MAX_RESTARTS"),
        help="as given to torchrun",
    )
    parser.add_argument("--policy", metavar="FILE", help="policy file to check")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    checks: list[Check] = [
        ("torch", checks_launch.check_torch),
        ("plugin", checks_launch.check_plugin),
        ("torchrun", checks_launch.check_torchrun),
        ("max_restarts", lambda: checks_launch.check_max_restarts(arguments.max_restarts)),
        ("policy", lambda: checks_launch.check_policy(arguments.policy)),
        ("endpoint", lambda: checks_host.check_endpoint(arguments.rdzv_endpoint)),
        ("host_name", checks_host.check_host_name),
        ("memory", checks_host.check_memory),
        ("open_files", checks_host.check_open_files),
        ("process_control", checks_host.check_process_control),
    ]
    findings = [*run_checks(checks), *_health(arguments.policy)]
    failed = any(finding.status == "fail" for finding in findings)
    output.emit({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, render(findings))
    return 1 if failed else 0


COMMAND = Command(
    name="doctor",
    help="check this host and the installed plugin; exit 1 when a check failed",
    configure=_configure,
    run=_run,
)
