"""A node at run time: the threads around the protocol's rounds.

- the *control* thread runs the rounds against the store, one at a time, and carries out what they say;
- the *watch* thread waits at the store for changes and wakes the control thread (a hint, nothing depends on it);
- the *pulse* thread tells the guardian that this process is not frozen;
- the workers' monitor sees exits and reports.

torch's main thread only waits in ``next_group`` and asks for a ``verdict``. Whatever ends the control thread is kept
and handed to the main thread, which ends the agent; until then the gate is opened, so that torch sees the truth.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tenacity

from lmres import __version__
from lmres.errors import ExitCode, LmresError, StoreError, StoreLost, StoreRefused, StoreUnavailable
from lmres.ids import Keys
from lmres.policy import Policy, policy_to_dict
from lmres.ports import Store
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.codec import to_plain
from lmres.rendezvous.edge.connect import connect
from lmres.rendezvous.edge.crew import Crew, now_ms
from lmres.rendezvous.edge.events import EventLog
from lmres.rendezvous.edge.host import default_node_id, read_host_identity
from lmres.rendezvous.edge.phases import Marks
from lmres.rendezvous.edge.state_dir import default_state_dir, prepare_state_dir, write_private_json
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.tcp import TcpStore
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.edge.workers.process import WorkerProcess
from lmres.rendezvous.options import Options
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.rounds import End, Inputs, Leave, Note, Outcome, Settings
from lmres.rendezvous.state import Member, Recovered, RunConfig

log = logging.getLogger("lmres")

WATCH_MS = 10_000
REFUSED_S = 10.0
"""How long a store at which nobody listens is tried again: its process is gone, and its records with it."""
FORM_TIMEOUT_S = 60.0
LEAVE_S = 3.0
CLOSE_S = 8.0
MIN_ROUND_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A formed group, as torch needs it."""

    generation: int
    slot: int
    world_size: int
    master_address: str
    master_port: int


