"""Runs the site's own health command: a shell line whose exit code says whether the host is fit.

It gets a session of its own, no input, and one pipe for both outputs, of which the first line counts. It is ended with
all its descendants when it takes too long, or when the agent ends; what has left its tree by then is known by a mark
in its environment. Whatever goes wrong with it says nothing about the host.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import psutil

from lmres.scout.health import CommandEnd

KEPT_BYTES = 4096
LEFT_OVER_S = 0.2
"""Output that is still in the pipe when the command ends is read for so long: a child of its may keep the pipe open."""
CLOSE_S = 3.0
MARK = "LMRES_HEALTH_COMMAND"
_POLL_S = 0.05
_NOT_FOUND = (126, 127)


class SiteCommand:
    """``run`` is for one thread, ``close`` for any. ``on_spawn`` and ``on_gone`` get the process id."""

    def __init__(
        self,
        command: str,
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        on_spawn: Callable[[int], None] = lambda pid: None,
        on_gone: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._env = env
        self._mark = uuid.uuid4().hex
        self._on_spawn = on_spawn
        self._on_gone = on_gone
        self._stopped = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._has_run = False

    def run(self) -> CommandEnd:
        """Blocks for ``timeout_s`` and a little at most."""
        with self._lock:
            if self._stopped.is_set():
                return CommandEnd(problem="the agent ends")
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(self._env or {}), MARK: self._mark},
                    start_new_session=True,
                )
            except OSError as error:
                return CommandEnd(problem=f"the health command can not be started: {error.strerror or error}")
            self._has_run = True
            self._idle.clear()
        try:
            self._on_spawn(process.pid)
            return self._watch(process)
        finally:
            _end(process)
            self._idle.set()
            self._on_gone(process.pid)

    def close(self, bound_s: float = CLOSE_S) -> None:
        """Nothing of it is left afterwards, and it is not started again. ``bound_s``: for ``run`` to end."""
        with self._lock:
            self._stopped.set()
        self._idle.wait(bound_s)
        if self._has_run:
            _end_marked(self._mark)

    def _watch(self, process: subprocess.Popen[bytes]) -> CommandEnd:
        assert process.stdout is not None
        output = process.stdout.fileno()
        os.set_blocking(output, False)
        head, is_open, end_s = b"", True, time.monotonic() + self._timeout_s
        while not _has_ended(process.pid):
            if self._stopped.is_set():
                return CommandEnd(problem="the agent ends")
            if time.monotonic() >= end_s:
                return CommandEnd(problem=f"the health command did not end within {self._timeout_s:g} s")
            if is_open:
                head, is_open = _read(output, head, _POLL_S)
            else:
                self._stopped.wait(_POLL_S)
        end_s = time.monotonic() + LEFT_OVER_S
        while is_open and len(head) < KEPT_BYTES and time.monotonic() < end_s:
            head, is_open = _read(output, head, LEFT_OVER_S)
        _end(process)
        code, line = process.returncode, head.decode("utf-8", "replace")
        if code in _NOT_FOUND:
            return CommandEnd(problem=f"the health command can not be run (exit code {code}): {line}")
        if code < 0:
            return CommandEnd(problem=f"the health command was ended by signal {-code}")
        return CommandEnd(code=code, line=line)


def _has_ended(pid: int) -> bool:
    """Without reaping it, so that the number stays its own, and its group's, until the rest is ended."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read(output: int, head: bytes, wait_s: float) -> tuple[bytes, bool]:
    """What more there is of the output, and whether more may come. What is not kept is read all the same."""
    poller = select.poll()
    poller.register(output, select.POLLIN)
    if not poller.poll(int(wait_s * 1000)):
        return head, True
    try:
        data = os.read(output, 1 << 16)
    except BlockingIOError:
        return head, True
    return (head + data)[:KEPT_BYTES], bool(data)


def _end_marked(mark: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole tree, whatever is left of it. Does nothing the second time."""
    if process.returncode is not None:
        return
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    if process.stdout is not None:
        process.stdout.close()
