"""What is read from, and told to, torch's own agent: all knowledge of its insides but for ``workers.patch``.

torch calls the handler from ``SimpleElasticAgent`` without passing itself, so the agent is found as the caller. Where
it can not be found the run goes on with less: the restart budget is then unknown.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerState
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID, ElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.utils.store import _NUM_MEMBERS

from lmres.rendezvous.plan import Cause

HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torch's default for ``--signals-to-handle``."""


def calling_agent(depth: int = 12) -> Any | None:
    """The ElasticAgent on whose behalf we are called, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, ElasticAgent):
            return candidate
        frame = frame.f_back
    return None


def restarts_left(agent: Any | None) -> int | None:
    """What is left of ``--max-restarts`` on this agent; None when unknown."""
    left = getattr(agent, "_remaining_restarts", None)
    return left if isinstance(left, int) else None


def group_state(agent: Any | None) -> str:
    """``succeeded``, ``failed`` or ``other``: what torch itself thinks of the local worker group."""
    state = getattr(getattr(agent, "_worker_group", None), "state", None)
    if state == WorkerState.SUCCEEDED:
        return "succeeded"
    return "failed" if state in (WorkerState.FAILED, WorkerState.UNHEALTHY) else "other"


def passed_barrier_store(world_size: int) -> dist.Store:
    """A store for torch's exit barrier that lets this agent pass at once.

    By the time torch sees its workers succeed the end of the run is committed, so there is nobody to wait for.
    """
    store = dist.HashStore()
    store.add(_TERMINAL_STATE_SYNC_ID + _NUM_MEMBERS, world_size - 1)
    return store


def child_failed(name: str, cause: Cause, folder: Path) -> ChildFailedError:
    """torch's own error, with the first cause of the whole run as its root cause."""
    error_file = folder / "first_cause.json"
    with contextlib.suppress(OSError):  # a full disk: the error then has no traceback, but is the same error
        _write_error_file(error_file, cause)
    failure = ProcessFailure(
        local_rank=cause.local_rank if cause.local_rank is not None else 0,
        pid=cause.pid if cause.pid is not None else 0,
        exitcode=cause.exit_status if cause.exit_status is not None else 1,
        error_file=str(error_file),
    )
    return ChildFailedError(name=name, failures={cause.rank if cause.rank is not None else 0: failure})


def _write_error_file(path: Path, cause: Cause) -> None:
    lines = [f"first cause: {cause.headline()}"]
    if cause.exception is not None:
        lines += list(cause.exception.last_lines)
    extra = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
    body = {"message": {"message": lines[0], "extraInfo": extra}}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(body, file)


def install_signal_handlers(on_signal: Callable[[str], None]) -> None:
    """Tells ``on_signal`` of a termination signal before torch acts on it. Only in the main thread.

    torch installs its handlers when it starts workers and overwrites ours, so this is called again after that. Before
    the first workers there is no handler of torch's; then ours raises what torch's would.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", HANDLED_SIGNALS).split(","):
        number = getattr(signal, name.strip(), None)
        if number is None:
            continue
        current = signal.getsignal(number)
        if current is signal.SIG_IGN or getattr(current, "lmres", False):
            continue
        signal.signal(number, _wrapped(on_signal, current))


def ignore_signals() -> None:
    """For the last moments of a process that is ending anyway."""
    if threading.current_thread() is threading.main_thread():
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", HANDLED_SIGNALS).split(","):
            number = getattr(signal, name.strip(), None)
            if number is not None:
                signal.signal(number, signal.SIG_IGN)


def _wrapped(on_signal: Callable[[str], None], previous: Any) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        on_signal(signal.Signals(number).name)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
            return
        raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number))

    handle.lmres = True  # type: ignore[attr-defined]
    return handle
