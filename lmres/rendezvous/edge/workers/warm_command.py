"""Which commands can be warmed, and whether a process that was started for one environment fits another.

Pure. Everything that is not surely the same is refused with a reason, and the worker starts cold.

1. A command: torchrun's own ``PYTHON -u [-m] PROGRAM ...``, with interpreter options that change nothing before the
   program. Not: isolated interpreters (they do not see the bootstrap), ``-c``, ``-i``, numactl and other wrappers.
2. An environment: it may differ only in what a rank, a place in the group or a generation is told, and in none of
   these that an import has looked at. torch 2.13 looks at about 330 variables while it is imported, and its C++ parts
   at more that can not be seen; so no list of important variables is kept, but one of those that may differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LAUNCH_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_ELASTIC_WORKER_IDENTICAL",
        "LMRES_CHECKPOINT",
        "LMRES_GENERATION",
        "LMRES_NODE_ID",
        "LMRES_RESTART_CONTEXT",
        "LMRES_RESUME_STEP",
        "LMRES_RUN_ID",
        "LMRES_SLOT",
        "LMRES_STATE_DIR",
        "LMRES_WATCH",
        "LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP",
    }
)
"""What differs between the workers of one program, or between its generations. torch and numpy read none of them
when they are imported (checked with torch 2.13); other packages do, and it is seen."""

_FLAGS_ALONE = frozenset("bBOqsuPRx")
_WITH_VALUE = frozenset("WX")
_X_OPTIONS = frozenset(
    {"dev", "faulthandler", "frozen_modules", "int_max_str_digits", "no_debug_ranges", "pycache_prefix", "utf8",
     "warn_default_encoding"}
)  # fmt: skip
_VARIABLES_REFUSED = (
    "PYTHONINSPECT",
    "PYTHONVERBOSE",
    "PYTHONDEBUG",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONPERFSUPPORT",
    "PYTHONDUMPREFS",
    "PYTHONMALLOCSTATS",
)
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a command runs: one of ``module`` and ``script``."""

    module: str | None = None
    script: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str


def parse(args: Sequence[str], pythons: Collection[str]) -> Program | Refused:
    """``pythons``: the interpreters that torchrun itself puts in front of a program."""
    if not args or args[0] not in pythons or not _PYTHON.fullmatch(args[0].rpartition("/")[2]):
        return Refused(reason=f"{args[0] if args else 'nothing'!r} is not the interpreter that torchrun uses")
    options, rest = _options(args[1:])
    if isinstance(options, Refused):
        return options
    if "u" not in options:
        return Refused(reason="the interpreter buffers its output: only -u is warmed, as torchrun has it")
    if not rest:
        return Refused(reason="the command names no program")
    if rest[0] == "-m":
        return Program(module=rest[1]) if len(rest) > 1 else Refused(reason="-m names no module")
    return Program(script=rest[0])


def _options(args: Sequence[str]) -> tuple[set[str] | Refused, Sequence[str]]:
    """The interpreter's flags, and what follows: ``-m MODULE ...`` or ``SCRIPT ...``."""
    flags: set[str] = set()
    place = 0
    while place < len(args):
        word = args[place]
        if word == "-m" or (not word.startswith("-") and word):
            return flags, args[place:]
        if word in ("", "-", "--") or word.startswith("--"):
            return Refused(reason=f"the interpreter's option {word!r} is not known here"), ()
        place += 1
        for index, letter in enumerate(word[1:], 1):
            if letter in _FLAGS_ALONE:
                flags.add(letter)
                continue
            if letter not in _WITH_VALUE:
                return Refused(reason=f"the interpreter's option -{letter} is not warmed"), ()
            value = word[index + 1 :]
            if not value:
                if place == len(args):
                    return Refused(reason=f"the interpreter's option -{letter} has no value"), ()
                value = args[place]
                place += 1
            if letter == "X" and value.partition("=")[0] not in _X_OPTIONS:
                return Refused(reason=f"the interpreter's option -X {value} is not warmed"), ()
            break
    return flags, ()


def environment_refused(env: Mapping[str, str]) -> str | None:
    """Why no process is warmed with this environment; None: it can be."""
    for name in _VARIABLES_REFUSED:
        if env.get(name):
            return f"{name} is set"
    return None


def difference(
    started: Mapping[str, str], wanted: Mapping[str, str], read: Collection[str], listed: bool
) -> str | None:
    """Why a process that was ``started`` with one environment must not be used for the ``wanted`` one.

    ``read``: the variables which its imports looked at; ``listed``: an import went through all their names.
    None: nothing that was imported can tell the two apart.
    """
    for name in sorted(started.keys() | wanted.keys()):
        if started.get(name) == wanted.get(name):
            continue
        if name not in LAUNCH_VARIABLES:
            return f"{name} differs from what the warm process was started with"
        if name in read:
            return f"{name} differs, and an import has looked at it"
        if listed and (name in started) != (name in wanted):
            return f"{name} is new or gone, and an import has looked at all names"
    return None
