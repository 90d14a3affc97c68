"""The agent's side of its guardian (see ``guardian_main``): a process that outlives the agent's SIGKILL.

Every method is safe to call from any thread and none raises for the guardian's sake. If it died it is started again,
a few times; then the run goes on without it, and ``on_problem`` has said so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmres.rendezvous.edge.workers.process import FDS_VARIABLE
from lmres.rendezvous.edge.workers.proctree import TOKEN_VARIABLE, read_process

RESTARTS = 3

_PROGRAM = Path(__file__).with_name("guardian_main.py")
# What a worker has must not mark the guardian as one, and a preloaded library would only make it big.
_NOT_INHERITED = (TOKEN_VARIABLE, FDS_VARIABLE, "LD_PRELOAD")
_BYE_S = 2.0


class Guardian:
    """One guardian for this agent and run."""

    def __init__(self, *, token: str, timeout_s: float, on_problem: Callable[[str], None]) -> None:
        """``timeout_s``: the agent's silence after which its workers are killed (the lease's length)."""
        self._token = token
        self._timeout_s = timeout_s
        self._on_problem = on_problem
        self._lock = threading.RLock()
        self._workers: dict[int, int] = {}  # pid: start time
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._restarts_left = RESTARTS
        self._pulsed_at: float | None = None
        self._fenced_s: float | None = None
        self._behind = False

    @property
    def pid(self) -> int | None:
        """None: there is no guardian now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the guardian. This agent's silence counts from its first pulse or worker."""
        with self._lock:
            if self._process is None:
                self._spawn()

    def pulse(self) -> None:
        """Say that this agent is alive. Never blocks: a guardian that does not read is not waited for."""
        with self._lock:
            self._listen()
            self._pulsed_at = time.monotonic()
            if self._behind:
                self._introduce()  # it did not read for long, and may have missed a worker
            self._say("pulse")

    def register(self, pid: int) -> None:
        """This worker (not reaped yet) is to be killed with its tree when the agent can not do it."""
        process = read_process(pid)
        with self._lock:
            if process is not None:
                self._workers[pid] = process.started
                self._say(f"worker {pid} {process.started}")

    def unregister(self, pid: int) -> None:
        with self._lock:
            if self._workers.pop(pid, None) is not None:
                self._say(f"gone {pid}")

    def take_fenced(self) -> float | None:
        """Seconds for which this agent was silent, if its workers were killed for it since the last call."""
        with self._lock:
            self._listen()
            seconds, self._fenced_s = self._fenced_s, None
            return seconds

    def close(self) -> None:
        """Send the guardian away; the workers are the caller's business then."""
        with self._lock:
            self._restarts_left = 0
            process, self._process = self._process, None
            if process is None:
                return
            self._send("bye")
            try:
                process.wait(_BYE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # before its channel closes, or it would take us for dead
                process.wait()
            self._drop_channel()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(theirs.fileno()), str(os.getpid())],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stderr is the agent's: a traceback must not get lost
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._on_problem(f"the guardian can not be started: {error}")
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._introduce()

    def _introduce(self) -> None:
        self._behind = False
        self._send(f"token {self._token}")
        self._send(f"timeout {self._timeout_s}")
        for pid, started in self._workers.items():
            self._send(f"worker {pid} {started}")

    def _say(self, line: str) -> None:
        if self._process is not None and not self._send(line):
            self._replace()

    def _send(self, line: str) -> bool:
        """False: nobody is there."""
        if self._channel is None:
            return False
        try:
            self._channel.send(line.encode("ascii"), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._behind = True
        except OSError:
            return False
        return True

    def _replace(self) -> None:
        process, self._process = self._process, None
        self._drop_channel()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0)
        status = process.returncode if process is not None else None
        if self._restarts_left <= 0:
            self._on_problem(f"the guardian died again (status {status}): workers may outlive a killed agent")
            return
        self._restarts_left -= 1
        self._on_problem(f"the guardian died (status {status}) and is started again")
        self._spawn()

    def _listen(self) -> None:
        if self._channel is None:
            return
        with contextlib.suppress(OSError):
            while message := self._channel.recv(4096):
                if message.startswith(b"fenced "):
                    silent_s = float(message.split()[1])
                    if self._pulsed_at is not None:
                        silent_s = max(silent_s, time.monotonic() - self._pulsed_at)
                    self._fenced_s = silent_s

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
