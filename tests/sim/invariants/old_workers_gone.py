"""A group starts only when the old workers of all its nodes are gone."""

from tests.sim.oracle import Invariant
from tests.sim.process import Process


class OldWorkersGone(Invariant):
    def starts(self, process: Process, generation: int, slot: int) -> None:
        plan = self.oracle.plan(generation, known_to=process)
        named = {n.incarnation for n in plan.active} if plan is not None else set()
        for other in self.world.living():
            old = other.workers
            if old is not None and old.alive and old.generation < generation and other.agent.me.incarnation in named:
                self.fail(f"{process.name} starts generation {generation}, {other.name} still runs {old.generation}")
