"""Helpers for tests with real processes: every wait is bounded, every process is known by its pid."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lmres.rendezvous.edge.workers.monitor import WorkerMonitor
from lmres.rendezvous.edge.workers.process import WorkerProcess

BOUND_S = 30.0
"""For anything that must come; generous, since tests run on loaded machines."""

PYTHON = (sys.executable, "-S", "-E", "-c")

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def until(condition: Any, what: str, bound_s: float = BOUND_S) -> Any:
    """Poll for a state that nothing announces."""
    end = time.monotonic() + bound_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"not within {bound_s} s: {what}")


def read_when_there(path: Path) -> str:
    """The text of a file that its writer puts in place with a rename."""
    return str(until(lambda: path.exists() and path.read_text(), f"{path} is written"))


def gone(pid: int) -> bool:
    """True for a zombie too: it runs no more."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return line[line.rindex(")") + 2] in "ZX"


def wait_gone(pid: int) -> None:
    until(lambda: gone(pid), f"process {pid} has ended")


def read_line(stream: Any) -> str:
    """One line of an unbuffered pipe."""
    text = b""
    end = time.monotonic() + BOUND_S
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no line within {BOUND_S} s, only {text!r}"
        byte = os.read(stream.fileno(), 1)
        assert byte, f"the stream ended after {text!r}"
        text += byte
    return text.decode().strip()


class Watched:
    """A monitor whose callbacks fill queues."""

    def __init__(self, **options: Any) -> None:
        self.exits: queue.Queue[tuple[WorkerProcess, int, int]] = queue.Queue()
        self.reports: queue.Queue[tuple[WorkerProcess, dict[str, Any]]] = queue.Queue()
        self.errors: queue.Queue[BaseException] = queue.Queue()
        self.order: list[str] = []
        self.open = True
        self.started: list[WorkerProcess] = []
        self.monitor = WorkerMonitor(
            **{
                "token": os.urandom(8).hex(),
                "on_exit": self._exit,
                "on_report": self._report,
                "on_error": self.errors.put,
                "gate": lambda worker, status: self.open,
                **options,
            }
        )
        self.monitor.start()

    def _exit(self, worker: WorkerProcess, status: int, monotonic_ms: int) -> None:
        self.order.append("exit")
        self.exits.put((worker, status, monotonic_ms))

    def _report(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        self.order.append(str(message.get("kind")))
        self.reports.put((worker, message))

    def launch(self, *args: str, env: dict[str, str] | None = None, **options: Any) -> WorkerProcess:
        worker = self.monitor.launch(args, {**os.environ, **(env or {})}, local_rank=0, **options)
        self.started.append(worker)
        return worker

    def python(self, script: str, *args: str, env: dict[str, str] | None = None, **options: Any) -> WorkerProcess:
        """A worker that runs ``script`` in a bare interpreter."""
        return self.launch(*PYTHON, script, *args, env=env, **options)

    def exit(self) -> tuple[WorkerProcess, int, int]:
        return self.exits.get(timeout=BOUND_S)

    def report(self, kind: str) -> dict[str, Any]:
        """The next report of this kind; others are passed over."""
        while True:
            _worker, message = self.reports.get(timeout=BOUND_S)
            if message.get("kind") == kind:
                return message

    def close(self) -> None:
        for worker in self.started:
            if worker.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # not reaped, so it is still its group
                worker.wait(BOUND_S)
        self.monitor.close()
