"""Slots are stable: from one plan to the next a slot changes hands only if its node was vacated (gone, drained,
quarantined, dismissed, or one of two of which one is wrong), the others keep theirs, and no node holds two."""

from lmres.rendezvous.plan import Plan
from tests.sim.invariants.truth import one_of_two
from tests.sim.oracle import Invariant


class StableSlots(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None:
            return
        if len(plan.active) != len(previous.active):
            self.fail(f"{plan.plan_id} has {len(plan.active)} slots, the one before {len(previous.active)}")
        aside = {q.node_id for q in plan.quarantined} | one_of_two(self.oracle.read(plan).evidence)
        for old, new in zip(previous.active, plan.active, strict=True):
            if old == new:
                continue
            vacated = (
                self.oracle.may_be_vacated(old.node_id, old.incarnation)
                or old.node_id in aside
                or old.node_id in plan.dismissed
            )
            if not vacated:
                self.fail(f"{plan.plan_id} takes slot {old.slot} from {old.incarnation}, which was not vacated")
