"""Whoever is named, charged, struck or put aside because workers stand still is truly at fault: it has stood still
itself at a time of the alarm, or has entered another operation than the others. Where it is not known, nobody is."""

from lmres.rendezvous.plan import Plan
from tests.sim.invariants.truth import LOCALIZED, seen_at_fault
from tests.sim.oracle import Invariant


class OnlyTheStuck(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None or plan.failure_class not in LOCALIZED:
            return
        named = seen_at_fault(plan)
        struck = {s.node_id for s in plan.strikes if s not in previous.strikes}
        aside = {q.node_id for q in plan.quarantined if "process faults" in q.reason and q not in previous.quarantined}
        blamed = set(plan.charged) | struck | aside | set(plan.dismissed)
        if blamed - {named}:
            self.fail(f"{plan.plan_id} blames {sorted(blamed)}, but names {named}: {plan.reason}")
        if named is not None and not self._is_at_fault(plan, previous, named):
            self.fail(f"{plan.plan_id} names {named}, which is innocent: {plan.reason}")

    def _is_at_fault(self, plan: Plan, previous: Plan, node_id: str) -> bool:
        looks, group = self.world.looks, (self.oracle.epoch, previous.generation)
        if plan.failure_class == "collective_desync":
            desync = looks.desyncs.get(group)
            return desync is not None and previous.active[desync.slot].node_id == node_id
        since = [looks.since_ms[s.incarnation, s.number] for s in self.oracle.read(plan).alarms]
        return looks.at_fault(group, node_id, min(since, default=0))
