"""The workers of this node: evidence from their ends, the gate before torch, stopping.

torch polls exit codes and acts on them at once, so each is held back here until the plan says what it means:

- a failure stays hidden until the plan; then torch sees it only on the node the plan charges with it (which spends one
  of ``--max-restarts``), and elsewhere the workers are restarted as for a change of membership, which costs nothing;
- a success stays hidden until all slots have succeeded, so that a late crash elsewhere can still restart this node.

If the thread that decides dies, the workers are stopped and the agent ends: nobody would look after them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lmres.adapters.bootstrap import bootstrap_env
from lmres.rendezvous.edge.workers import patch
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.edge.workers.monitor import WorkerMonitor
from lmres.rendezvous.edge.workers.process import WorkerProcess
from lmres.rendezvous.edge.workers.stop import StopReport, stop_workers
from lmres.rendezvous.edge.workers.warm import WarmPool, names_of_report
from lmres.rendezvous.plan import Cause, ExceptionInfo
from lmres.rendezvous.state import Banned, Evidence, Member, Paused
from lmres.scout.edge.oom import OomWatch
from lmres.scout.evidence import Finding, classify_exception, classify_exit, killed_loader, may_be_out_of_memory

log = logging.getLogger("lmres")

MAX_ALIKE = 16
"""So many findings of one kind about one worker are kept in a generation."""
TRACEBACK_S = 1.0
UNKILLABLE_S = 30.0
SUSPECT_STEPS = 10
"""A state after which the parameters are not finite within so many steps is taken for the reason."""
_MAX_LINES = 20


class Crew:
    """Owned by the node; its methods may be called from any thread."""

    def __init__(
        self,
        *,
        token: str,
        me: Callable[[], Member],
        grace_s: float,
        attach: bool,
        guardian: Guardian,
        warm: WarmPool | None,
        on_change: Callable[[], None],
        on_note: Callable[[WorkerProcess, dict[str, Any]], None],
        on_error: Callable[[BaseException], None],
        on_start: Callable[[], None],
    ) -> None:
        """``attach``: the bootstrap goes into the workers. ``warm``: where launches are tried first.

        ``on_note`` gets the workers' own reports. ``on_start`` is called in torch's main thread when a worker has been
        started.
        """
        self._me = me
        self._grace_s = grace_s
        self._guardian = guardian
        self._warm = warm
        self._on_change = on_change
        self._on_note = on_note
        self._on_start = on_start
        self._lock = threading.Lock()
        self.monitor = WorkerMonitor(
            token=token,
            on_exit=self._exited,
            on_report=self._reported,
            on_error=on_error,
            gate=self._gate,
            on_start=self._started,
            prepare_env=bootstrap_env if attach else None,
            warm=warm,
        )
        self._on_error = on_error
        self._oom = OomWatch()
        self.generation = 0
        self.started_ms: int | None = None
        self.stopped_ms: int | None = None
        self.succeeded = 0
        self.faults: tuple[Evidence, ...] = ()
        self.banned: tuple[Banned, ...] = ()
        self.paused: Paused | None = None
        """Where the workers of this generation stand, while they are asked to."""
        self._pause_at: int | None = None
        self._standing: dict[int, int] = {}
        self._unprotected: set[int] = set()
        self._restored: tuple[int, int] | None = None
        self._origin = 0
        self._expected = 0
        self._statuses: dict[int, int] = {}
        self._attached: set[int] = set()
        self.stacks: dict[int, tuple[int, int]] = {}
        """By pid: the signal that a worker answers with its stacks, and its descriptor that they go to."""
        self._reports: set[int] = set()
        self._holding: set[int] = set()
        self._told_enough: set[tuple[Any, ...]] = set()
        self.watch_told: set[int] = set()
        """Workers of this generation that have said whether they can be watched: torch is in them."""
        self.watch_off: dict[int, str] = {}
        """By pid: why a worker of this generation is not watched, in its own words."""
        self._stopper: threading.Thread | None = None
        self._stopping = False
        self._cleaned: set[int] = set()
        self._killed_s: float | None = None
        self._open = False
        self._success_shown = False

    def start(self) -> None:
        if self._warm is not None:
            self._warm.start()
        self.monitor.start()
        patch.install(self.monitor)

    def close(self) -> None:
        patch.uninstall(self.monitor)
        self.monitor.close()
        if self._warm is not None:
            self._warm.close()
        self._oom.close()

    # -- a generation -------------------------------------------------------------------------------------------------

    def begin(
        self,
        generation: int,
        expected: int,
        env: Mapping[str, str],
        *,
        restored: tuple[int, int] | None = None,
        origin: int = 0,
    ) -> None:
        """The next ``expected`` workers that torch starts belong to ``generation``. ``restored``: step and origin of
        the state that they go on from, None at step 0; ``origin``: of the states that they capture."""
        self._oom.renew()
        with self._lock:
            for worker in self.monitor.workers():
                self._guardian.unregister(worker.pid)
            self.started_ms = self.stopped_ms = self._killed_s = None
            self._statuses, self._attached, self._reports, self._holding = {}, set(), set(), set()
            self.watch_told = set()
            self.watch_off = {}
            self._told_enough = set()
            self.stacks = {}
            self._stopping = self._open = self._success_shown = False
            self._pause_at = self.paused = None
            self._standing, self._unprotected = {}, set()
            self._stopper = None
            self._cleaned = set()
            # Last: whoever sees the new number must not see what belonged to the old one.
            self._expected = expected
            self._restored, self._origin = restored, origin
            self.generation = generation
        self.monitor.set_generation(generation, env)

    def pids(self) -> dict[int, int]:
        """Local rank to pid, of the newest generation."""
        return {w.place.local_rank: w.pid for w in self.monitor.workers(self.generation)}

    @property
    def alive(self) -> bool:
        """Whether any worker runs, or is being cleaned away."""
        stopper = self._stopper
        if stopper is not None and stopper.is_alive():
            return True
        return any(w.exit_status() is None for w in self.monitor.workers())

    @property
    def stopping(self) -> bool:
        """Whether the workers have been told to end."""
        return self._stopping

    @property
    def attached_pids(self) -> frozenset[int]:
        """Workers of this generation in which the bootstrap runs."""
        return frozenset(self._attached)

    @property
    def excused_pids(self) -> frozenset[int]:
        """Workers of this generation that have failed, and hold or end: that they do not move means nothing."""
        return frozenset(self._reports | self._holding)

    @property
    def step(self) -> int | None:
        """The most optimizer steps that a worker here has completed in this generation; None if not known."""
        steps = [w.progress.read()[0] for w in self.monitor.workers(self.generation) if w.pid in self._attached]
        return max(steps, default=None)

    @property
    def has_failure(self) -> bool:
        """Whether torch would see a failure if the gate were open."""
        return any(w.exit_status() not in (None, 0) for w in self.monitor.workers(self.generation))

    # -- the gate -----------------------------------------------------------------------------------------------------

    def _gate(self, worker: WorkerProcess, status: int) -> bool:
        if self._open or worker.place.generation != self.generation:
            return True
        return status == 0 and self._success_shown

    def show_success(self) -> None:
        """The run has succeeded: torch may see its workers' success."""
        self._success_shown = True

    def open_gate(self) -> None:
        """torch may see everything."""
        self._open = True

    # -- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, *, generation: int | None = None) -> None:
        """Begins to stop the workers, in a thread of its own; ``alive`` tells when it is done.

        May be called again at any time: workers that torch starts later are stopped too. With ``generation`` only if it
        is still the newest one here.
        """
        with self._lock:
            if generation is not None and generation != self.generation:
                return
            self._stopping = True
            workers = tuple(w for w in self.monitor.workers() if w.pid not in self._cleaned)
            if not workers or (self._stopper is not None and self._stopper.is_alive()):
                return
            self._stopper = threading.Thread(target=self._stop, args=(workers,), name="lmres-stop", daemon=True)
            try:
                self._stopper.start()
                return
            except RuntimeError:  # the interpreter is going down and starts no threads any more
                self._stopper = None
        self._stop(workers)

    def _stop(self, workers: tuple[WorkerProcess, ...]) -> None:
        try:
            self._await(lambda: self._reports <= self._holding, TRACEBACK_S)
            for worker in workers:
                worker.release()
            spare = [self._guardian.pid] if self._guardian.pid is not None else []
            report: StopReport = stop_workers(workers, self._grace_s, spare=spare)
            if report.killed:
                log.warning("workers still there %.1f s after SIGTERM were killed: %s", self._grace_s, report.killed)
            if report.unkillable:
                log.error("SIGKILL has not ended %s yet", report.unkillable)
                self._killed_s = self._killed_s or time.monotonic()
        except BaseException as error:
            self._on_error(error)
        self._cleaned |= {w.pid for w in workers}
        self.stopped_ms = now_ms()
        self._stopper = None
        self._on_change()

    @property
    def unkillable(self) -> tuple[int, ...]:
        """Workers that still run long after SIGKILL. A big one may need many seconds to give its memory back."""
        if self._killed_s is None or time.monotonic() - self._killed_s < UNKILLABLE_S:
            return ()
        return tuple(w.pid for w in self.monitor.workers() if w.exit_status() is None)

    def _await(self, condition: Callable[[], bool], bound_s: float) -> None:
        """Gives a failed worker the time to print its traceback."""
        end = time.monotonic() + bound_s
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)

    def join_stop(self, timeout_s: float) -> None:
        stopper = self._stopper
        if stopper is not None:
            stopper.join(timeout_s)

    # -- standing still -----------------------------------------------------------------------------------------------

    def pause(self, step: int | None) -> None:
        """Asks the workers to stand still at the boundary of this step, 1 for the next one; None: to go on.

        How far they may come is told from what they have done *after* they were asked.
        """
        if step == self._pause_at:
            return
        with self._lock:
            self._pause_at = step
            workers = self.monitor.workers(self.generation)
            for worker in workers:
                worker.progress.pause(step or 0)
            if step is None:
                self.paused, self._standing = None, {}
            elif self.paused is None:
                done = max((w.progress.read()[0] for w in workers), default=0)
                base = self._restored[0] if self._restored is not None else 0
                self.paused = self._paused(reach=max(done, base, 1) + 1)
        self._judge_pause()

    def _paused(self, reach: int) -> Paused:
        me = self._me()
        return Paused(generation=self.generation, node_id=me.node_id, incarnation=me.incarnation, reach=reach)

    def _stands(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """A worker stands at a boundary, its state saved, or says why it can not, or that it goes on unasked."""
        step, not_before, problem = message.get("step"), message.get("not_before"), message.get("problem")
        if not isinstance(step, int):
            return
        with self._lock:
            if worker.place.generation != self.generation or self.paused is None:
                return  # let go meanwhile
            if message.get("kind") == "goes_on":
                self._standing.pop(worker.pid, None)
            elif problem:
                self.paused = replace(self.paused, problem=f"rank {worker.place.rank}: {str(problem)[:200]}")
            elif isinstance(not_before, int) and not_before > 0:
                self.paused = replace(self.paused, reach=max(self.paused.reach, not_before))
            else:
                self._standing[worker.pid] = step
        self._judge_pause()

    def _judge_pause(self) -> None:
        with self._lock:
            if self.paused is None:
                return
            workers = self.monitor.workers(self.generation)
            out = [w for w in workers if w.pid in self._unprotected or w.exit_status() is not None]
            if out and not self.paused.problem:
                problem = f"rank {out[0].place.rank} has ended, or its state is not protected"
                self.paused = replace(self.paused, problem=problem)
            steps = {self._standing.get(w.pid) for w in workers}
            all_stand = len(workers) == self._expected and steps == {self._pause_at}
            self.paused = replace(self.paused, step=self._pause_at if all_stand else None)
        self._on_change()

    # -- what the workers tell ----------------------------------------------------------------------------------------

    def _started(self, worker: WorkerProcess) -> None:
        self._guardian.register(worker.pid)
        self._on_start()
        if self._pause_at is not None:
            worker.progress.pause(self._pause_at)
        if self._stopping:
            self.stop()  # a newer plan came while torch was starting this generation
        if len(self.monitor.workers(self.generation)) == self._expected:
            self.started_ms = now_ms()
            self._on_change()

    def _reported(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "attached":
            self._attached.add(worker.pid)
        if self._warm is not None:
            learned = kind == "modules" and self._warm.learn(names_of_report(message))
            if learned or kind == "first_step":  # training goes on: the cores have time for imports again
                self._warm.refill()
        if kind == "watch" and message.get("armed") is True:
            self._note_stacks(worker, message)
        if kind == "watch":
            self.watch_told.add(worker.pid)
            if message.get("armed") is not True:
                self.watch_off[worker.pid] = str(message.get("reason", ""))[:500]
        if kind == "holding":
            self._holding.add(worker.pid)
        if kind in ("paused", "goes_on"):
            self._stands(worker, message)
        if kind == "protection":
            if message.get("armed") is not True and _is_of_checkpoint(message):
                self._unprotected.add(worker.pid)
            self._judge_pause()
        if kind == "exception":
            self._ban_unreadable(message)
            self._exception(worker, message)
        if kind == "nonfinite":
            self._ban_nonfinite(worker, message)
        self._on_note(worker, message)

    def _note_stacks(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        number, fd = message.get("signal"), message.get("stacks_fd")
        if isinstance(number, int) and isinstance(fd, int) and number > 0 <= fd:
            self.stacks[worker.pid] = (number, fd)

    def _ban_unreadable(self, message: dict[str, Any]) -> None:
        restored = self._restored
        if restored is not None and not self._stopping and message.get("type") == "lmres.errors.StateError":
            self._ban([restored], f"it could not be had whole: {str(message.get('message', ''))[:500]}")

    def _ban_nonfinite(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """The state that was restored is taken for the reason, and what was captured since comes from it."""
        step, restored = message.get("step"), self._restored
        if isinstance(step, int) and restored is not None and 0 < step - restored[0] <= SUSPECT_STEPS:
            since = [(s, self._origin) for s in range(restored[0] + 1, step + 1)]
            reason = f"parameters of rank {worker.place.rank} were not finite at step {step}, soon after a restore"
            self._ban([restored, *since], reason)

    def _ban(self, keys: list[tuple[int, int]], reason: str) -> None:
        with self._lock:
            known = {(b.step, b.origin) for b in self.banned}
            new = tuple(Banned(step=s, origin=o, reason=reason) for s, o in keys if (s, o) not in known)
            self.banned = (*self.banned, *new)
        if new:
            log.warning("the state of step %d and what came of it are not used again: %s", keys[0][0], reason)
            self._on_change()

    def _exception(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        type_name = str(message.get("type", "unknown")).removeprefix("builtins.")[:300]
        text = str(message.get("message", ""))[:4000]
        lines = message.get("last_lines")
        last = tuple(str(line)[:500] for line in lines[-_MAX_LINES:]) if isinstance(lines, list) else ()
        info = ExceptionInfo(type_name=type_name, message=text, last_lines=last)
        at_ms = message.get("monotonic_ms")
        self._reports.add(worker.pid)
        loader = killed_loader(text)
        why = self._oom.cause(loader) if loader is not None else ""
        finding = classify_exception(type_name=type_name, message=text, out_of_memory=why)
        self._add_fault(worker, finding, 1, at_ms if isinstance(at_ms, int) else now_ms(), info)

    def _exited(self, worker: WorkerProcess, status: int, at_ms: int) -> None:
        if worker.place.generation != self.generation:
            return
        self._statuses[worker.place.local_rank] = status
        self._holding.add(worker.pid)
        if status != 0 and worker.pid not in self._reports:
            why = self._oom.cause(worker.pid) if may_be_out_of_memory(status) else ""
            self._add_fault(worker, classify_exit(status, out_of_memory=why), status, at_ms, None)
        ended_well = len(self._statuses) == self._expected and not any(self._statuses.values())
        if ended_well and not self._stopping:
            self.succeeded = self.generation
        self._on_change()

    def _add_fault(
        self, worker: WorkerProcess, finding: Finding, status: int, at_ms: int, info: ExceptionInfo | None
    ) -> None:
        if self._stopping or self._open or worker.place.generation != self.generation:
            return  # it ends because it was told to
        me = self._me()
        cause = Cause(
            failure_class=finding.failure_class,
            node_id=me.node_id,
            incarnation=me.incarnation,
            host=me.host,
            detail=finding.detail,
            rank=worker.place.rank if finding.blames else None,
            local_rank=worker.place.local_rank if finding.blames else None,
            pid=worker.pid,
            exit_status=status,
            exception=info,
            step=worker.progress.read()[0] if worker.pid in self._attached else None,
            detect_ms=max(0, now_ms() - at_ms),
        )
        self.add_evidence(cause, finding.weight, at_ms)

    def add_evidence(self, cause: Cause, weight: Any, at_ms: int, **more: Any) -> None:
        """Keeps evidence for the protocol to send. ``more``: further fields of ``Evidence``."""
        me = self._me()
        with self._lock:
            evidence = Evidence(
                generation=self.generation,
                reporter=me.node_id,
                incarnation=me.incarnation,
                weight=weight,
                cause=cause,
                boot_id=me.boot_id,
                at_ms=at_ms,
                **more,
            )
            kind = _kind(evidence)
            if sum(_kind(e) == kind for e in self.faults) >= MAX_ALIKE:
                is_new = kind not in self._told_enough
                self._told_enough.add(kind)
            else:
                is_new = False
                self.faults = (*self.faults, evidence)
        if is_new:
            log.warning("found %d times in this generation, and not told any more: %s", MAX_ALIKE, cause.headline())
        self._on_change()


def _kind(e: Evidence) -> tuple[Any, ...]:
    """What counts as alike: one worker's reports must not leave another's, or another failure, unheard."""
    cause = e.cause
    return e.generation, e.reaction, cause.failure_class, cause.node_id, cause.rank, cause.pid


def _is_of_checkpoint(message: dict[str, Any]) -> bool:
    """Whether what a worker says of its protection is about its state, not only about what finds faults in it."""
    parts = message.get("parts")
    return not isinstance(parts, list) or "checkpoint" in parts


def now_ms() -> int:
    """Milliseconds of CLOCK_MONOTONIC."""
    return time.monotonic_ns() // 1_000_000
