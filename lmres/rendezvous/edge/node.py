"""A node at run time: the threads around the protocol's rounds.

- the *control* thread runs the rounds against the store, one at a time, and carries out what they say;
- the *watch* thread waits at the store for changes and wakes the control thread (a hint, nothing depends on it);
- the *pulse* thread tells the guardian that this process is not frozen;
- the *neighbours* thread keeps connections to other agents, whose end is evidence;
- the workers' monitor sees exits and reports.

torch's main thread only waits in ``next_group`` and asks for a ``verdict``. Whatever ends one of these threads is kept
and handed to the main thread, which ends the agent; its workers are stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmres.adapters.bootstrap import protect
from lmres.errors import ConfigError, ExitCode, LmresError, StoreError, StoreLost
from lmres.ids import Keys
from lmres.policy import Policy
from lmres.ports import Store
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.codec import to_plain
from lmres.rendezvous.edge import safekeeping, torch_agent
from lmres.rendezvous.edge.connect import connect
from lmres.rendezvous.edge.crew import Crew, now_ms
from lmres.rendezvous.edge.detectors import Detectors
from lmres.rendezvous.edge.driver import LEAVE_S, Driver
from lmres.rendezvous.edge.events import EventLog
from lmres.rendezvous.edge.host import default_node_id, read_host_identity
from lmres.rendezvous.edge.master_port import MasterPort
from lmres.rendezvous.edge.narrator import Narrator
from lmres.rendezvous.edge.neighbours import Neighbours
from lmres.rendezvous.edge.registration import boot_name, make_member, make_settings, process_is_dead
from lmres.rendezvous.edge.shared_imports import SharedImports
from lmres.rendezvous.edge.state_dir import default_state_dir, lock_state_dir, prepare_state_dir, write_private_json
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.tcp import TcpStore
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.edge.workers.warm import WarmPool
from lmres.rendezvous.edge.workers.warm_fit import Launch
from lmres.rendezvous.options import Options
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import End, Inputs, Leave, Outcome

log = logging.getLogger("lmres")

WATCH_MS = 10_000
FORM_TIMEOUT_S = 60.0
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
        self._boot = boot_name(identity)
        folder = options.state_dir or default_state_dir(run_id=options.run_id, node_id=self.node_id)
        self.state_dir = prepare_state_dir(Path(folder))
        self._state_lock = lock_state_dir(self.state_dir)
        context = options.restart_context_path
        self.context_path = Path(context) if context is not None else self.state_dir / "restart_context.json"
        self.events = EventLog(self.state_dir / "events.jsonl", run_id=options.run_id, node_id=self.node_id)
        self._token = uuid.uuid4().hex
        self._warm: WarmPool | None = None
        self._imports: SharedImports | None = None
        self._safe: safekeeping.Safekeeping | None = None
        self._parked = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._left = threading.Event()
        self._leave: Leave | None = None
        self._waiting = False
        self._port = MasterPort()
        self._members = 0
        self._observer = True
        self._revision = 0
        self._restarts_left: int | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._at_exit = False

    # -- main thread --------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        local_world_size: int,
        role: str,
        event_handler: str,
        launches: Mapping[int, Launch],
        on_worker_start: Callable[[], None],
    ) -> None:
        """Connects to the store and starts the threads. Raises ConfigError or StoreLost.

        ``launches``: what torch will start, by local rank, as far as it can be told beforehand.
        """
        self.events.destination = event_handler
        os.environ["LMRES_RUN_ID"] = self.options.run_id  # also marks the store process and the guardian
        self._local_world_size = local_world_size
        incarnation = _new_incarnation()
        connection = connect(self.options, client_id=incarnation, state_dir=self.state_dir)
        self._store: Store = connection.store
        self._watch_store: Store = connection.store.clone()
        self._server: subprocess.Popen[bytes] | None = connection.server
        self._neighbours = Neighbours(run=self.options.run_key, address=connection.address, poke=self._poke)
        me = make_member(
            node_id=self.node_id,
            incarnation=incarnation,
            address=connection.address,
            host=self._host,
            boot=self._boot,
            failure_domain=self.options.failure_domain or self.node_id,
            state_dir=self.state_dir,
            pulse_port=self._neighbours.port,
        )
        self._agent = Agent(
            settings=make_settings(
                self.options,
                self.policy,
                with_policy=self._attach,
                me=me,
                local_world_size=local_world_size,
                role=role,
            ),
            new_incarnation=_new_incarnation,
            process_is_dead=lambda member: process_is_dead(member, self._boot),
        )
        beat = self.policy.heartbeat
        self._narrator = Narrator(
            agent=self._agent,
            events=self.events,
            local_world_size=local_world_size,
            attach=self._attach,
            poke=self._poke,
        )
        self._driver = Driver(
            agent=self._agent,
            store=self._store,
            inputs=self._inputs,
            sleep=self._sleep,
            endpoint=self.options.endpoint,
            read_timeout_s=self.options.read_timeout_s,
            heartbeat_interval_s=beat.interval_s,
            heartbeat_timeout_s=beat.timeout_s,
        )
        self._guardian = Guardian(token=self._token, timeout_s=beat.timeout_s, on_problem=log.warning)
        if self._attach and self.policy.workers.warm:
            self._warm = WarmPool(
                token_length=len(self._token), on_spawn=self._guardian.register, on_gone=self._guardian.unregister
            )
            self._warm.expect(launches)
            self._imports = SharedImports(warm=self._warm, store=self._store, key=lambda: self._agent.keys.imports)
        if Checkpointing.of(self.policy if self._attach else None).enabled:
            self._safe = safekeeping.Safekeeping(
                policy=self.policy,
                run_id=self.options.run_id,
                me=lambda: self._agent.me,
                local_world_size=local_world_size,
                state_dir=self.state_dir,
                on_event=self._vault_told,
                poke=self._poke,
            )
            self._safe.start()
        self._crew = Crew(
            token=self._token,
            me=lambda: self._agent.me,
            grace_s=self.policy.workers.stop_grace_s,
            attach=self._attach,
            guardian=self._guardian,
            warm=self._warm,
            on_change=self._poke,
            on_note=self._narrator.worker_note,
            on_error=self._fail,
            on_start=on_worker_start,
        )
        self._detectors = Detectors(
            self.policy,
            on=self._attach and self.policy.detection.enabled,
            agent=self._agent,
            crew=self._crew,
            guardian=self._guardian,
            events=self.events,
            run_id=self.options.run_id,
            state_dir=self.state_dir,
            local_world_size=local_world_size,
            poke=self._poke,
        )
        self._guardian.start()
        self._crew.start()
        self._neighbours.start()
        atexit.register(self.close, "exit")
        self._control = threading.Thread(target=self._run, name="lmres-control", daemon=True)
        watch = threading.Thread(target=self._guarded(self._watch), name="lmres-watch", daemon=True)
        pulse = threading.Thread(target=self._guarded(self._pulse), name="lmres-pulse", daemon=True)
        pulse.start()
        self._detectors.start()  # may take a while: the guardian must not think that this process is frozen
        for thread in (self._control, watch):
            thread.start()

    def _vault_told(self, kind: str, fields: Mapping[str, Any]) -> None:
        """In the vault's thread."""
        self._narrator.vault_note(kind, fields)
        if kind == "corruption":
            self._detectors.accuse(fields)

    def next_group(self, restarts_left: int | None) -> Group | End:
        """Blocks until this node is in a formed group, or its end has come. Raises what ended the control thread."""
        self._blame_unseen_restart()
        with self._changed:
            self._restarts_left = restarts_left
            self._port.reserve(self._agent.me.address)
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
        if self._crew.unkillable:
            return self._unkillable_end()
        ended = self._over()
        if ended is not None and ended.exit_code != 0:
            self._crew.stop()
            return False if self._crew.alive else ended
        outcome = self._outcome
        if outcome is None or ended is not None or not self._must_stop(outcome) or self._crew.alive:
            return False
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
        """Says goodbye and ends everything this agent started. Idempotent, bounded, never raises."""
        if self._closed or not hasattr(self, "_control"):
            return
        self._closed = True
        self._at_exit = torch_state == "exit"
        steps: tuple[Callable[[], object], ...] = (
            lambda: self._finish_unwatched(torch_state),
            lambda: self._say_goodbye(torch_state),
            self._crew.stop,
            self._join_control,
            lambda: self._crew.join_stop(self.policy.workers.stop_grace_s + CLOSE_S),
            self._tell_left,
            self._crew.close,
            self._detectors.close,
            self._neighbours.close,
            self._close_vault,
            self._guardian.close,
            self._watch_store.close,
            self._part_from_store,
            self._port.free,
            self._reap_server,
            self.events.close,
        )
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("a step of this agent's end failed; the others follow")

    def _say_goodbye(self, torch_state: str) -> None:
        over = self._outcome is not None and self._outcome.end is not None and self._outcome.end.run_over
        if self._leave is None:
            reason = "the run is over" if over else f"the agent ended ({torch_state})"
            self._leave = Leave(reason=reason, planned=over)
        self._closing.set()
        self._poke()

    def _join_control(self) -> None:
        if self._control.is_alive():  # not before the host has been looked at
            self._control.join(LEAVE_S + 2.0)

    def _close_vault(self) -> None:
        if self._safe is not None:
            self._safe.close()

    def _tell_left(self) -> None:
        me, leave = self._agent.me, self._leave
        reason = leave.reason if leave is not None else ""
        head = self._agent.view.head()
        generation = head.generation if head is not None else 0
        self.events.emit("agent_left", generation, address=me.address, reason=reason)
        if self._at_exit:
            torch_agent.ignore_signals()  # a second one would end the interpreter on its way out

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
        if self._safe is not None:
            self._safe.begin(safekeeping.scene_of(outcome.plan, outcome.slot, self._agent.view))
            env[protect.VARIABLE] = self._safe.settings(outcome.plan).encode()
        env |= self._detectors.worker_env()
        self._narrator.formed(group.generation)
        plan = outcome.plan
        restored = (plan.recovery_step, plan.recovery_origin) if plan.recovery_step else None
        self._crew.begin(group.generation, self._local_world_size, env, restored=restored, origin=plan.origin)
        self._detectors.begin(plan, group.slot)
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
        except (OSError, ConfigError) as error:
            log.warning("the restart context can not be written, workers go on without it: %s", error)
            with contextlib.suppress(OSError):
                self.context_path.unlink()  # an older plan's would be taken for this one's

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

    # -- control thread -----------------------------------------------------------------------------------------------

    def _poke(self) -> None:
        self._wake.put(None)

    def _run(self) -> None:
        try:
            while not self._left.is_set():
                outcome, inputs = self._driver.round()
                self._apply(outcome)
                if inputs.leave is not None:
                    break
                self._sleep(outcome.next_ms / 1000)
            self._left.set()
        except BaseException as error:
            self._fail(error)

    def _sleep(self, seconds: float) -> None:
        """Until woken; a burst of news is taken as one."""
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=max(MIN_ROUND_S, seconds))
            time.sleep(MIN_ROUND_S)
            while True:
                self._wake.get_nowait()

    def _inputs(self) -> Inputs:
        crew = self._crew
        return Inputs(
            now_ms=now_ms(),
            waiting=self._waiting,
            workers_generation=crew.generation,
            workers_alive=crew.alive,
            succeeded=crew.succeeded,
            restarts_left=self._restarts_left,
            master_port=self._port.number,
            step=crew.step,
            faults=crew.faults,
            recovered=self._narrator.recovered,
            holdings=self._safe.holdings if self._safe is not None else None,
            banned=crew.banned,
            keeping=self._safe.keeping if self._safe is not None else None,
            broken=self._neighbours.broken,
            paused=crew.paused,
            sighting=self._detectors.sighting,
            health=self._detectors.health,
            paces=self._detectors.paces,
            leave=self._leave,
        )

    def _apply(self, outcome: Outcome) -> None:
        if self._safe is not None:
            config = self._agent.view.config
            if config is not None and self._agent.ledger.registered:
                self._safe.confirm(config.token)
            if outcome.plan is not None:
                scene = safekeeping.scene_of(outcome.plan, outcome.slot, self._agent.view)
                self._safe.follow(scene)
                self._safe.mind(scene)
                if outcome.freeze is None and outcome.end is None:
                    self._safe.thaw(scene)
            if outcome.freeze is not None:
                self._safe.freeze(outcome.freeze)
        if outcome.plan is not None and outcome.plan.generation == self._crew.generation:
            self._crew.pause(outcome.pause)  # of an older generation the workers stand until they are stopped
        self._detectors.follow(outcome)
        self._neighbours.follow(self._agent.me, self._agent.view.live_members())
        self._narrator.tell(outcome, self._crew)
        parked = outcome.standing == "standby" and outcome.plan is not None
        if parked and not self._parked and self._warm is not None:
            self._warm.refill(paced=False)  # nothing else runs here
        self._parked = parked
        if outcome.end is not None and outcome.end.run_over and outcome.end.exit_code == 0:
            self._crew.show_success()
        elif self._must_stop(outcome):
            self._crew.stop(generation=outcome.workers_generation)
        self._observer = not self._agent.ledger.registered or self._agent.ledger.observer_index() is not None
        self._members, self._revision = len(self._agent.view.live_members()), self._agent.view.revision
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()
        if self._imports is not None:
            self._imports.follow(outcome, now_ms())

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
            try:
                found = self._watch_store.wait(self._watched(keys), after_revision=self._revision, timeout_ms=WATCH_MS)
                if found:
                    self._poke()
                    self._closing.wait(self._watch_pause_s())
            except StoreError:
                self._closing.wait(self.policy.heartbeat.interval_s)

    def _watch_pause_s(self) -> float:
        """Longer in a larger run, where a burst of records would wake everybody for each."""
        return min(0.1, 0.004 * max(2, self._members))

    def _watched(self, keys: Keys) -> tuple[str, ...]:
        """Only those that decide are woken by registrations and evidence; the others see them with their heartbeat."""
        return (keys.ctl, keys.reg) if self._observer else (keys.ctl,)

    def _pulse(self) -> None:
        interval_s = min(self.policy.heartbeat.interval_s, self.policy.heartbeat.timeout_s / 4)
        while not self._closing.wait(interval_s):
            self._guardian.pulse()
            silent_s = self._guardian.take_fenced()
            if silent_s is not None:
                log.warning("this agent was frozen for %.1f s; its workers were killed in the meantime", silent_s)

    def _guarded(self, body: Callable[[], None]) -> Callable[[], None]:
        """A thread's body whose error is not lost."""

        def run() -> None:
            try:
                body()
            except BaseException as error:
                self._fail(error)

        return run


def _new_incarnation() -> str:
    return uuid.uuid4().hex[:16]
