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

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lmres.adapters.bootstrap import ONPATH
from lmres.adapters.bootstrap.modules import MAX_NAMES, unpack
from lmres.adapters.bootstrap.warm_main import ALL_NAMES, FD_VARIABLE, LENGTH, MARK_VARIABLE, MAX_MESSAGE_BYTES
from lmres.rendezvous.edge.workers.process import Gate, Link, WorkerPlace, WorkerProcess, start_tied
from lmres.rendezvous.edge.workers.proctree import TOKEN_VARIABLE, read_process
from lmres.rendezvous.edge.workers.warm_command import Refused, environment_refused, parse
from lmres.rendezvous.edge.workers.warm_fit import (
    Imports,
    Launch,
    Start,
    available_bytes,
    can_be_made,
    descriptor_of,
    kinds_of,
    memory_of,
    streams_like,
    surroundings,
    unfit,
)

log = logging.getLogger("lmres")

FIRST_GUESS = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo",
               "torch.profiler._cupti_monitor")  # fmt: skip
"""What nearly every program needs; the last two come in with the first optimizer step. Left out where missing."""

MIN_AVAILABLE_BYTES = 2 * 1024**3
PACE = 1.0
"""Seconds of rest for each second of imports on an agent that trains."""

_ONPATH_WARM = str(Path(ONPATH).with_name("onpath_warm"))
_PROCESS_BYTES = 512 * 1024**2
_MAX_EXCLUDED = 12
_TRIES = 3
_HAND_OVER_S = 0.25
_JOIN_S = 5.0


