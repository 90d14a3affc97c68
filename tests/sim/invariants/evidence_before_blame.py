"""Evidence that only names a broken connection never moves, charges or quarantines anybody; and where nobody saw more
than an exit that may be a consequence, blame waits until all other active nodes have been heard from."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Evidence, Hold
from tests.sim.invariants.truth import one_of_two, seen_at_fault
from tests.sim.oracle import Invariant


class EvidenceBeforeBlame(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None or plan.action == "stop":
            return
        witnesses = [e for e in self.oracle.of_kind(Evidence) if e.generation == previous.generation]
        named = {
            e.cause.node_id
            for e in witnesses
            if e.weight != "secondary" and e.reaction != "report" and e.attributed  # else it names nobody
        }
        named |= {seen_at_fault(plan) or ""}
        unfit = self.oracle.read(plan).unfit
        named |= {n.node_id for n in previous.active if n.incarnation in unfit}
        unclear = one_of_two(self.oracle.read(plan).evidence)
        drained = {h.node_id for h in self.oracle.of_kind(Hold) if h.kind == "drain"}
        for old, new in zip(previous.active, plan.active, strict=True):
            gone = self.oracle.may_be_vacated(old.node_id, old.incarnation)
            late = f"{old.node_id} is unfit" in plan.reason
            if old != new and not gone and not late and old.node_id not in named | drained | unclear:
                self.fail(f"{plan.plan_id} takes slot {old.slot} from {old.node_id} without a witness against it")
        self._check_heard(plan, previous, [e for e in witnesses if e.reaction == "recover"])
        held = {q.node_id for q in previous.quarantined}
        for item in plan.quarantined:
            late = f"{item.node_id} is unfit" in plan.reason
            if item.node_id not in held | named | drained and not late:
                self.fail(f"{plan.plan_id} puts {item.node_id} aside without a witness against it")

    def _check_heard(self, plan: Plan, previous: Plan, witnesses: list[Evidence]) -> None:
        lost = [n for n in previous.active if self.oracle.may_be_vacated(n.node_id, n.incarnation)]
        if not witnesses or lost or any(e.weight == "primary" for e in witnesses) or " in time" in plan.reason:
            return
        if plan.failure_class == "collective_desync":
            return  # what all were doing says more than how some ended
        first_ms = self.oracle.failed_ms[(self.oracle.epoch, previous.generation)]
        for node in previous.active:
            mine = self.oracle.process_of(node.incarnation) is self.oracle.deciding
            if self.oracle.beat_ms.get(node.incarnation, 0) <= first_ms and not mine:
                self.fail(f"{plan.plan_id} acts on a consequence, though {node.node_id} had not been heard from")
