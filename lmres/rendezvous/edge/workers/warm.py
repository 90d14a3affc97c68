"""Warm workers: processes that have imported what the program needs, and become workers at a launch.

A restart of a worker costs seconds, nearly all of them for imports. So for each local rank one process is started
beforehand (``bootstrap.warm_main`` is the other side): the worker's own command, held before its program begins.

1. A launch never waits. If no process is ready and surely the same as a cold one would be, the launch is cold.
2. "Surely the same": same command, same environment but for what may differ (``warm_command``), same surroundings
   (folder, limits, masks, standard streams), nothing changed on disk that was imported, nothing in the program's
   folder that would have been imported instead. The reason of a refusal is logged when it changes.
3. The pool is filled when it is told to (``refill``): when training goes on, since imports compete with a start for
   the cores. On an agent that trains the imports are paced.
4. A process that can not be warmed says which import is to blame; that one is left to the workers, and the rest is
   tried again, a few times.
5. Its processes are this pool's children: they end when their channel closes, when the thread here ends, and by the
   guardian. The kernel ends the workers that came from here with that thread, too, so it runs until ``close``,
   whatever happens to it. Close the pool after the workers are stopped.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import logging
import os
import resource
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from lmres.adapters.bootstrap import ONPATH
from lmres.adapters.bootstrap.warm_main import (
    ALL_NAMES,
    FD_VARIABLE,
    LENGTH,
    MARK_VARIABLE,
    MAX_MESSAGE_BYTES,
    file_stamp,
)
from lmres.rendezvous.edge.workers.process import Gate, Link, WorkerPlace, WorkerProcess, start_tied
from lmres.rendezvous.edge.workers.proctree import TOKEN_VARIABLE, read_process
from lmres.rendezvous.edge.workers.warm_command import Program, Refused, difference, environment_refused, parse

log = logging.getLogger("lmres")

FIRST_GUESS = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo",
               "torch.profiler._cupti_monitor")  # fmt: skip
"""What nearly every program needs; the last two come in with the first optimizer step. Left out where missing."""

MIN_AVAILABLE_BYTES = 2 * 1024**3
PACE = 1.0
"""Seconds of rest for each second of imports on an agent that trains."""

_ONPATH_WARM = str(Path(ONPATH).with_name("onpath_warm"))
_PROCESS_BYTES = 512 * 1024**2
_MAX_NAMES_BYTES = 1024**2
_MAX_EXCLUDED = 12
_TRIES = 3
_HAND_OVER_S = 0.25
_JOIN_S = 5.0
_MAX_FOLDER_ENTRIES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How torch starts, or will start, the worker of a local rank. ``env`` is the worker's, the bootstrap's folder
    first in PYTHONPATH. ``kinds``: of standard output and error."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    kinds: tuple[Any, Any]


@dataclass(eq=False, slots=True, kw_only=True)
class _Spare:
    """One process of the pool."""

    child: subprocess.Popen[bytes]
    channel: socket.socket
    local_rank: int
    launch: Launch
    around: tuple[Any, ...]
    data: bytes = b""
    ready: bool = False
    read: frozenset[str] = frozenset()
    listed: bool = False
    tops: frozenset[str] = frozenset()
    files: tuple[tuple[str, list[int]], ...] = ()
    by: Mapping[str, str] = field(default_factory=dict)


class WarmPool:
    """The warm processes of one agent. All methods may be called from any thread, and none raises or waits."""

    def __init__(
        self,
        *,
        token_length: int,
        on_spawn: Callable[[int], None] = lambda pid: None,
        on_gone: Callable[[int], None] = lambda pid: None,
        min_available_bytes: int = MIN_AVAILABLE_BYTES,
    ) -> None:
        """``token_length``: characters of the workers' token. ``on_spawn`` and ``on_gone`` tell the guardian; a
        process that becomes a worker is not told as gone. Below ``min_available_bytes`` of memory that the host (or
        this control group) has left, nothing is warmed."""
        self._token_length = token_length
        self._on_spawn = on_spawn
        self._on_gone = on_gone
        self._min_available_bytes = min_available_bytes
        self._lock = threading.Lock()
        self._launches: dict[int, Launch] = {}
        self._spares: list[_Spare] = []
        self._modules: tuple[str, ...] = FIRST_GUESS
        self._excluded: dict[str, str] = {}
        self._tries_left = 0
        self._pace = PACE
        self._wanted = False
        self._to_check = False
        self._stopped: str | None = None
        self._closing = False
        self._said: dict[str, str] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="lmres-warm", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every process of the pool. The kernel ends what became a worker, so the workers are stopped before."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread.ident is None:
            self._end_all()
        else:
            self._thread.join(_JOIN_S)

    def expect(self, launches: Mapping[int, Launch]) -> None:
        """What will be launched, by local rank, where nothing was launched yet; real launches replace it."""
        with self._lock:
            for local_rank, launch in launches.items():
                self._launches.setdefault(local_rank, launch)

    def learn(self, modules: Iterable[str]) -> bool:
        """The modules that the running program has imported, in their order. False: they are known already."""
        names = tuple(modules)
        with self._lock:
            if not names or names == self._modules:
                return False
            # A standby may have learned of more from another rank; what this list lacks is not needed.
            self._modules = names
        return True

    @property
    def modules(self) -> tuple[str, ...]:
        """What the next processes import, in this order."""
        return self._modules

    def refill(self, *, paced: bool = True) -> None:
        """Bring the pool to one fresh process for each local rank. To be called when training goes on (or, on a
        standby, at once and not ``paced``)."""
        with self._lock:
            self._wanted = self._to_check = True
            self._pace = PACE if paced else 0.0
            self._tries_left = _TRIES + max(1, len(self._launches))
        self._wake()

    @property
    def ready(self) -> int:
        """Processes that could become workers now."""
        with self._lock:
            return sum(spare.ready for spare in self._spares)

    @property
    def pids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(spare.child.pid for spare in self._spares)

    def memory_bytes(self) -> int:
        """What the processes of the pool take, shared pages divided among their users."""
        return sum(map(_memory_of, self.pids))

    # -- a launch -----------------------------------------------------------------------------------------------------

    def take(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        *,
        place: WorkerPlace,
        token: str,
        gate: Gate,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> WorkerProcess | None:
        """A ready process becomes this worker; None: start it cold. The launch is also the pattern for refills."""
        if not self._thread.is_alive() or self._closing:
            return None
        try:
            streams = (_descriptor(stdout, 1), _descriptor(stderr, 2))
            launch = Launch(args=tuple(args), env=dict(env), kinds=_kinds(streams))
            with self._lock:
                self._launches[place.local_rank] = launch
                self._wanted = False  # what is still importing now would compete with the start
            spare = self._choose(launch, place.local_rank)
            worker = None
            if spare is not None:
                worker = self._hand_over(spare, launch, streams, place=place, token=token, gate=gate)
        except Exception:
            log.exception("the warm pool failed; the worker starts cold")
            return None
        self._wake()
        return worker

    def _choose(self, launch: Launch, local_rank: int) -> _Spare | None:
        """Take the first process that fits out of the pool; the one made for this rank is asked first."""
        around = _surroundings()
        reason = "no process was ready"
        with self._lock:
            for spare in sorted(self._spares, key=lambda spare: spare.local_rank != local_rank):
                if not spare.ready:
                    continue
                unfit = _unfit(spare, launch, around)
                if unfit is None:
                    self._spares.remove(spare)
                    return spare
                reason = unfit
        self._say("launch", f"a worker starts cold: {reason}")
        return None

    def _hand_over(
        self, spare: _Spare, launch: Launch, streams: tuple[int, int], *, place: WorkerPlace, token: str, gate: Gate
    ) -> WorkerProcess | None:
        link = Link()
        try:
            message = {
                "env": {**launch.env, TOKEN_VARIABLE: token},
                "onpath": ONPATH,
                "executable": launch.args[0],
            }
            if not _send(spare.channel, message, (*link.worker_fds, *streams)):
                raise OSError("the process does not take it")
        except OSError as error:
            link.close()
            self._say("launch", f"a worker starts cold: it can not be handed to the warm process: {error}")
            self._end(spare)
            return None
        link.handed_over()
        # The channel is closed by the thread, which has it in its selector.
        return WorkerProcess(spare.child, link, place=place, token=token, gate=gate)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                # The workers that came from here live only as long as this thread.
                log.exception("the warm pool failed; workers start cold from now on")
                self._stopped = "an error of its own"
                self._closing_wait()
        self._end_all()

    def _closing_wait(self) -> None:
        while not self._closing:
            time.sleep(0.1)

    def _turn(self) -> None:
        self._tend()
        for key, _mask in self._selector.select():
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                self._hear(key.data)

    def _tend(self) -> None:
        """Drop what was taken or is of no use any more, and start at most one process."""
        with self._lock:
            spares = list(self._spares)
            launches = dict(self._launches)
            wanted = self._wanted and self._stopped is None
        for key in [key for key in self._selector.get_map().values() if key.data not in (None, *spares)]:
            self._selector.unregister(key.fileobj)
            key.data.channel.close()
        if not wanted:
            for spare in spares:
                if not spare.ready:
                    self._drop(spare)
            return
        if self._to_check:
            self._to_check = False
            for spare in spares:
                reason = self._changed_since(spare) if spare.ready else None
                if reason is not None:
                    log.debug("warm worker %s is replaced: %s", spare.child.pid, reason)
                    self._drop(spare)
        with self._lock:
            missing = sorted(launches.keys() - {spare.local_rank for spare in self._spares})
            busy = sum(not spare.ready for spare in self._spares)
        if not missing:
            self._wanted = busy > 0
        elif busy < max(1, (os.cpu_count() or 1) // 4):
            self._spawn(missing[0], launches[missing[0]])
            if len(missing) > 1:
                self._wake()

    def _spawn(self, local_rank: int, launch: Launch) -> None:
        reason = self._refusal(launch)
        if reason is not None:
            self._say("spawn", f"no warm workers: {reason}")
            self._wanted = False
            return
        self._tries_left -= 1
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            env = {**launch.env, FD_VARIABLE: str(theirs.fileno()), MARK_VARIABLE: "-" * self._token_length}
            env["PYTHONPATH"] = _ONPATH_WARM + launch.env["PYTHONPATH"].removeprefix(ONPATH)
            with _streams_like(launch.kinds) as (stdout, stderr):
                child = start_tied(launch.args, env, stdout=stdout, stderr=stderr, pass_fds=(theirs.fileno(),))
        except OSError as error:
            ours.close()
            self._stop(f"a process can not be started: {error}")
            return
        finally:
            theirs.close()
        spare = _Spare(
            child=child, channel=ours, local_rank=local_rank, launch=launch, around=_surroundings(own_mask=True)
        )
        with self._lock:
            self._spares.append(spare)
            names = [name for name in self._modules if not self._is_excluded(name)]
        self._selector.register(ours, selectors.EVENT_READ, spare)
        self._on_spawn(child.pid)
        with contextlib.suppress(OSError):  # it died: seen when its channel is read
            _send(ours, {"modules": names, "pace": self._pace}, ())

    def _refusal(self, launch: Launch) -> str | None:
        """Why no process is started for this launch."""
        program = parse(launch.args, {sys.executable, os.environ.get("PYTHON_EXEC", sys.executable)})
        if isinstance(program, Refused):
            return program.reason
        if launch.env.get("PYTHONPATH", "").split(os.pathsep)[0] != ONPATH:
            return "nothing is attached inside the workers"
        if None in launch.kinds:
            return "a standard stream of the workers is closed"
        if self._tries_left <= 0:
            return "the processes ended too often"
        if self._is_excluded("torch"):
            return self._excluded["torch"]
        available = available_bytes()
        if available < self._min_available_bytes + _PROCESS_BYTES:
            return (
                f"only {available // 1024**2} MiB of memory are left, {self._min_available_bytes // 1024**2} are kept"
            )
        return environment_refused(launch.env)

    def _is_excluded(self, name: str) -> bool:
        return any(name == out or name.startswith(out + ".") for out in self._excluded)

    def _hear(self, spare: _Spare) -> None:
        try:
            part = spare.channel.recv(256 * 1024)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        spare.data += part
        if not part or len(spare.data) > MAX_MESSAGE_BYTES:
            if spare in self._spares:  # else it is a worker now
                self._drop(spare)
                self._wanted = True
            return
        if len(spare.data) < LENGTH.size or len(spare.data) < LENGTH.size + LENGTH.unpack_from(spare.data)[0]:
            return
        message, spare.data = json.loads(spare.data[LENGTH.size :]), b""
        if message["kind"] == "ready":
            self._is_ready(spare, message)
        else:
            self._drop(spare)
            self._exclude(message["name"], message["reason"])

    def _is_ready(self, spare: _Spare, message: Mapping[str, Any]) -> None:
        if message["pid"] != spare.child.pid:
            self._drop(spare)
            self._stop("the interpreter is started through another process")
            return
        read = frozenset(message["read"])
        unknown = _missing_identity(spare.launch)
        changing = sorted(name for name in read if name in _CHANGES_ALWAYS or name in unknown)
        if message["listed"] and unknown:
            changing.append(ALL_NAMES)
        if changing:
            self._drop(spare)
            blamed = message["by"].get(changing[0]) or None
            self._exclude(blamed, f"import {blamed} looks at {changing[0]}, which is not known beforehand")
            return
        spare.read = read
        spare.listed = bool(message["listed"])
        spare.by = message["by"]
        spare.tops = frozenset(message["tops"])
        spare.files = tuple((path, stamp) for path, *stamp in message["files"])
        reason = self._changed_since(spare)
        if reason is not None:  # another one would fare no better
            self._drop(spare)
            self._wanted = False
            self._say("spawn", f"no warm workers for now: {reason}")
            return
        with self._lock:
            spare.ready = True
        log.debug("warm worker %s is ready, %s modules", spare.child.pid, message["modules"])

    def _changed_since(self, spare: _Spare) -> str | None:
        """Why ``spare`` does not fit what is launched now."""
        with self._lock:
            launch = self._launches[spare.local_rank]
        return _unfit(spare, launch, _surroundings(own_mask=False), idle=False)

    def _exclude(self, name: str | None, reason: str) -> None:
        if name is None or len(self._excluded) >= _MAX_EXCLUDED:
            self._stop(reason)
            return
        self._say(f"exclude {name}", f"{name} is left to the workers to import: {reason}")
        self._excluded[name] = reason
        self._tries_left += 1  # found out something: not a failure
        self._wanted = True

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        self._say("stop", f"no warm workers: {reason}")

    def _drop(self, spare: _Spare) -> None:
        """End one process of the pool."""
        with self._lock:
            if spare not in self._spares:
                return  # taken meanwhile
            self._spares.remove(spare)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(spare.channel)
        spare.channel.close()
        self._end(spare)

    def _end(self, spare: _Spare) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(spare.child.pid, signal.SIGKILL)  # not reaped: the group is still its own
        spare.child.wait()
        self._on_gone(spare.child.pid)

    def _end_all(self) -> None:
        with self._lock:
            spares = list(self._spares)
        for spare in spares:
            self._drop(spare)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.channel.close()
        self._selector.close()
        with self._lock:
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
        os.close(read)
        os.close(write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody to wake
            os.write(self._wake_write, b"w")

    def _say(self, about: str, text: str) -> None:
        """Log once, until it changes."""
        if self._said.get(about) != text:
            self._said[about] = text
            log.info("%s", text)


_CHANGES_ALWAYS = frozenset(
    {"MASTER_PORT", "LMRES_GENERATION", "LMRES_RESUME_STEP", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"}
)
_IDENTITY = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "LMRES_SLOT")


def _missing_identity(launch: Launch) -> Collection[str]:
    """On a node that has not run yet its place is not known."""
    return [name for name in _IDENTITY if name not in launch.env]


def names_of_report(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The module names in a worker's ``{"kind": "modules"}`` report; empty if it is not one."""
    try:
        unpack = zlib.decompressobj()
        text = unpack.decompress(binascii.a2b_base64(message["names"]), _MAX_NAMES_BYTES)
        names = text.decode("utf-8").split(" ")
    except (KeyError, TypeError, ValueError, zlib.error):
        return ()
    return tuple(name for name in names if all(part.isidentifier() for part in name.split(".")))


