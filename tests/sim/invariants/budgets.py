"""Only charged nodes spend restarts, only for a worker of theirs that really failed, and never more than they have."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Evidence
from tests.sim.invariants.truth import seen_at_fault
from tests.sim.oracle import Invariant
from tests.sim.process import Process


class Budgets(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if len(plan.charged) > 1:
            self.fail(f"{plan.plan_id} charges more than the first cause: {plan.charged}")
        for node_id in plan.charged:
            blamed = [
                e
                for e in self.oracle.of_kind(Evidence)
                if previous is not None and e.generation == previous.generation and e.cause.node_id == node_id
            ]
            witnessed = any(
                e.weight != "secondary" and e.cause.rank is not None and e.reaction == "recover" for e in blamed
            )
            if not witnessed and seen_at_fault(plan) != node_id:
                self.fail(f"{plan.plan_id} charges {node_id} without a witness")
            if node_id not in {n.node_id for n in plan.active}:
                self.fail(f"{plan.plan_id} charges {node_id}, which is not in it")

    def charged(self, process: Process, generation: int) -> None:
        if process.restarts_left < 0:
            self.fail(f"{process.name} was charged a restart that it does not have")
        plans = [p for (e, _), p in sorted(self.oracle.plans.items()) if e == self.oracle.epoch]
        newer = [p for p in plans if process.workers_generation < p.generation <= generation]
        if not any(process.node_id in p.charged for p in newer):
            self.fail(f"{process.name} spends a restart, but no plan charges it")