@dataclass(eq=False, slots=True, kw_only=True)
class _Spare:
    """One process of the pool."""

    child: subprocess.Popen[bytes]
    channel: socket.socket
    local_rank: int
    start: Start
    names: list[str]
    data: bytes = b""
    imports: Imports | None = None

    @property
    def ready(self) -> bool:
        return self.imports is not None


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
        self._handed_over: deque[_Spare] = deque()
        self._modules: tuple[str, ...] = FIRST_GUESS
        self._learned = False
        self._from_elsewhere = self._gave_up = False
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

    def learn(self, modules: Iterable[str], *, from_elsewhere: bool = False) -> bool:
        """The modules that a worker of the running program has imported, in their order. True: some are new, and the
        next ``refill`` replaces the processes that lack them. ``from_elsewhere``: on another node; if too many of them
        can not be imported before this node knows its place in the group, the first guess is good enough."""
        names = tuple(modules)
        with self._lock:
            if from_elsewhere and self._gave_up:
                return False
            self._from_elsewhere = from_elsewhere
            known = self._modules if self._learned else ()
            new = tuple(name for name in names if name not in set(known))[: MAX_NAMES - len(known)]
            if not new:
                return False
            self._learned = True
            self._modules = known + new
        return True

    @property
    def modules(self) -> tuple[str, ...]:
        """What the next processes import, in this order."""
        return self._modules

    @property
    def learned(self) -> tuple[str, ...]:
        """What was learned, in this order; empty as long as it is a guess."""
        with self._lock:
            return self._modules if self._learned else ()

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
        return sum(map(memory_of, self.pids))

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
            streams = (descriptor_of(stdout, 1), descriptor_of(stderr, 2))
            launch = Launch(args=tuple(args), env=dict(env), kinds=kinds_of(streams))
            with self._lock:
                self._launches[place.local_rank] = launch
                self._wanted = False  # what is still importing now would compete with the start
            spare = self._choose(launch, place)
            worker = None
            if spare is not None:
                worker = self._hand_over(spare, launch, streams, place=place, token=token, gate=gate)
        except Exception:
            log.exception("the warm pool failed; the worker starts cold")
            return None
        self._wake()
        return worker

    def _choose(self, launch: Launch, place: WorkerPlace) -> _Spare | None:
        """Take the first process that fits out of the pool; the one made for this rank is asked first."""
        now = surroundings(mask=True)
        reason = "no process was ready"
        with self._lock:
            for spare in sorted(self._spares, key=lambda spare: spare.local_rank != place.local_rank):
                if spare.imports is None:
                    continue
                found = unfit(spare.start, spare.imports, launch, now) or _not_waiting(spare)
                if found is None:
                    self._spares.remove(spare)
                    return spare
                reason = found
        if place.generation > 1:  # the first workers of a run can only start cold
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
            self._handed_over.append(spare)
            self._end(spare)
            return None
        link.handed_over()
        self._handed_over.append(spare)  # the thread has its channel in the selector, and closes it
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
        while self._handed_over:
            self._forget(self._handed_over.popleft())
        if not wanted:
            for spare in spares:
                if not spare.ready:
                    self._drop(spare)
            return
        if self._to_check:
            self._to_check = False
            for spare in spares:
                reason = self._changed_since(spare, spare.imports) if spare.imports is not None else None
                if spare.names != self._names():
                    reason = "the program imports more"
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
            with streams_like(launch.kinds) as (stdout, stderr):
                child = start_tied(launch.args, env, stdout=stdout, stderr=stderr, pass_fds=(theirs.fileno(),))
        except OSError as error:
            ours.close()
            self._stop(f"a process can not be started: {error}")
            return
        finally:
            theirs.close()
        start = Start(launch=launch, around=surroundings(mask=True))
        names = self._names()
        spare = _Spare(child=child, channel=ours, local_rank=local_rank, start=start, names=names)
        with self._lock:
            self._spares.append(spare)
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
        if not all(map(can_be_made, launch.kinds)):
            return "a standard stream of the workers is closed or of an unknown kind"
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

    def _names(self) -> list[str]:
        return [name for name in self.modules if not self._is_excluded(name)]

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
            if spare in self._spares:
                self._drop(spare)
                self._wanted = True
            else:  # it is a worker now, or on the way
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(spare.channel)
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
        imports = Imports.from_message(message)
        unknown = [name for name in _IDENTITY if name not in spare.start.launch.env]  # this node has not run yet
        changing = sorted(name for name in imports.read if name in _CHANGES_ALWAYS or name in unknown)
        if imports.listed and unknown:
            changing.append(ALL_NAMES)
        if changing:
            self._drop(spare)
            blamed = imports.by.get(changing[0]) or None
            self._exclude(blamed, f"import {blamed} looks at {changing[0]}, which is not known beforehand")
            return
        reason = self._changed_since(spare, imports)
        if reason is not None:  # another one would fare no better
            self._drop(spare)
            self._wanted = False
            self._say("spawn", f"no warm workers for now: {reason}")
            return
        with self._lock:
            spare.imports = imports
        log.debug("warm worker %s is ready, %s modules", spare.child.pid, message["modules"])

    def _changed_since(self, spare: _Spare, imports: Imports) -> str | None:
        """Why ``spare`` does not fit what is launched now."""
        with self._lock:
            launch = self._launches[spare.local_rank]
        return unfit(spare.start, imports, launch, surroundings(mask=False))

    def _exclude(self, name: str | None, reason: str) -> None:
        if name is None or len(self._excluded) >= _MAX_EXCLUDED:
            if self._from_elsewhere and not self._gave_up:
                self._forget_the_rest(reason)
            else:
                self._stop(reason)
            return
        self._say(f"exclude {name}", f"{name} is left to the workers to import: {reason}")
        self._excluded[name] = reason
        self._tries_left += 1  # found out something: not a failure
        self._wanted = True

    def _forget_the_rest(self, reason: str) -> None:
        with self._lock:
            self._modules, self._learned, self._gave_up = FIRST_GUESS, False, True
        self._say("stop", f"what others have imported is not imported here beforehand: {reason}")
        self._tries_left = _TRIES
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
        self._forget(spare)
        self._end(spare)

    def _forget(self, spare: _Spare) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(spare.channel)
        spare.channel.close()

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
        while self._handed_over:
            self._forget(self._handed_over.popleft())
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


def _not_waiting(spare: _Spare) -> str | None:
    process = read_process(spare.child.pid)
    if process is not None and process.state in "SR":  # just ready, it may still be on its way to the wait
        return None
    return f"the warm process is not waiting (state {process.state if process is not None else 'gone'})"


def names_of_report(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The module names in a worker's ``{"kind": "modules"}`` report; empty if it is not one."""
    return unpack(message.get("names"))


# -- messages -----------------------------------------------------------------------------------------------


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