# -- whether a process fits --------------------------------------------------------------------------------------------


def _unfit(spare: _Spare, launch: Launch, around: tuple[Any, ...], *, idle: bool = True) -> str | None:
    """Why ``spare`` must not become the worker of ``launch``; None: it may. ``idle`` False: not now, but later."""
    if spare.launch.args != launch.args:
        return "the command has changed"
    reason = difference(spare.launch.env, launch.env, spare.read, spare.listed)
    if reason is not None:
        return reason
    if spare.launch.kinds != launch.kinds:
        return "its standard streams are of another kind"
    skip = 0 if idle else 1  # the signal mask is the starting thread's, and will be compared then
    if spare.around[skip:] != around[skip:]:
        return "the agent's own surroundings (folder, limits, masks) have changed"
    process = read_process(spare.child.pid)
    if idle and (process is None or process.state not in "SR"):  # just ready, it may be on its way to the wait
        return f"the warm process is not waiting (state {process.state if process is not None else 'gone'})"
    for path, stamp in spare.files:
        if file_stamp(path) != stamp:
            return f"{path} has changed since it was imported"
    return _shadow(launch, spare.tops)


def _shadow(launch: Launch, tops: Collection[str]) -> str | None:
    program = parse(launch.args, {launch.args[0]})
    if isinstance(program, Refused):
        return program.reason
    entries = launch.env.get("PYTHONPATH", "").split(os.pathsep)[1:]
    folders = {os.path.abspath(entry) for entry in entries if entry}  # noqa: PTH100
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


