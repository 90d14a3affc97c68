"""A group trains only when all its ranks have restored one state, the one that its plan names."""

from lmres.gemini.inventory import Key
from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant
from tests.sim.process import Process, Workers


class SameState(Invariant):
    def trains(self, plan: Plan, group: dict[int, tuple[Process, Workers]]) -> None:
        if not self.world.states.on:
            return
        wanted = Key(plan.recovery_step, plan.recovery_origin)
        for slot, (process, _) in sorted(group.items()):
            if process.restored != wanted:
                self.fail(f"slot {slot} of {plan.plan_id} trains from {process.restored}, not from {wanted}")
