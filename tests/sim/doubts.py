"""What is wrong though nothing has failed yet: hosts that are not fit, slow ranks, states that are not to be trusted.

The checks and the detectors are played: each says what the shipped ones would say, in the records that they have. In
about half of the seeds nothing is ever found, so that those seeds mean what they always meant.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmres.gemini.inventory import Key
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.state import Evidence, Health
from lmres.scout.localize import Suspect

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.world import World

_REASONS = ("disk: 40 MB free", "ECC errors", "the command said: NVLink down")


@dataclass(frozen=True, slots=True)
class Taint:
    """States newer than ``trusted`` that were captured up to ``origin`` are not to be restored."""

    epoch: int
    trusted: Key
    origin: int

    def covers(self, key: Key) -> bool:
        return key > self.trusted and key.origin <= self.origin


@dataclass(slots=True)
class Doubts:
    """``unfit``: by process name; ``sick_hosts``: whoever starts there is unfit before it joins."""

    world: World
    on: bool
    chance: random.Random
    unfit: dict[str, str] = field(default_factory=dict)
    sick_hosts: set[str] = field(default_factory=set)
    taints: list[Taint] = field(default_factory=list)

    @staticmethod
    def of(world: World) -> Doubts:
        chance = random.Random(f"doubts of {world.seed}")
        on = chance.random() < 0.5 and world.scenario.theme != "large"
        found = Doubts(world=world, on=on, chance=chance)
        if on and chance.random() < 0.2:
            found.sick_hosts.add(f"n{chance.randint(0, 3)}")
        return found

    # -- hosts --------------------------------------------------------------------------------------------------------

    def health(self, process: Process) -> Health | None:
        """What the checks on its host say now."""
        if not self.on:
            return None
        reason = self.unfit.get(process.name, _REASONS[0] if process.host.name in self.sick_hosts else "")
        me = process.agent.me
        return Health(node_id=me.node_id, incarnation=me.incarnation, fit=not reason, reason=reason)

    def sicken(self, process: Process) -> None:
        self.unfit[process.name] = self.chance.choice(_REASONS)
        self.world.log(f"FAULT the host of {process.name} is unfit")
        process.wake(1)

    def heal(self, process: Process) -> None:
        if process.alive and not self.world.calm:
            self.world.log(f"the host of {process.name} is fit again")
            self.unfit[process.name] = ""
            process.wake(1)

    def is_unfit(self, process: Process) -> bool:
        health = self.health(process)
        return health is not None and not health.fit

    # -- states -------------------------------------------------------------------------------------------------------

    def learned(self, plan: Plan) -> None:
        """A plan was made from evidence that says which states are not to be trusted: from then on all know."""
        oracle = self.world.oracle
        before = oracle.plan(plan.from_generation)
        for evidence in oracle.read(plan).evidence if before is not None else ():
            if evidence.reaction == "recover" and evidence.trusted is not None and before is not None:
                self.taints.append(Taint(oracle.epoch, Key(*evidence.trusted), before.origin))

    def is_distrusted(self, key: Key) -> bool:
        """Whether this state must not be restored any more."""
        return any(t.covers(key) for t in self.taints if t.epoch == self.world.oracle.epoch)

    # -- detectors ----------------------------------------------------------------------------------------------------

    def find(
        self,
        by: Process,
        suspect: tuple[Process, Workers],
        failure_class: Literal["straggler", "silent_corruption"],
        *,
        reaction: Literal["recover", "replace", "report"],
        evict: bool = False,
        trusted: Key | None = None,
        attributed: bool = True,
        or_else: tuple[Process, Workers] | None = None,
    ) -> None:
        """``by`` has found something about a worker of its group, and says so. ``or_else``: it may be that one too."""
        process, workers = suspect
        named = process if attributed else by  # where nobody is suspected, who says so names itself
        cause = Cause(
            failure_class=failure_class,
            node_id=named.node_id,
            incarnation=named.agent.me.incarnation,
            host=named.host.name,
            detail=f"{failure_class} found",
            rank=workers.slot if attributed else None,
            local_rank=0 if attributed else None,
            step=self.world.program.step,
            suspects=tuple(Suspect(node_id=p.node_id, rank=w.slot) for p, w in (suspect, or_else)) if or_else else (),
        )
        evidence = Evidence(
            generation=workers.generation,
            reporter=by.node_id,
            incarnation=by.agent.me.incarnation,
            weight="primary",
            cause=cause,
            boot_id=by.host.boot_id,
            at_ms=by.clock_ms,
            reaction=reaction,
            evict=evict,
            trusted=tuple(trusted) if trusted is not None else None,  # type: ignore[arg-type]
            attributed=attributed,
        )
        by.faults = (*by.faults, evidence)
        if reaction == "recover":
            self.world.oracle.failed(workers.group)
        words = f"{reaction}{' and evict' if evict else ''}{'' if attributed else ', inconclusive'}"
        self.world.log(f"FAULT {by.name} finds {failure_class} on {process.name}: {words}, trusted {trusted}")
        by.wake(1)