def _surroundings(own_mask: bool = True) -> tuple[Any, ...]:
    """What a child gets from the agent, or from the thread that starts it, apart from what ``Popen`` is told."""
    mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())) if own_mask else None
    with open("/proc/thread-self/status") as file:
        lines = {line.partition(":")[0]: line.strip() for line in file}
    ignored = frozenset(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    return (
        mask,
        ignored,
        os.getcwd(),  # noqa: PTH109
        tuple(
            lines.get(name)
            for name in (
                "Umask",
                "Uid",
                "Gid",
                "Groups",
                "CapPrm",
                "CapBnd",
                "CapAmb",
                "NoNewPrivs",
                "Seccomp",
                "Cpus_allowed",
                "Mems_allowed",
            )
        ),  # fmt: skip
        tuple(resource.getrlimit(number) for number in _LIMITS),
        (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
        tuple(_read(f"/proc/self/{name}") for name in ("cgroup", "oom_score_adj", "timerslack_ns")),
        _kind(0),
    )


_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# -- streams -----------------------------------------------------------------------------------------------------------


def _descriptor(stream: IO[Any] | int | None, inherited: int) -> int:
    if stream is None:
        return inherited
    return stream if isinstance(stream, int) else stream.fileno()


def _kinds(streams: tuple[int, int]) -> tuple[Any, Any]:
    return _kind(streams[0], inherited=1), _kind(streams[1], inherited=2)


def _kind(descriptor: int, inherited: int | None = None) -> Any:
    """What an interpreter notices of a stream when it starts; an inherited one is also the very same. None: closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    if inherited is None or descriptor == inherited:
        return ("inherited", found.st_mode, found.st_dev, found.st_ino)
    return ("file",) if stat.S_ISREG(found.st_mode) else ("other", found.st_mode, found.st_dev, found.st_ino)


def file_kind() -> Any:
    """The kind of a stream that torch redirects into a file (``--redirects``, ``--tee``)."""
    return ("file",)


def inherited_kinds() -> tuple[Any, Any]:
    """The kinds of the streams that a worker shares with its agent."""
    return _kinds((1, 2))


@contextlib.contextmanager
def _streams_like(kinds: tuple[Any, Any]) -> Any:
    """Descriptors of these kinds for the interpreter to start with; None: inherit."""
    made: list[int | None] = []
    try:
        for kind in kinds:
            if kind == ("file",):
                made.append(os.memfd_create("lmres-warm", os.MFD_CLOEXEC))
            elif kind[0] == "inherited":
                made.append(None)
            else:
                raise OSError(f"a standard stream of an unknown kind: {kind}")
        yield made
    finally:
        for descriptor in made:
            if descriptor is not None:
                os.close(descriptor)


# -- messages and memory -----------------------------------------------------------------------------------------------


def _send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> bool:
    """Whole or not at all (then the process is of no use any more). Waits a moment for a reader that is behind."""
    data = json.dumps(message).encode("ascii")
    rest = memoryview(LENGTH.pack(len(data)) + data)
    end = time.monotonic() + _HAND_OVER_S
    while rest:
        try:
            if descriptors:
                sent = socket.send_fds(channel, [rest], list(descriptors), socket.MSG_NOSIGNAL)
                descriptors = ()
            else:
                sent = channel.send(rest, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            with selectors.PollSelector() as selector:
                selector.register(channel, selectors.EVENT_WRITE)
                selector.select(left_s)
            continue
        rest = rest[sent:]
    return True


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


def _memory_of(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
