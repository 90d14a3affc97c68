"""Which processes belong to a worker, and how to kill exactly those.

A worker leads its own session. What it starts may leave that session (``setsid``), lose its parent (a double fork), or
both; so a process belongs to a family if any of this holds:

1. it was seen as a member before (same pid and same start time);
2. its session or its process group is a root's;
3. its parent belongs;
4. its environment carries the family's marker, ``LMRES_WORKER_TOKEN=...``, which children inherit.

A pid alone never names a process here: it goes with the start time of ``/proc/PID/stat``, checked again after a pidfd
is open and before the signal is sent. A process that cleared its environment, left the session and lost its parent
before it was ever seen is not found.

This file is also loaded on its own by the guardian, which has to stay tiny. So it uses only cheap parts of the
standard library: no dataclasses, no typing, no psutil (its import alone would double the guardian).
"""

from __future__ import annotations

import os
import select
import signal
import time

TOKEN_VARIABLE = "LMRES_WORKER_TOKEN"

_POLL_S = 0.02
_ROUND_S = 0.5


class Process:
    """One line of the process table; ``started`` is in clock ticks since boot."""

    __slots__ = ("group", "parent", "pid", "session", "started", "state", "threads")

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.state = fields[0].decode("ascii")
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.threads = int(fields[17])
        self.started = int(fields[19])

    @property
    def alive(self) -> bool:
        """False for a zombie. One whose main thread ended but whose other threads run is alive."""
        return self.state not in "ZX" or self.threads > 1


def read_process(pid: int) -> Process | None:
    """The process that has this pid now, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
        # The command's name stands in parentheses and may itself hold any character.
        return Process(pid, line[line.rindex(b")") + 2 :].split())
    except (OSError, ValueError, IndexError):
        return None


def scan() -> dict[int, Process]:
    """The process table, zombies included."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 (no pathlib here)
    return {process.pid: process for process in found if process is not None}


def carries(pid: int, marker: bytes) -> bool:
    """Whether the environment which the process was started with holds ``marker`` (``NAME=value``)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def send_signal(process: Process, signum: int) -> bool:
    """Signal exactly this process. False if it is gone (or never was ours to signal)."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        descriptor = -1
    try:
        now = read_process(process.pid)
        if now is None or now.started != process.started:
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, signum)
        else:
            os.kill(process.pid, signum)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def still_alive(process: Process) -> bool:
    """Whether this very process still runs."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started and now.alive


def wait_gone(processes: list[Process], timeout_s: float) -> list[Process]:
    """Wait until all have ended, or for ``timeout_s``; returns those that still run."""
    end = time.monotonic() + timeout_s
    poller = select.poll()
    watched: dict[int, Process] = {}
    unwatched: list[Process] = []
    try:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            except (AttributeError, OSError):  # an old kernel, or no descriptor left: look again and again
                unwatched.append(process)
                continue
            watched[descriptor] = process
            poller.register(descriptor, select.POLLIN)
        return _wait_watched(poller, watched, unwatched, end)
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _wait_watched(
    poller: select.poll, watched: dict[int, Process], unwatched: list[Process], end: float
) -> list[Process]:
    # A pidfd may have been opened on a stranger that got the pid meanwhile.
    waiting = {number: process for number, process in watched.items() if still_alive(process)}
    while True:
        unwatched = [process for process in unwatched if still_alive(process)]
        left_s = end - time.monotonic()
        if not (waiting or unwatched) or left_s <= 0:
            return [*waiting.values(), *unwatched]
        turn_s = min(left_s, _POLL_S) if unwatched else left_s
        for number, _event in poller.poll(max(1, int(turn_s * 1000))):
            poller.unregister(number)
            waiting.pop(number, None)


class Family:
    """The processes of some roots (workers), found anew at each look and remembered."""

    def __init__(self, markers: set[str], since: int) -> None:
        """``markers``: tokens, see rule 4. ``since``: nothing that started earlier can belong (start ticks)."""
        self._markers = [f"{TOKEN_VARIABLE}={token}".encode() for token in sorted(markers) if token]
        self._since = since
        self._roots: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._never = {os.getpid(), 1}
        self._spared: set[int] = set()

    def add_root(self, pid: int, started: int) -> None:
        self._roots[pid] = started

    def remove_root(self, pid: int) -> None:
        self._roots.pop(pid, None)

    def never(self, pid: int) -> None:
        """This process is not a member, whatever it carries (its children may be)."""
        self._never.add(pid)

    def spare(self, pid: int) -> None:
        """This process, its session and its descendants are not members."""
        self._spared.add(pid)

    def members(self) -> list[Process]:
        """Every member that runs now, roots included, in order of pid."""
        table = scan()
        children: dict[int, list[int]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process.pid)
        spared = _with_descendants(
            {p.pid for p in table.values() if p.pid in self._spared or p.session in self._spared}, children
        )
        out = spared | self._never
        first = {p.pid for p in table.values() if p.pid not in out and self._belongs(p, table)}
        found = [table[pid] for pid in sorted(_with_descendants(first, children) - out)]
        members = [process for process in found if process.alive and process.started >= self._since]
        self._seen.update((process.pid, process.started) for process in members)
        return members

    def kill(self, end: float) -> tuple[set[int], list[Process]]:
        """SIGKILL every member until none is left or the monotonic clock reaches ``end``.

        Looks again after each round, since a member may have forked meanwhile. Returns the pids that were killed and
        the processes which did not go.
        """
        killed: set[int] = set()
        while True:
            left = self.members()
            left_s = end - time.monotonic()
            if not left or (left_s <= 0 and killed):
                return killed - {process.pid for process in left}, left
            for process in left:
                send_signal(process, signal.SIGKILL)
                killed.add(process.pid)
            wait_gone(left, max(0.0, min(left_s, _ROUND_S)))

    def _belongs(self, process: Process, table: dict[int, Process]) -> bool:
        if process.started < self._since or not process.alive:
            return False
        if self._seen.get(process.pid) == process.started:
            return True
        if any(self._leads(leader, table) for leader in {process.session, process.group}):
            return True
        return any(carries(process.pid, marker) for marker in self._markers)

    def _leads(self, leader: int, table: dict[int, Process]) -> bool:
        """A root's number names its session even when the root is gone, but not once a stranger has the pid."""
        started = self._roots.get(leader)
        holder = table.get(leader)
        return started is not None and (holder is None or holder.started == started)


def _with_descendants(pids: set[int], children: dict[int, list[int]]) -> set[int]:
    found = set(pids)
    waiting = list(pids)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found
