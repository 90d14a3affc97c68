"""Everything at a node that looks for failures which leave no crash, and brings what it finds to the protocol.

- ``Scouting``: hangs and stragglers, from the workers' progress pages;
- ``Fitness``: the health of the host;
- what the vaults find to differ between equals (``lmres.rendezvous.corruption``).

There are none without a policy, or with ``detection.enabled: false``; all methods then do nothing.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmres.adapters import watch
from lmres.policy import Policy
from lmres.rendezvous import corruption
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.edge.crew import Crew, now_ms
from lmres.rendezvous.edge.events import EventLog
from lmres.rendezvous.edge.fitness import Fitness
from lmres.rendezvous.edge.scouting import Scouting, in_place_of_slow
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import Outcome
from lmres.rendezvous.state import Health
from lmres.scout.sighting import Pace, Sighting

log = logging.getLogger("lmres")


class Detectors:
    """Owned by the node. ``on``: the user wants them, and the workers have the bootstrap."""

    def __init__(
        self,
        policy: Policy,
        *,
        on: bool,
        agent: Agent,
        crew: Crew,
        guardian: Guardian,
        events: EventLog,
        run_id: str,
        state_dir: Path,
        local_world_size: int,
        poke: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._agent = agent
        self._crew = crew
        self._events = events
        self._poke = poke
        self._found: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        self._judges = True
        self._local_world_size = local_world_size
        self._fitness: Fitness | None = None
        self._scouting: Scouting | None = None
        self._replaced: tuple[int, frozenset[str]] = (0, frozenset())
        if on:
            self._fitness = Fitness(
                policy.detection.health,
                run_id=run_id,
                me=lambda: agent.me,
                state_dir=state_dir,
                guardian=guardian,
                events=events,
                generation=lambda: crew.generation,
                has_workers=lambda: crew.alive,
                poke=poke,
            )
            self._scouting = Scouting(
                detection=policy.detection,
                crew=crew,
                me=lambda: agent.me,
                member=lambda node_id: agent.view.member(node_id),  # noqa: PLW0108 (the view may be a new one)
                poke=poke,
                emit=events.emit,
            )

    def start(self) -> None:
        """The host is looked at once before it asks for a place; bounded."""
        if self._scouting is not None and not Checkpointing.of(self._policy).enabled:
            reason = "equals are compared by their captured states, and none are captured (checkpoint, workers.resume)"
            self._events.emit("protection_off", 0, adapter="corruption", parts=["corruption"], reason=reason)
        if self._fitness is not None:
            self._fitness.start()

    def worker_env(self) -> dict[str, str]:
        return {watch.VARIABLE: watch.variable_text()} if self._scouting is not None else {}

    def begin(self, plan: Plan, slot: int) -> None:
        """The crew's next workers are those of this plan."""
        if self._scouting is not None:
            self._scouting.begin(plan.generation, slot=slot, ranks=len(plan.active) * self._local_world_size)

    def follow(self, outcome: Outcome) -> None:
        """After each round, in the control thread."""
        self._accuse()
        plan, leases = outcome.plan, self._agent.ledger.leases
        if self._fitness is not None and plan is not None:
            self._fitness.follow(plan.generation)
        if self._scouting is not None and plan is not None:
            if outcome.look is not None:
                self._scouting.look(outcome.look)
            if outcome.slot == 0 and plan.generation == self._crew.generation:
                mine = {self._agent.me.node_id: self._scouting.paces}
                self._scouting.paces_of_all({n.node_id: leases.paces(n.node_id) for n in plan.active} | mine)
                if self._replaced[0] != plan.generation:
                    self._replaced = (plan.generation, in_place_of_slow(self._agent.view.plans_after(0)))
                self._scouting.in_place_of_slow = self._replaced[1]

    def accuse(self, found: Mapping[str, Any]) -> None:
        """This node's vault is the hub, and has seen equals differ. In the vault's thread: judged after the next round,
        by the thread that the records belong to."""
        self._found.put((now_ms(), found))
        self._poke()

    def _accuse(self) -> None:
        while not self._found.empty():
            at_ms, found = self._found.get()
            try:
                self._charge(found, at_ms)
            except Exception as error:  # as strange as what was found may be, the agent goes on
                log.warning("what the vault has found could not be judged: %r", found, exc_info=True)
                if self._judges:
                    self._judges = False
                    self._events.emit(
                        "protection_off",
                        self._crew.generation,
                        adapter="corruption",
                        parts=["corruption"],
                        reason=f"what the vault has found could not be judged: {error!r}",
                    )

    def _charge(self, found: Mapping[str, Any], at_ms: int) -> None:
        view, crew = self._agent.view, self._crew
        plan = view.head()
        if plan is None or plan.generation != crew.generation or plan.origin != found["origin"]:
            return  # of a generation that is over
        charges = corruption.charges(
            found,
            plan=plan,
            before=next((p for p in view.plans_after(0) if p.generation == plan.from_generation), None),
            then=next((p for p in view.plans_after(0) if p.origin == found["then"]), None),
            member=view.member,
            me=self._agent.me,
            local_world_size=self._local_world_size,
            replace=self._policy.detection.corruption.action == "replace",
        )
        for charge in charges:
            crew.add_evidence(
                charge.cause,
                "primary",
                at_ms,
                reaction=charge.reaction,
                evict=charge.evict,
                trusted=charge.trusted,
                attributed=charge.attributed,
            )

    @property
    def health(self) -> Health | None:
        return self._fitness.record if self._fitness is not None else None

    @property
    def sighting(self) -> Sighting | None:
        return self._scouting.sighting if self._scouting is not None else None

    @property
    def paces(self) -> tuple[Pace, ...]:
        return self._scouting.paces if self._scouting is not None else ()

    def close(self) -> None:
        if self._scouting is not None:
            self._scouting.close()
        if self._fitness is not None:
            self._fitness.close()
