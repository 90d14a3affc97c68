"""Starts workers and sees at once what becomes of them.

One daemon thread waits in a selector for every worker's pidfd and report channel. Rules:

1. A report sent before the end is delivered before the exit, whatever order the kernel shows them in.
2. Callbacks run in this thread and must be short. An error in them, or in the thread, ends the thread and goes to
   ``on_error``: from then on exits are still held and polled, but no longer noticed early.
3. Looking never reaps: torch's poll (behind the gate) or ``wait`` does.
4. A worker is watched from its start; ``set_generation`` forgets the workers of earlier ones that are reaped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from lmres.rendezvous.edge.workers.process import Gate, WorkerPlace, WorkerProcess
from lmres.rendezvous.edge.workers.reports import ReportReader
from lmres.rendezvous.edge.workers.warm import WarmPool

log = logging.getLogger(__name__)

OnExit = Callable[[WorkerProcess, int, int], None]
"""``on_exit(worker, status, monotonic_ms)``; ``status`` as ``Popen.returncode`` has it."""
OnReport = Callable[[WorkerProcess, dict[str, Any]], None]
PrepareEnv = Callable[[dict[str, str]], dict[str, str]]

_POLL_S = 0.02
_READ_BYTES = 256 * 1024
_JOIN_S = 5.0


def _open_gate(_worker: WorkerProcess, _status: int) -> bool:
    return True


class WorkerMonitor:
    """The workers of one agent. All methods may be called from any thread but the monitor's own callbacks' locks."""

    def __init__(
        self,
        *,
        token: str,
        on_exit: OnExit,
        on_report: OnReport,
        on_error: Callable[[BaseException], None],
        gate: Gate = _open_gate,
        on_start: Callable[[WorkerProcess], None] | None = None,
        prepare_env: PrepareEnv | None = None,
        warm: WarmPool | None = None,
    ) -> None:
        """``token`` marks every worker's environment and is unique to this agent and run. ``on_start`` is called by
        the thread that starts a worker, right after the start. ``prepare_env`` makes the environment that a worker
        gets from the one that torch and the generation give. ``warm`` is asked for a process before one is started;
        it is the caller's to close."""
        self.token = token
        self._on_exit = on_exit
        self._on_report = on_report
        self._on_error = on_error
        self._gate = gate
        self._on_start = on_start
        self._prepare_env = prepare_env
        self._warm = warm
        self._lock = threading.Lock()
        self._generation = 0
        self._extra_env: dict[str, str] = {}
        self._workers: list[WorkerProcess] = []
        self._arrivals: deque[WorkerProcess] = deque()
        self._watched: dict[WorkerProcess, ReportReader] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="lmres-workers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and give back all descriptors. The processes are left as they are."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        with self._lock:
            workers, self._workers = self._workers, []
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
        for worker in (*workers, *self._arrivals):
            worker.close()
        self._selector.close()
        os.close(read)
        os.close(write)

    def set_generation(self, generation: int, env: Mapping[str, str]) -> None:
        """The next workers belong to ``generation`` and get ``env`` on top of torch's environment."""
        with self._lock:
            self._generation = generation
            self._extra_env = dict(env)
            gone = [worker for worker in self._workers if worker.returncode is not None]
            self._workers = [worker for worker in self._workers if worker.returncode is None]
            self._arrivals.extend(gone)  # the thread owns the selector: it drops those that are reaped
        self._wake()

    def workers(self, generation: int | None = None) -> tuple[WorkerProcess, ...]:
        """The workers known now, of one generation or of all, in order of their start."""
        with self._lock:
            return tuple(w for w in self._workers if generation in (None, w.place.generation))

    def launch(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        *,
        local_rank: int,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> WorkerProcess:
        """Start a worker of the current generation and watch it. Raises what ``Popen`` raises."""
        with self._lock:
            generation = self._generation
            full = {**env, **self._extra_env}
        if self._prepare_env is not None:
            full = self._prepare_env(full)
        place = WorkerPlace(generation=generation, rank=int(env.get("RANK", -1)), local_rank=local_rank)
        worker = None
        if self._warm is not None:
            worker = self._warm.take(
                args, full, place=place, token=self.token, gate=self._gate, stdout=stdout, stderr=stderr
            )
        if worker is None:
            worker = WorkerProcess.start(
                args, full, place=place, token=self.token, gate=self._gate, stdout=stdout, stderr=stderr
            )
        with self._lock:
            self._workers.append(worker)
            self._arrivals.append(worker)
        if self._on_start is not None:
            self._on_start(worker)
        self._wake()
        return worker

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody to wake
            os.write(self._wake_write, b"w")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            log.exception("the watch over the workers has ended")
            self._on_error(error)

    def _turn(self) -> None:
        blind = [worker for worker in self._watched if worker.pidfd < 0]
        for key, _mask in self._selector.select(_POLL_S if blind else None):
            if key.data is None:
                self._admit()
            else:
                worker, what = key.data
                # An event of this same batch may have ended the watch over it already.
                if worker in self._watched:
                    self._ended(worker) if what == "exit" else self._listen(worker)
        for worker in blind:
            if worker in self._watched and worker.exit_status() is not None:
                self._ended(worker)

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._arrivals:
            worker = self._arrivals.popleft()
            if worker in self._watched:  # forgotten by set_generation before its end was seen
                self._ended(worker)
            if worker not in self.workers():
                worker.close()
                continue
            self._watched[worker] = ReportReader()
            self._selector.register(worker.channel, selectors.EVENT_READ, (worker, "report"))
            if worker.pidfd >= 0:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, (worker, "exit"))

    def _ended(self, worker: WorkerProcess) -> None:
        now_ms = time.monotonic_ns() // 1_000_000
        status = worker.exit_status()
        if status is None:
            return
        self._listen(worker)
        self._unlisten(worker)
        if worker.pidfd >= 0:
            self._selector.unregister(worker.pidfd)
        del self._watched[worker]
        self._on_exit(worker, status, now_ms)

    def _listen(self, worker: WorkerProcess) -> None:
        reader = self._watched[worker]
        for _ in range(4):  # bounded: one worker that talks without end must not keep the others unheard
            try:
                data = worker.channel.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._unlisten(worker)
                return
            before = reader.junk
            messages = reader.feed(data)
            if before == 0 and reader.junk:
                log.warning("rank %s (pid %s) sent a report that is no JSON object; it and others like it are ignored",
                            worker.place.rank, worker.pid)  # fmt: skip
            for message in messages:
                self._on_report(worker, message)

    def _unlisten(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
