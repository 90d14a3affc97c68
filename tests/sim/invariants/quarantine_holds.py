"""A quarantined node is not active again until an operator has readmitted it, and stays on the list until then."""

from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant


class QuarantineHolds(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None or plan.action == "stop":
            return
        active = {n.node_id for n in plan.active}
        listed = {q.node_id for q in plan.quarantined}
        for item in previous.quarantined:
            if self.oracle.readmitted.get(item.node_id, -1) >= item.generation:
                continue
            if item.node_id in active:
                self.fail(f"{plan.plan_id} uses {item.node_id}, put aside in generation {item.generation}")
            if item.node_id not in listed:
                self.fail(f"{plan.plan_id} forgets that {item.node_id} was put aside")
        both = active & listed
        if both:
            self.fail(f"{plan.plan_id} has {sorted(both)} both active and put aside")
