"""Whether a process that was started beforehand is surely what a cold one would be, seen from the agent.

The pure half of the comparison (commands, environments) is in ``warm_command``; here is what has to be looked up: the
surroundings that a child inherits, the kinds of its streams, the files that were imported, the program's folder.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from lmres.adapters.bootstrap.warm_main import file_stamp
from lmres.rendezvous.edge.workers.warm_command import Program, Refused, difference, parse

_MAX_FOLDER_ENTRIES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How torch starts, or will start, the worker of a local rank. ``env`` is the worker's, the bootstrap's folder
    first in PYTHONPATH. ``kinds``: of standard output and error."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    kinds: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a child gets from the agent, or from the thread that starts it, apart from what ``Popen`` is told.
    ``mask``: blocked signals; None: not compared."""

    mask: frozenset[int] | None
    process: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a process of the pool was started."""

    launch: Launch
    around: Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """What a warmed process says of its imports: the variables looked at (and whether all names were), by which import
    first, the names of the top-level modules, and the stamps of their files."""

    read: frozenset[str]
    listed: bool
    by: Mapping[str, str]
    tops: frozenset[str]
    files: tuple[tuple[str, list[int]], ...]

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Imports:
        return cls(
            read=frozenset(message["read"]),
            listed=bool(message["listed"]),
            by=message["by"],
            tops=frozenset(message["tops"]),
            files=tuple((path, stamp) for path, *stamp in message["files"]),
        )


# -- whether a process fits --------------------------------------------------------------------------------------------


def unfit(started: Start, imports: Imports, launch: Launch, now: Surroundings) -> str | None:
    """Why a process that was ``started`` so and has these ``imports`` must not become the worker of ``launch``, which
    is made in the surroundings of ``now``. None: it may."""
    if started.launch.args != launch.args:
        return "the command has changed"
    reason = difference(started.launch.env, launch.env, imports.read, imports.listed)
    if reason is not None:
        return reason
    if started.launch.kinds != launch.kinds:
        return "its standard streams are of another kind"
    if started.around.process != now.process:
        return "the agent's own surroundings (folder, limits, masks) have changed"
    if None not in (started.around.mask, now.mask) and started.around.mask != now.mask:
        return "the agent blocks other signals"
    for path, stamp in imports.files:
        if file_stamp(path) != stamp:
            return f"{path} has changed since it was imported"
    return _shadow(launch, imports.tops)


def _shadow(launch: Launch, tops: Collection[str]) -> str | None:
    program = parse(launch.args, {launch.args[0]})
    if isinstance(program, Refused):
        return program.reason
    entries = launch.env.get("PYTHONPATH", "").split(os.pathsep)[1:]
    folders = {os.path.abspath(entry) for entry in entries}  # noqa: PTH100 (an empty one is the current folder)
    folders |= _program_folders(program)
    for folder in sorted(folders):
        try:
            with os.scandir(folder) as listing:
                for index, entry in enumerate(listing):
                    if index >= _MAX_FOLDER_ENTRIES:
                        return f"{folder} has too many files to look for modules"
                    stem, dot, suffix = entry.name.partition(".")
                    if stem in tops and _imports_as(entry, bool(dot), suffix):
                        return f"{entry.path} has the name of an installed module"
        except OSError:
            if folder != program.script and not Path(folder).exists():
                continue  # nothing can be imported from it
            return f"{folder} can not be looked through"
    return None


def _program_folders(program: Program) -> set[str]:
    """Where ``sys.path[0]`` will be, links followed or not."""
    if program.script is None:
        return {os.getcwd()}  # noqa: PTH109
    script = os.path.abspath(program.script)  # noqa: PTH100
    if os.path.isdir(script) or zipfile.is_zipfile(script):  # noqa: PTH112
        return {script}
    return {os.path.dirname(script), os.path.dirname(os.path.realpath(script))}  # noqa: PTH120


def _imports_as(entry: os.DirEntry[str], dotted: bool, suffix: str) -> bool:
    if dotted:
        return suffix in ("py", "pyc") or suffix.endswith("so")
    try:
        return any(name.startswith("__init__.") for name in os.listdir(entry.path))  # noqa: PTH208
    except OSError:
        return False


def surroundings(*, mask: bool) -> Surroundings:
    """Of the calling thread. ``mask``: its signals are compared too."""
    with open("/proc/thread-self/status") as file:
        status = {line.partition(":")[0]: line.strip() for line in file}
    return Surroundings(
        mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())) if mask else None,
        process=(
            frozenset(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN),
            os.getcwd(),  # noqa: PTH109
            tuple(status.get(name) for name in _STATUS),
            tuple(resource.getrlimit(number) for number in _LIMITS),
            (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
            tuple(_read(f"/proc/self/{name}") for name in ("cgroup", "oom_score_adj", "timerslack_ns")),
            _kind(0),
        ),
    )


_STATUS = ("Umask", "Uid", "Gid", "Groups", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed",
           "Mems_allowed")  # fmt: skip
_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# -- streams -----------------------------------------------------------------------------------------------------------


FILE = ("file",)
"""The kind of a stream that torch puts into a file (``--redirects``, ``--tee``)."""
NULL = ("null",)
"""The kind of a stream that torch drops (``--local-ranks-filter``)."""


def descriptor_of(stream: IO[Any] | int | None, inherited: int) -> int:
    if stream is None:
        return inherited
    return stream if isinstance(stream, int) else stream.fileno()


def kinds_of(streams: tuple[int, int]) -> tuple[Any, Any]:
    return _kind(streams[0], inherited=1), _kind(streams[1], inherited=2)


def _kind(descriptor: int, inherited: int | None = None) -> Any:
    """What an interpreter notices of a stream when it starts; an inherited one is also the very same. None: closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    if inherited is None or descriptor == inherited:
        return ("inherited", found.st_mode, found.st_dev, found.st_ino)
    if stat.S_ISREG(found.st_mode):
        return FILE
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev:  # noqa: PTH116
        return NULL
    return ("other", found.st_mode, found.st_dev, found.st_ino)


def can_be_made(kind: Any) -> bool:
    """Whether ``streams_like`` can give an interpreter such a stream to start with."""
    return kind is not None and kind[0] != "other"


@contextlib.contextmanager
def streams_like(kinds: tuple[Any, Any]) -> Iterator[list[int | None]]:
    """Descriptors of these kinds for the interpreter to start with; None: inherit."""
    made: list[int | None] = []
    try:
        for kind in kinds:
            if kind == FILE:
                made.append(os.memfd_create("lmres-warm", os.MFD_CLOEXEC))
            elif kind == NULL:
                made.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            else:
                made.append(None)
        yield made
    finally:
        for descriptor in made:
            if descriptor is not None:
                os.close(descriptor)


# -- memory -----------------------------------------------------------------------------------------------------------


def available_bytes() -> int:
    """Memory that can still be used, by the host and by this process's control group."""
    available = int(psutil.virtual_memory().available)
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
            limit, used = _read(str(folder / "memory.max")).strip(), _read(str(folder / "memory.current")).strip()
            if limit.isdigit() and used.isdigit():
                stats = dict(entry.split() for entry in _read(str(folder / "memory.stat")).splitlines())
                available = min(available, int(limit) - int(used) + int(stats.get("inactive_file", 0)))
    return available


def memory_of(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
