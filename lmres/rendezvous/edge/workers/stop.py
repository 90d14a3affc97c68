"""Stops workers as the policy says, and never waits longer than it says.

1. The family of each worker is listed first: once a parent is dead, its children can not be found through it.
2. SIGTERM to each worker's process group (as torch does) and to members outside of it; SIGCONT to those that are
   stopped, or they could not act on it.
3. All of them have ``grace_s``. The wait ends as soon as the last one is gone.
4. SIGKILL to whatever is left, also to processes that a worker left behind by exiting in good order. They are looked
   for again until none is found, for at most ``KILL_S``.

Nothing is reaped: torch finds each worker ended. What can not be killed (a process in uninterruptible sleep) is named
in the report, and its node is unfit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmres.rendezvous.edge.workers.proctree import Family, Process, read_process, send_signal, wait_gone

KILL_S = 4.5
"""How long killed processes may take to go: a big one needs seconds to give its memory back."""

_POLL_S = 0.02


class Stoppable(Protocol):
    """What is needed of a worker. ``started_ticks`` is its start time as /proc has it."""

    pid: int
    token: str
    started_ticks: int

    def exit_status(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """Pids. ``stopped``: workers that ended by themselves within the grace (or before).
    ``killed``: workers, and others of their trees, that needed SIGKILL. ``unkillable``: what still runs."""

    stopped: tuple[int, ...]
    killed: tuple[int, ...]
    unkillable: tuple[int, ...]


def stop_workers(workers: Sequence[Stoppable], grace_s: float, *, spare: Collection[int] = ()) -> StopReport:
    """Stop all workers at once; returns within ``grace_s`` + 5 s. ``spare``: pids which, with their sessions and
    descendants, are left alone though they may carry the workers' token."""
    family = _family(workers, spare)
    members = family.members()
    _terminate(workers, members)
    _wait(workers, members, time.monotonic() + grace_s)
    stopped = {worker.pid for worker in workers if worker.exit_status() is not None}
    end = time.monotonic() + KILL_S
    killed, left = family.kill(end)
    _wait(workers, [], end)
    unkillable = {process.pid for process in left}
    unkillable.update(worker.pid for worker in workers if worker.exit_status() is None)
    return StopReport(
        stopped=tuple(sorted(stopped)),
        killed=tuple(sorted(killed - stopped - unkillable)),
        unkillable=tuple(sorted(unkillable)),
    )


def _family(workers: Iterable[Stoppable], spare: Iterable[int]) -> Family:
    workers = tuple(workers)
    agent = read_process(os.getpid())
    family = Family({worker.token for worker in workers}, since=agent.started if agent is not None else 0)
    for worker in workers:
        family.add_root(worker.pid, worker.started_ticks)
    for pid in spare:
        family.spare(pid)
    return family


def _terminate(workers: Iterable[Stoppable], members: Iterable[Process]) -> None:
    groups = set()
    for worker in workers:
        leader = read_process(worker.pid)  # a zombie that is not reaped still keeps its group's number
        if leader is not None and leader.started == worker.started_ticks and leader.group == worker.pid:
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGTERM)
                groups.add(worker.pid)
    for process in members:
        if process.group not in groups:
            send_signal(process, signal.SIGTERM)
    for process in members:
        now = read_process(process.pid)
        if now is not None and now.state == "T":
            send_signal(process, signal.SIGCONT)


def _wait(workers: Sequence[Stoppable], members: list[Process], end: float) -> None:
    """Until every worker and member has ended, or ``end``."""
    while True:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return
        members = wait_gone(members, left_s)
        if members or all(worker.exit_status() is not None for worker in workers):
            return
        time.sleep(min(_POLL_S, left_s))  # only for a handle that no process stands behind
