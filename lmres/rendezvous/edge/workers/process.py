"""A worker process that torch polls and we own.

It answers as ``subprocess.Popen`` does, and stands for a process that was started as torch would start it (``start``)
or that was running already (``warm``), with three additions:

1. **Held.** ``poll()`` answers None while the gate holds the exit status back. The status is looked at without
   reaping (``WNOWAIT``), so the zombie keeps its pid and its process group: torch's ``killpg`` stays valid.
   ``exit_status()`` reads it at any time. ``wait()`` is never gated.
2. **Tied to the agent.** The kernel kills the worker when the thread that started it ends (``PR_SET_PDEATHSIG``).
   That is the agent's main thread (or the warm pool's), which lives as long as the agent.
3. **Connected.** A socket for reports and a progress page are inherited; ``LMRES_WORKER_FDS=REPORT,PAGE`` names them.
   A program that does not know them is not disturbed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from lmres.rendezvous.edge.workers.proctree import TOKEN_VARIABLE, read_process
from lmres.rendezvous.edge.workers.progress import ProgressPage

FDS_VARIABLE = "LMRES_WORKER_FDS"
STATUS_LOST = 255
"""Exit status of a worker whose status somebody else took (SIGCHLD ignored): surely not a success."""

Gate = Callable[["WorkerProcess", int], bool]
"""``gate(worker, status)``: whether torch may see this exit status now. Called from the thread that polls."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_RELEASE = b'{"release": true}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker stands in the job. ``rank`` is -1 where torch's environment does not say."""

    generation: int
    rank: int
    local_rank: int


class Link:
    """What connects a worker: the agent's end of the channel and the page, and the two descriptors for the worker."""

    def __init__(self) -> None:
        self.progress = ProgressPage()
        try:
            self.channel, self._theirs = socket.socketpair()
        except OSError:
            self.progress.close()
            raise
        self.channel.setblocking(False)

    @property
    def worker_fds(self) -> tuple[int, int]:
        """Report channel and progress page, as ``LMRES_WORKER_FDS`` names them."""
        return self._theirs.fileno(), self.progress.fd

    def handed_over(self) -> None:
        """The worker has its end."""
        self._theirs.close()

    def close(self) -> None:
        self._theirs.close()
        self.channel.close()
        self.progress.close()


class WorkerProcess:
    """See the module. ``child`` is its process, not reaped yet, that only this object polls from now on."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        link: Link,
        *,
        place: WorkerPlace,
        token: str,
        gate: Gate,
    ) -> None:
        self.args = child.args
        self.pid = child.pid
        self.place = place
        self.token = token
        self.progress = link.progress
        self.channel = link.channel
        self._child = child
        self._gate = gate
        self._status: int | None = None
        # Not reaped yet, so the pid is surely still this process.
        self._pidfd = _open_pidfd(self.pid)
        process = read_process(self.pid)
        self.started_ticks = process.started if process is not None else 0

    @classmethod
    def start(
        cls,
        args: Sequence[str],
        env: Mapping[str, str],
        *,
        place: WorkerPlace,
        token: str,
        gate: Gate,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> WorkerProcess:
        """Start the process, as ``Popen`` does. Raises what ``Popen`` raises."""
        link = Link()
        try:
            numbers = link.worker_fds
            child = start_tied(
                args,
                {**env, TOKEN_VARIABLE: token, FDS_VARIABLE: f"{numbers[0]},{numbers[1]}"},
                stdout=stdout,
                stderr=stderr,
                pass_fds=numbers,
            )
        except BaseException:
            link.close()
            raise
        link.handed_over()
        return cls(child, link, place=place, token=token, gate=gate)

    @property
    def returncode(self) -> int | None:
        """The exit status once it is reaped."""
        return self._child.returncode

    @property
    def pidfd(self) -> int:
        """Readable once the process has ended; -1 where the kernel has none."""
        return self._pidfd

    def exit_status(self) -> int | None:
        """The exit status (negative: the signal), without reaping and without asking the gate; None: it runs."""
        if self._status is None:
            self._status = self.returncode if self.returncode is not None else self._peek(os.WNOHANG)
        return self._status

    def poll(self) -> int | None:
        """What torch sees: None while the process runs or its status is held."""
        if self.returncode is None:
            status = self.exit_status()
            if status is None or not self._gate(self, status):
                return None
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and reap, held or not. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            end = None if timeout is None else time.monotonic() + timeout
            while self.exit_status() is None:
                left_s = None if end is None else end - time.monotonic()
                if timeout is not None and left_s is not None and left_s <= 0:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                self._sleep(left_s)
            self._reap()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Signal the process, if it still runs."""
        if self.exit_status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def release(self) -> None:
        """Tell a worker that holds its exception that it may go on and exit."""
        with contextlib.suppress(OSError):  # it is gone, or never listened: nothing holds it then
            self.channel.send(_RELEASE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Give the descriptors back. Status and progress stay readable."""
        self.channel.close()
        self.progress.close()
        if self._pidfd >= 0:
            self.exit_status()
            fd, self._pidfd = self._pidfd, -1
            os.close(fd)

    def _peek(self, flags: int) -> int | None:
        kind, number = (os.P_PIDFD, self._pidfd) if self._pidfd >= 0 else (os.P_PID, self.pid)
        try:
            found = os.waitid(kind, number, os.WEXITED | os.WNOWAIT | flags)
        except ChildProcessError:
            # Every reap of ours has kept the status before; here somebody else's has taken it.
            return self._status if self._status is not None else STATUS_LOST
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _reap(self) -> None:
        self._child.wait()
        if self._status == STATUS_LOST:
            self._child.returncode = STATUS_LOST  # Popen answers 0 where the status was taken

    def _sleep(self, timeout_s: float | None) -> None:
        if self._pidfd < 0:
            time.sleep(_POLL_S if timeout_s is None else min(_POLL_S, timeout_s))
            return
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll(None if timeout_s is None else max(1, int(timeout_s * 1000)))


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def start_tied(
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[Any] | int | None,
    stderr: IO[Any] | int | None,
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a process as torch does, in a session of its own, that dies with the thread which calls this."""
    return subprocess.Popen(
        args,
        env=env,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=pass_fds,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 (it takes no lock)
    )


def _die_with_parent() -> Callable[[], None]:
    """What the child does between fork and exec. The agent has threads, so it must not take a lock or import:
    all names are bound beforehand, and ``PyDLL`` leaves the interpreter lock alone."""
    prctl = ctypes.PyDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    arguments = (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    parent, getppid, leave = os.getpid(), os.getppid, os._exit

    def in_child() -> None:
        prctl(*arguments)
        if getppid() != parent:  # the agent died before the call: no signal will ever come
            leave(127)

    return in_child