class Node:
    """One agent's runtime. ``start``, ``next_group``, ``verdict`` and ``close`` are for torch's main thread."""

    def __init__(self, options: Options, policy: Policy | None) -> None:
        self.options = options
        self.policy = policy if policy is not None else Policy()
        self._attach = policy is not None
        identity = read_host_identity()
        self.node_id = options.node_id or default_node_id(identity)
        self._host = identity.hostname
        self._boot_id = f"{identity.boot_id}/{_pid_namespace()}"
        folder = options.state_dir or default_state_dir(run_id=options.run_id, node_id=self.node_id)
        self.state_dir = prepare_state_dir(Path(folder))
        context = options.restart_context_path
        self.context_path = Path(context) if context is not None else self.state_dir / "restart_context.json"
        self.events = EventLog(self.state_dir / "events.jsonl", run_id=options.run_id, node_id=self.node_id)
        self._token = uuid.uuid4().hex
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._left = threading.Event()
        self._leave: Leave | None = None
        self._waiting = False
        self._port: socket.socket | None = None
        self._restarts_left: int | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._recovered: tuple[Recovered, ...] = ()
        self._marks: Marks | None = None
        self._noticed: dict[tuple[int, str], int] = {}
        self._first_steps: set[int] = set()
        self._shown = ""
        self._standing = ""
        self._finished_told = False
        self._started_told = 0
        self._marked_generation = 0

    # -- main thread --------------------------------------------------------------------------------------------------

    def start(self, *, local_world_size: int, role: str, event_handler: str) -> None:
        """Connects to the store and starts the threads. Raises ConfigError or StoreLost."""
        self.events.destination = event_handler
        self._local_world_size = local_world_size
        incarnation = self._new_incarnation()
        connection = connect(self.options, client_id=incarnation, state_dir=self.state_dir)
        self._store: Store = connection.store
        self._watch_store: Store = connection.store.clone()
        self._server: subprocess.Popen[bytes] | None = connection.server
        self._agent = Agent(
            settings=self._settings(connection.address, incarnation, local_world_size, role),
            new_incarnation=self._new_incarnation,
            process_is_dead=self._process_is_dead,
        )
        beat = self.policy.heartbeat
        self._guardian = Guardian(token=self._token, timeout_s=beat.timeout_s, on_problem=log.warning)
        self._crew = Crew(
            token=self._token,
            me=lambda: self._agent.me,
            grace_s=self.policy.workers.stop_grace_s,
            attach=self._attach,
            guardian=self._guardian,
            on_change=self._poke,
            on_note=self._worker_note,
            on_error=self._fail,
        )
        self._guardian.start()
        self._crew.start()
        atexit.register(self.close, "exit")
        self._control = threading.Thread(target=self._run, name="lmres-control", daemon=True)
        threads = [threading.Thread(target=t, name=n, daemon=True) for t, n in self._helpers()]
        for thread in (self._control, *threads):
            thread.start()
        if self._attach:
            parts = [
                p
                for p, on in (
                    ("checkpoint", self.policy.checkpoint.enabled),
                    ("detection", self.policy.detection.enabled),
                )
                if on
            ]
            if parts:
                reason = "not part of this version: after a failure the program starts at its own checkpoint or step 0"
                self.events.emit("protection_off", 0, adapter="none", parts=parts, reason=reason)

    def next_group(self, restarts_left: int | None) -> Group | End:
        """Blocks until this node is in a formed group, or its end has come. Raises what ended the control thread."""
        self._blame_unseen_restart()
        with self._changed:
            self._restarts_left = restarts_left
            self._reserve_port()
            self._waiting = True
            self._poke()
            while True:
                ended = self._over()
                if ended is not None:
                    return ended
                group = self._formed_group()
                if group is not None:
                    self._enter(group)
                    return group
                self._changed.wait(1.0)

    def verdict(self) -> bool | End:
        """True: torch should come back to ``next_group``, its old workers are gone. An End: leave like this."""
        ended = self._over()
        if ended is not None and ended.exit_code != 0:
            return False if self._crew.alive else ended
        outcome = self._outcome
        if outcome is None or ended is not None or not self._must_stop(outcome) or self._crew.alive:
            return False
        if self._crew.unkillable:
            return self._unkillable_end()
        self._crew.open_gate()
        # The charged node's failure is now seen by torch, which spends a restart; elsewhere it costs nothing.
        return not (outcome.charged and self._crew.has_failure)

    def _must_stop(self, outcome: Outcome) -> bool:
        return outcome.stop_workers and outcome.workers_generation == self._crew.generation

    def leave_on_signal(self, name: str) -> None:
        """Called in a signal handler: takes no lock."""
        if self._leave is None:
            self._leave = Leave(reason=f"{name} received", planned=True)
        self._poke()

    def close(self, torch_state: str) -> None:
        """Says goodbye and ends everything this agent started. Idempotent, bounded, also run at exit."""
        if self._closed or not hasattr(self, "_control"):
            return
        self._closed = True
        self._finish_unwatched(torch_state)
        over = self._outcome is not None and self._outcome.end is not None and self._outcome.end.run_over
        if self._leave is None:
            reason = "the run is over" if over else f"the agent ended ({torch_state})"
            self._leave = Leave(reason=reason, planned=over)
        self._closing.set()
        self._poke()
        self._crew.stop()
        self._control.join(LEAVE_S + 2.0)
        self._crew.join_stop(self.policy.workers.stop_grace_s + CLOSE_S)
        self._tell_end()
        self.events.emit("agent_left", self._crew.generation, address=self._agent.me.address, reason=self._leave.reason)
        self._crew.close()
        self._guardian.close()
        self._watch_store.close()
        self._part_from_store()
        self._free_port()
        self._reap_server()

    # -- the main thread's helpers ------------------------------------------------------------------------------------

    def _over(self) -> End | None:
        if self._error is not None:
            if isinstance(self._error, LmresError):
                return End(exit_code=int(self._error.exit_code), reason=str(self._error))
            raise RuntimeError("the control thread of lmres has died; this agent can not go on") from self._error
        return self._outcome.end if self._outcome is not None else None

    def _formed_group(self) -> Group | None:
        outcome = self._outcome
        if outcome is None or outcome.formed is None or outcome.plan is None or outcome.slot is None:
            return None
        formed = outcome.formed
        if formed.generation <= self._crew.generation or formed.generation != outcome.plan.generation:
            return None
        return Group(
            generation=formed.generation,
            slot=outcome.slot,
            world_size=len(outcome.plan.active),
            master_address=formed.master_address,
            master_port=formed.master_port,
        )

    def _enter(self, group: Group) -> None:
        """From here on torch starts the workers of this generation."""
        outcome = self._outcome
        assert outcome is not None and outcome.plan is not None
        self._write_context(outcome.plan, group)
        env = self._worker_env(outcome.plan, group)
        os.environ.update(env)
        self._free_port()
        if self._marks is not None and self._marks.generation == group.generation:
            self._marks.formed_ms = now_ms()
        self._first_steps.clear()
        self._crew.begin(group.generation, self._local_world_size, env)
        self._waiting = False

    def _worker_env(self, plan: Plan, group: Group) -> dict[str, str]:
        step = str(plan.recovery_step)
        return {
            "LMRES_RUN_ID": self.options.run_id,
            "LMRES_NODE_ID": self.node_id,
            "LMRES_GENERATION": str(group.generation),
            "LMRES_SLOT": str(group.slot),
            "LMRES_RESUME_STEP": step,
            "LMRES_STATE_DIR": str(self.state_dir),
            "LMRES_RESTART_CONTEXT": str(self.context_path),
            "LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP": step,
        }

    def _write_context(self, plan: Plan, group: Group) -> None:
        body = {"run_id": self.options.run_id, "node_id": self.node_id, "slot": group.slot, **to_plain(plan)}
        try:
            write_private_json(self.context_path, body)
        except OSError as error:
            log.warning("the restart context can not be written, workers go on without it: %s", error)

    def _reserve_port(self) -> None:
        """Keeps a free port for the workers' store, so that nobody else is given it in the meantime.

        It is bound but does not listen, and with SO_REUSEADDR: rank 0 can bind the same port and listen.
        """
        self._free_port()
        address = self._agent.me.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        port = socket.socket(family, socket.SOCK_STREAM)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", 0))
        self._port = port

    def _free_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()

    def _blame_unseen_restart(self) -> None:
        """torch restarts by itself workers that were not started through us (functions instead of a command)."""
        outcome, generation = self._outcome, self._crew.generation
        if outcome is None or outcome.plan is None or generation == 0 or outcome.plan.generation != generation:
            return
        if outcome.stop_workers or outcome.end is not None:
            return
        me = self._agent.me
        cause = Cause(
            failure_class="process_crash",
            node_id=me.node_id,
            incarnation=me.incarnation,
            host=me.host,
            detail="torch found a worker failed and restarts the group",
            rank=(outcome.slot or 0) * self._local_world_size,
            local_rank=0,
        )
        self._crew.add_evidence(cause, "primary", now_ms())

    def _finish_unwatched(self, torch_state: str) -> None:
        """Workers that we did not start and that torch saw succeed: it counts, and the others' is awaited."""
        if torch_state != "succeeded" or self._crew.pids() or self._over() is not None:
            return
        self._crew.succeeded = self._crew.generation
        self._poke()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or (self._outcome is not None and self._outcome.end is not None),
                self.options.join_timeout_s,
            )

    def _unkillable_end(self) -> End:
        pids = ", ".join(map(str, self._crew.unkillable))
        reason = f"processes of this node's workers can not be killed (pid {pids}): the node is unfit"
        me = self._agent.me
        cause = Cause(
            failure_class="node_unhealthy", node_id=me.node_id, incarnation=me.incarnation, host=me.host, detail=reason
        )
        self._crew.add_evidence(cause, "primary", now_ms(), fit=False)
        return End(exit_code=int(ExitCode.QUARANTINED), reason=reason)

    def _part_from_store(self) -> None:
        """The last agent's goodbye ends the store process, or removes the store's file."""
        if isinstance(self._store, TcpStore):
            self._store.bye(timeout_ms=1_000)
        elif isinstance(self._store, FileStore):
            self._store.delete()
        self._store.close()

    def _reap_server(self) -> None:
        """The store process ends by itself when the last agent has left; it is not waited for beyond a moment."""
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _settings(self, address: str, incarnation: str, local_world_size: int, role: str) -> Settings:
        beat = self.policy.heartbeat
        process = psutil.Process()
        me = Member(
            node_id=self.node_id,
            incarnation=incarnation,
            address=address,
            host=self._host,
            boot_id=self._boot_id,
            pid=process.pid,
            pid_start=process.create_time(),
            failure_domain=self.options.failure_domain or self.node_id,
            state_dir=str(self.state_dir),
        )
        config = RunConfig(
            min_nodes=self.options.min_nodes,
            max_nodes=self.options.max_nodes,
            local_world_size=local_world_size,
            role=role,
            heartbeat_interval_ms=round(beat.interval_s * 1000),
            heartbeat_timeout_ms=round(beat.timeout_s * 1000),
            policy=_policy_text(self.policy) if self._attach else None,
            written_by=self.node_id,
            version=__version__,
        )
        return Settings(
            keys=Keys(run=self.options.run_key),
            me=me,
            config=config,
            recovery=self.policy.recovery,
            join_timeout_ms=round(self.options.join_timeout_s * 1000),
            form_timeout_ms=round((FORM_TIMEOUT_S + self.policy.workers.stop_grace_s) * 1000),
        )

    def _new_incarnation(self) -> str:
        return uuid.uuid4().hex[:16]

    def _process_is_dead(self, member: Member) -> bool:
        """Only of a process on this very boot and in this process namespace can it be known."""
        if member.boot_id != self._boot_id or not self._boot_id:
            return False
        try:
            process = psutil.Process(member.pid)
            return abs(process.create_time() - member.pid_start) > 1.0 or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def _helpers(self) -> list[tuple[Any, str]]:
        return [(self._watch, "lmres-watch"), (self._pulse, "lmres-pulse")]

    # -- control thread -----------------------------------------------------------------------------------------------

    def _poke(self) -> None:
        self._wake.put(None)

    def _run(self) -> None:
        try:
            while not self._left.is_set():
                outcome = self._round()
                self._apply(outcome)
                self._sleep(outcome.next_ms / 1000)
        except BaseException as error:
            self._fail(error)

    def _sleep(self, seconds: float) -> None:
        """Until woken; a burst of news is taken as one."""
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=max(MIN_ROUND_S, seconds))
            time.sleep(MIN_ROUND_S)
            while True:
                self._wake.get_nowait()

    def _round(self) -> Outcome:
        """One whole round, tried again while the store does not answer. Raises StoreLost when that lasts too long."""
        outage = _Outage(read_timeout_s=self.options.read_timeout_s, leaving=lambda: self._leave is not None)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=min(0.5, self.policy.heartbeat.interval_s)),
            stop=outage.is_too_long,
            before_sleep=outage.note,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            outcome: Outcome = retrying(self._attempt)
        except StoreUnavailable as error:
            raise StoreLost(
                f"the store at {self.options.endpoint} has been out of reach for {outage.lasted_s():.0f} s: {error}"
            ) from error
        outage.over()
        return outcome

    def _attempt(self) -> Outcome:
        inputs = self._inputs()
        steps = self._agent.round(inputs)
        timeout_ms = max(500, min(2_000, round(self.policy.heartbeat.timeout_s * 400)))
        try:
            txn = next(steps)
            while True:
                txn = steps.send(self._store.transact(txn, timeout_ms=timeout_ms))
        except StopIteration as stop:
            outcome: Outcome = stop.value
            if inputs.leave is not None:
                self._left.set()
            return outcome
        finally:
            steps.close()

    def _inputs(self) -> Inputs:
        crew = self._crew
        port = self._port
        return Inputs(
            now_ms=now_ms(),
            waiting=self._waiting and port is not None,
            workers_generation=crew.generation,
            workers_alive=crew.alive,
            succeeded=crew.succeeded,
            restarts_left=self._restarts_left,
            master_port=port.getsockname()[1] if port is not None else 0,
            step=crew.step,
            faults=crew.faults,
            recovered=self._recovered,
            leave=self._leave,
        )

    def _apply(self, outcome: Outcome) -> None:
        for note in outcome.notes:
            self._tell(note)
        self._tell_standing(outcome)
        self._tell_started(outcome)
        self._mark(outcome)
        if outcome.end is not None and outcome.end.run_over and outcome.end.exit_code == 0:
            self._crew.show_success()
        elif self._must_stop(outcome):
            self._crew.stop(generation=outcome.workers_generation)
        if outcome.end is not None:
            self._tell_end(outcome.end)
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Whatever ended a thread of ours: kept for the main thread, workers stopped."""
        if isinstance(error, StoreError) and not isinstance(error, StoreLost):
            error = StoreLost(f"the store at {self.options.endpoint} can not be used any more: {error}")
        if isinstance(error, StoreLost):
            log.error("%s; the workers are stopped", error)
            me = self._agent.me
            self.events.emit(
                "fault_detected",
                self._crew.generation,
                failure_class="store_lost",
                suspects=[],
                verdict="attributed",
                evidence=[{"reporter": me.node_id}],
                detail=str(error),
            )
        elif not isinstance(error, LmresError):
            log.error("a thread of lmres has died", exc_info=error)
        self._left.set()
        self._crew.stop()
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- other threads ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wakes the control thread when the store changes; while the store is out of reach it just tries again."""
        keys = self._agent.keys
        while not self._closing.is_set() and not self._left.is_set():
            after = self._agent.view.revision
            try:
                if self._watch_store.wait((keys.ctl, keys.reg), after_revision=after, timeout_ms=WATCH_MS):
                    self._poke()
                    self._closing.wait(self._watch_pause_s())
            except StoreError:
                self._closing.wait(self.policy.heartbeat.interval_s)

    def _watch_pause_s(self) -> float:
        """Longer in a larger run, where a burst of records would wake everybody for each."""
        return min(0.1, 0.004 * max(2, len(self._agent.view.live_members())))

    def _pulse(self) -> None:
        interval_s = min(self.policy.heartbeat.interval_s, self.policy.heartbeat.timeout_s / 4)
        while not self._closing.wait(interval_s):
            self._guardian.pulse()
            silent_s = self._guardian.take_fenced()
            if silent_s is not None:
                log.warning("this agent was frozen for %.1f s; its workers were killed in the meantime", silent_s)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell(self, note: Note) -> None:
        fields = dict(note.fields)
        generation = int(fields.pop("generation", self._agent_generation()))
        self.events.emit(note.event, generation, **fields)
        if note.event == "fault_detected":
            for suspect in (*fields["suspects"], {"node_id": ""}):
                self._noticed.setdefault((generation, suspect["node_id"]), now_ms())
            log.warning("fault in generation %d: %s: %s", generation, fields["failure_class"], fields["detail"])
        elif note.event == "plan_committed":
            log.info(
                "plan %s: %s, active %s, standby %s: %s",
                fields["plan_id"],
                fields["action"],
                fields["active"],
                fields["standby"],
                fields["reason"],
            )

    def _agent_generation(self) -> int:
        head = self._agent.view.head()
        return head.generation if head is not None else 0

    def _tell_standing(self, outcome: Outcome) -> None:
        if outcome.standing != self._standing:
            self._standing = outcome.standing
            if outcome.standing in ("standby", "quarantined") and self._agent_generation() > 0:
                reason = outcome.standing if outcome.standing == "standby" else outcome.waiting_for
                me = self._agent.me
                self.events.emit("agent_parked", self._agent_generation(), address=me.address, reason=reason)
                log.info("parked as %s", outcome.standing)
        shown = f"{outcome.standing}: {outcome.waiting_for}"
        if shown != self._shown and outcome.standing != "ended":
            self._shown = shown
            log.debug("%s", shown)

    def _tell_started(self, outcome: Outcome) -> None:
        crew, plan, slot = self._crew, outcome.plan, outcome.slot
        if crew.started_ms is None or plan is None or slot is None or plan.generation != crew.generation:
            return
        if self._started_told < crew.generation:
            self._started_told = crew.generation
            size, pids = self._local_world_size, crew.pids()
            self.events.emit(
                "generation_started",
                crew.generation,
                slot=slot,
                world_size=len(plan.active) * size,
                ranks=[slot * size + local_rank for local_rank in sorted(pids)],
                pids=[pids[local_rank] for local_rank in sorted(pids)],
                resume_step=plan.recovery_step,
            )

    def _tell_end(self, end: End | None = None) -> None:
        if self._finished_told or end is None or not end.run_over:
            return
        self._finished_told = True
        outcome = "succeeded" if end.exit_code == 0 else "failed"
        self.events.emit("run_finished", self._agent_generation(), outcome=outcome, reason=end.reason)

    def _worker_note(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Reports of the bootstrap, in the monitor's thread."""
        kind, generation = message.get("kind"), worker.place.generation
        if kind == "attached":
            self.events.emit(
                "protection_armed",
                generation,
                adapter="python",
                parts=["first_cause", "progress"],
                reason="attached",
                rank=worker.place.rank,
            )
        elif kind == "first_step" and generation == self._crew.generation:
            step = message.get("step")
            self.events.emit("training_resumed", generation, rank=worker.place.rank, step=step)
            self._first_steps.add(worker.place.local_rank)
            if len(self._first_steps) == self._local_world_size and self._marks is not None:
                self._marks.first_step_ms = now_ms()
                self._poke()

    def _mark(self, outcome: Outcome) -> None:
        """Keeps the moments of a recovery, and reports it when the new workers have made their first step."""
        crew, plan = self._crew, outcome.plan
        if plan is not None and plan.from_generation > 0 and plan.action in ("restart", "replace"):
            if self._marked_generation < plan.generation:
                self._report_recovery()
                self._marked_generation = plan.generation
                now = now_ms()
                cause = plan.cause.headline() if plan.cause is not None else plan.reason
                self._marks = Marks(
                    generation=plan.generation,
                    cause=cause,
                    detect_ms=plan.cause.detect_ms if plan.cause is not None else None,
                    noticed_ms=self._noticed_ms(plan, now),
                    planned_ms=now,
                )
            if self._marks is not None and crew.generation < plan.generation and crew.stopped_ms is not None:
                self._marks.stopped_ms = crew.stopped_ms
        marks = self._marks
        if marks is not None and crew.generation == marks.generation and crew.started_ms is not None:
            marks.started_ms = crew.started_ms
            if marks.first_step_ms is not None or not self._attach:
                self._report_recovery()

    def _noticed_ms(self, plan: Plan, now: int) -> int:
        """When this agent first knew of the plan's cause."""
        blamed = plan.cause.node_id if plan.cause is not None and plan.verdict == "attributed" else ""
        any_fault = self._noticed.get((plan.from_generation, ""), now)
        return self._noticed.get((plan.from_generation, blamed), any_fault)

    def _report_recovery(self) -> None:
        marks, self._marks = self._marks, None
        if marks is None or marks.started_ms is None:
            return
        phases = marks.phases()
        self.events.emit("recovery_completed", marks.generation, cause=marks.cause, **phases)
        record = Recovered(generation=marks.generation, node_id=self.node_id, cause=marks.cause, phases=phases)
        self._recovered = (*self._recovered, record)
        if phases["total_s"] is not None:
            log.info("recovered in %.2f s (generation %d)", phases["total_s"], marks.generation)


class _Outage:
    """How long the store has not answered in one round, and when that is too long."""

    def __init__(self, *, read_timeout_s: float, leaving: Any) -> None:
        self._limit_s = read_timeout_s
        self._leaving = leaving
        self._began = time.monotonic()
        self._leaving_since: float | None = None
        self._refused_since: float | None = None
        self._noted = False

    def lasted_s(self) -> float:
        return time.monotonic() - self._began

    def is_too_long(self, state: tenacity.RetryCallState) -> bool:
        now = time.monotonic()
        error = state.outcome.exception() if state.outcome is not None else None
        if not isinstance(error, StoreRefused):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if self._leaving():
            self._leaving_since = self._leaving_since if self._leaving_since is not None else now
            if now - self._leaving_since >= LEAVE_S:
                return True
        refused = self._refused_since is not None and now - self._refused_since >= min(REFUSED_S, self._limit_s)
        return refused or now - self._began >= self._limit_s

    def note(self, state: tenacity.RetryCallState) -> None:
        if not self._noted:
            self._noted = True
            error = state.outcome.exception() if state.outcome is not None else None
            log.warning("the store does not answer (%s); trying again for up to %.0f s", error, self._limit_s)

    def over(self) -> None:
        if self._noted:
            log.warning("the store answers again after %.1f s", self.lasted_s())


def _policy_text(policy: Policy) -> str:
    import json

    return json.dumps(policy_to_dict(policy), sort_keys=True)


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
