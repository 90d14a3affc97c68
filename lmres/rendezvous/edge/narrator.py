"""What an agent tells: events, log lines, and the phases of each recovery.

Called by the control thread after each round, and by the workers' monitor with their reports. Nothing here decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lmres.rendezvous.agent import Agent
from lmres.rendezvous.edge.crew import Crew, now_ms
from lmres.rendezvous.edge.events import EventLog
from lmres.rendezvous.edge.phases import Marks
from lmres.rendezvous.edge.workers.process import WorkerProcess
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.rounds import End, Note, Outcome
from lmres.rendezvous.state import Recovered
from lmres.scout.consensus import ranks

log = logging.getLogger("lmres")

FIRST_STEP_MS = 120_000
"""A program that has made no step by then has no optimizer of torch's: its recovery is reported without one."""


class Narrator:
    """``attach``: the workers report their steps. ``poke`` wakes the control thread."""

    def __init__(
        self, *, agent: Agent, events: EventLog, local_world_size: int, attach: bool, poke: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._events = events
        self._local_world_size = local_world_size
        self._attach = attach
        self._poke = poke
        self.recovered: tuple[Recovered, ...] = ()
        """For the store, in order."""
        self._marks: Marks | None = None
        self._marked_generation = 0
        self._noticed: dict[tuple[int, str], int] = {}
        self._first_steps: set[tuple[int, int]] = set()
        self._shown = ""
        self._standing = ""
        self._finished_told = False
        self._started_told = 0

    def tell(self, outcome: Outcome, crew: Crew) -> None:
        """After each round."""
        for note in outcome.notes:
            self._tell_note(note)
        self._tell_standing(outcome)
        self._tell_started(outcome, crew)
        self._mark(outcome, crew)
        if outcome.end is not None:
            self._tell_end(outcome.end)

    def formed(self, generation: int) -> None:
        """The main thread has left the rendezvous with this generation's group."""
        marks = self._marks
        if marks is not None and marks.generation == generation:
            marks.formed_ms = now_ms()

    def _tell_note(self, note: Note) -> None:
        fields = dict(note.fields)
        generation = int(fields.pop("generation", self._agent_generation()))
        self._events.emit(note.event, generation, **fields)
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
        # Before the first plan nobody is parked yet: any of those waiting may become active.
        standing = outcome.standing if self._agent_generation() > 0 else "joining"
        if standing != self._standing:
            self._standing = standing
            if standing in ("standby", "quarantined"):
                reason = standing if standing == "standby" else outcome.waiting_for
                me = self._agent.me
                self._events.emit("agent_parked", self._agent_generation(), address=me.address, reason=reason)
                log.info("parked as %s", standing)
        shown = f"{outcome.standing}: {outcome.waiting_for}"
        if shown != self._shown and outcome.standing != "ended":
            self._shown = shown
            early = self._agent_generation() == 0
            log.log(logging.WARNING if outcome.alert else logging.INFO if early else logging.DEBUG, "%s", shown)

    def _tell_started(self, outcome: Outcome, crew: Crew) -> None:
        plan, slot = outcome.plan, outcome.slot
        if crew.started_ms is None or plan is None or slot is None or plan.generation != crew.generation:
            return
        if self._started_told < crew.generation:
            self._started_told = crew.generation
            size, pids = self._local_world_size, crew.pids()
            self._events.emit(
                "generation_started",
                crew.generation,
                slot=slot,
                world_size=len(plan.active) * size,
                ranks=[slot * size + local_rank for local_rank in sorted(pids)],
                pids=[pids[local_rank] for local_rank in sorted(pids)],
                resume_step=plan.recovery_step,
            )

    def _tell_end(self, end: End) -> None:
        if self._finished_told or not end.run_over:
            return
        self._finished_told = True
        outcome = "succeeded" if end.exit_code == 0 else "failed"
        self._events.emit("run_finished", self._agent_generation(), outcome=outcome, reason=end.reason)

    def worker_note(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Reports of the bootstrap, in the monitor's thread."""
        kind, generation = message.get("kind"), worker.place.generation
        if kind == "attached":
            self._events.emit(
                "protection_armed",
                generation,
                adapter="python",
                parts=["first_cause", "progress"],
                reason="attached",
                rank=worker.place.rank,
            )
        elif kind in ("captured", "restored", "protection"):
            self._state_note(worker, message, generation)
        elif kind == "first_step" and isinstance(message.get("step"), int):
            self._events.emit("training_resumed", generation, rank=worker.place.rank, step=message["step"])
            self._first_steps.add((generation, worker.place.local_rank))
            marks = self._marks
            stepped = sum(g == generation for g, _ in self._first_steps)
            if stepped == self._local_world_size and marks is not None and marks.generation == generation:
                marks.first_step_ms = now_ms()
                self._poke()

    def _state_note(self, worker: WorkerProcess, message: dict[str, Any], generation: int) -> None:
        rank = worker.place.rank
        fields = {k: v for k, v in message.items() if k not in ("kind", "monotonic_ms", "armed")}
        if message["kind"] == "captured":
            self._events.emit("checkpoint_captured", generation, **{**fields, "rank": rank, "trust": "unverified"})
        elif message["kind"] == "restored":
            self._events.emit("checkpoint_restored", generation, **{**fields, "rank": rank})
            marks = self._marks
            if marks is not None and marks.generation == generation:
                marks.restored_ms = now_ms()
        elif message.get("armed") is True:
            self._events.emit("protection_armed", generation, **{"reason": "capturing", **fields, "rank": rank})
        elif generation == self._agent_generation():  # else a newer plan has ended it: its vault does not serve it now
            parts = {"adapter": "pytorch", "parts": ["checkpoint"], "reason": "unknown"}
            self._events.emit("protection_off", generation, **{**parts, **fields, "rank": rank})
            what = "what it computes is not compared" if "parts" in fields else "the training state is not protected"
            log.warning("rank %s: %s: %s", rank, what, fields.get("reason"))

    def vault_note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """What the vault tells, in its thread."""
        generation = self._agent_generation()
        if kind in ("problem", "gone", "refused"):
            reason = str(fields.get("reason", fields))
            log.warning("vault: %s", reason)
            self._events.emit("protection_off", generation, adapter="vault", parts=["checkpoint"], reason=reason)
        elif kind == "copies":
            reason = f": {fields['reason']}" if fields.get("reason") else ""
            log.info("vault: %s of %s copies of the state are kept%s", fields.get("held"), fields.get("wanted"), reason)
        elif kind == "verified":
            told = {name: fields.get(name) for name in ("step", "origin", "checks")}
            self._events.emit("checkpoint_verified", generation, **told)
        elif kind == "covered":
            self._covered_note(fields, generation)
        elif kind == "no_room":
            reason = f"no state is kept for what replay certifies: {fields.get('reason')}"
            log.warning("vault: %s", reason)
            self._events.emit("protection_off", generation, adapter="vault", parts=["anchor"], reason=reason)

    def _covered_note(self, fields: Mapping[str, Any], generation: int) -> None:
        """From the hub: whose states, or replays, can be compared."""
        what = "the state is" if fields["check"] == "state" else "replayed parts of the model are"
        if fields["ranks"]:
            reason = f"{what} compared between {ranks(fields['ranks'])}"
            self._events.emit("protection_armed", generation, adapter="vault", parts=["corruption"], reason=reason)
        if fields["alone"]:
            why = fields["reason"] or "nobody else has the same"
            reason = f"{what} not compared with anybody's on {ranks(fields['alone'])}: {why}"
            log.info("vault: %s", reason)
            self._events.emit("protection_off", generation, adapter="vault", parts=["corruption"], reason=reason)

    def _mark(self, outcome: Outcome, crew: Crew) -> None:
        """Keeps the moments of a recovery, and reports it when the new workers have made their first step."""
        plan = outcome.plan
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
            waited_ms = now_ms() - crew.started_ms
            if marks.first_step_ms is not None or not self._attach or waited_ms > FIRST_STEP_MS:
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
        self._events.emit("recovery_completed", marks.generation, cause=marks.cause, **phases)
        record = Recovered(
            generation=marks.generation, node_id=self._agent.me.node_id, cause=marks.cause, phases=phases
        )
        self.recovered = (*self.recovered, record)
        if marks.first_step_ms is None and self._attach:
            waited_ms = now_ms() - marks.started_ms
            until = " before the next plan" if waited_ms < FIRST_STEP_MS else ""
            log.info("generation %d: no optimizer step was seen in %.0f s%s", marks.generation, waited_ms / 1000, until)
        elif phases["total_s"] is not None:
            log.info("recovered in %.2f s (generation %d)", phases["total_s"], marks.generation)
