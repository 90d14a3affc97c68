"""Nobody gets a slot who has said that its host is unfit, as far as the deciding agent knew."""

from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant


class OnlyTheFit(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if plan.action == "stop":
            return
        before = {n.incarnation for n in previous.active} if previous is not None else set()
        for node in plan.active:
            if node.incarnation not in before and node.incarnation in self.oracle.read(plan).unfit:
                self.fail(f"{plan.plan_id} gives slot {node.slot} to {node.incarnation}, which is unfit")
