"""Checks of the launch: is torchrun going to use this plugin, with options that can recover?

torch registers plugins when its rendezvous package is imported, and only logs a warning when one raises. So
the check asks torch's own registry, in this Python, and only then looks for the reason.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

from lmres.cli.finding import BACKEND, Finding
from lmres.errors import ConfigError
from lmres.policy import policy_digest
from lmres.rendezvous.edge.policy_file import load_policy

MIN_TORCH = (2, 10)
_GROUP = "torchrun.handlers"
_INSTALL = f"install lmres into this Python: {sys.executable} -m pip install lmres"


def check_torch() -> Finding:
    wanted = ".".join(map(str, MIN_TORCH))
    upgrade = f"install torch {wanted} or newer into {sys.executable}"
    try:
        import torch
    except Exception as error:  # a broken torch raises anything, from OSError to RuntimeError
        return Finding(check="torch", status="fail", found=f"torch can not be imported: {error}", advice=upgrade)
    version = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MIN_TORCH:
        return Finding(check="torch", status="fail", found=f"torch {version}, not {wanted} or newer", advice=upgrade)
    return Finding(check="torch", status="ok", found=f"torch {version} in {sys.executable}")


def check_plugin() -> Finding:
    """Whether torch's registry creates our handler for the backend's name."""
    try:
        # Importing the package is what makes torch register plugins; its registry is the object torchrun asks.
        from torch.distributed.elastic.rendezvous import registry
    except Exception as error:
        return Finding(
            check="plugin",
            status="fail",
            found=f"torch's rendezvous package can not be imported: {error}",
            advice="install a torch with distributed support",
        )
    creator = getattr(registry.handler_registry, "_registry", {}).get(BACKEND)
    if creator is None:
        found, advice = _why_not_registered()
        return Finding(check="plugin", status="fail", found=found, advice=advice)
    module = str(getattr(creator, "__module__", type(creator).__module__))
    if module.partition(".")[0] != "lmres":
        return Finding(
            check="plugin",
            status="fail",
            found=f"the backend {BACKEND} is registered by {module}, not by lmres",
            advice=f"uninstall the package that provides {module}",
        )
    return Finding(check="plugin", status="ok", found=f"torch's registry creates {BACKEND} from {module}")


def _why_not_registered() -> tuple[str, str]:
    """What was found and what to do, where torch's registry does not know the backend."""
    entries = [entry for entry in entry_points(group=_GROUP) if entry.name == BACKEND]
    if not entries:
        return f"no installed package has the entry point {_GROUP}: {BACKEND}", _INSTALL
    try:
        entries[0].load()()
    except Exception as error:
        return (
            f"the plugin {entries[0].value} can not be loaded: {type(error).__name__}: {error}",
            "repair what the message names, or reinstall lmres; torchrun itself only logs a warning",
        )
    return "the plugin loads, but torch did not register it", _INSTALL


def check_torchrun() -> Finding:
    """Whether the torchrun that a shell finds runs in this Python, where the plugin is."""
    instead = f"activate this environment, or launch with: {sys.executable} -m torch.distributed.run"
    script = shutil.which("torchrun")
    if script is None:
        return Finding(check="torchrun", status="warn", found="no torchrun on PATH", advice=instead)
    interpreter = script_interpreter(Path(script))
    if interpreter is None:
        return Finding(
            check="torchrun", status="warn", found=f"{script} does not say which Python runs it", advice=instead
        )
    # The folders are compared unresolved: the Pythons of two environments are links to the same file.
    if interpreter.parent != Path(sys.executable).parent:
        return Finding(
            check="torchrun",
            status="fail",
            found=f"{script} runs {interpreter}, and this is {sys.executable}",
            advice=instead,
        )
    return Finding(check="torchrun", status="ok", found=f"{script} runs {interpreter}")


def script_interpreter(script: Path) -> Path | None:
    """The interpreter in the first lines of a script; None where they do not say."""
    try:
        with script.open("rb") as file:
            head = file.read(1024).decode(errors="replace")
    except OSError:
        return None
    # For paths too long for a first line, pip writes a shell script that is also Python: '''exec' "PATH" "$0" "$@"
    wrapped = re.match(r"#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \"\$0\"", head)
    if wrapped:
        return Path(wrapped[1])
    direct = re.match(r"#!\s*(\S+)(?:[ \t]+(\S+))?", head)
    if direct is None:
        return None
    program = Path(direct[1])
    if program.name == "env" and direct[2]:
        found = shutil.which(direct[2])
        return Path(found) if found else None
    return program if "python" in program.name else None


def check_max_restarts(max_restarts: int | None) -> Finding:
    """torchrun spends a restart when a worker's exit code is seen before the committed plan."""
    advice = "give --max-restarts, 3 or more; the run's own limits are in the policy (recovery)"
    if max_restarts is None:
        return Finding(
            check="max_restarts",
            status="skip",
            found="--max-restarts not given; torchrun's default is 0",
            advice=advice,
        )
    if max_restarts <= 0:
        return Finding(
            check="max_restarts",
            status="warn",
            found=f"--max-restarts {max_restarts}: a crash of a worker costs the node its agent",
            advice=advice,
        )
    return Finding(check="max_restarts", status="ok", found=f"--max-restarts {max_restarts}")


def check_policy(file: str | None) -> Finding:
    if file is None:
        return Finding(check="policy", status="skip", found="no policy given; --policy FILE checks one")
    try:
        policy = load_policy(file)
    except ConfigError as error:
        return Finding(check="policy", status="fail", found=str(error), advice="correct the file")
    return Finding(check="policy", status="ok", found=f"{file} is valid (digest {policy_digest(policy)[:12]})")
