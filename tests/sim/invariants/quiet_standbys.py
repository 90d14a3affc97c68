"""A plan needs a reason: evidence that asks for one, an alarm, a loss, a drain, a node that is unfit or late, a stop.
A standby's presence is none, nor is what is only reported, nor a doubt about nobody that does not ask for recovery."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Evidence, Hold, StopRequest
from tests.sim.oracle import Invariant


class QuietStandbys(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        oracle = self.oracle
        if previous is None:
            if plan.action != "start":
                self.fail(f"{plan.plan_id} is the first plan, but its action is {plan.action}")
            return
        asking = [e for e in oracle.of_kind(Evidence) if e.generation == previous.generation]
        if any(e.reaction == "recover" or (e.reaction == "replace" and e.attributed) for e in asking):
            return
        read = oracle.read(plan)
        if read.alarms or any(n.incarnation in read.unfit for n in previous.active):
            return
        if any(oracle.may_be_vacated(n.node_id, n.incarnation) for n in previous.active):
            return
        active = {n.node_id for n in previous.active}
        if any(h.kind == "drain" and h.node_id in active for h in oracle.of_kind(Hold)):
            return
        if oracle.of_kind(StopRequest) or self._late(previous):
            return
        self.fail(f"{plan.plan_id} has no cause: {plan.reason}")

    def _late(self, previous: Plan) -> bool:
        key = (self.oracle.epoch, previous.generation)
        since_ms, now_ms = self.oracle.plan_ms[key], self.world.now_ms
        outages_ms = sum(max(0, min(b, now_ms) - max(a, since_ms)) for a, b in self.world.freezes)
        waited_ms = now_ms - since_ms - outages_ms + len(self.world.freezes) * 2 * self.world.scenario.interval_ms
        return waited_ms >= self.world.scenario.form_timeout_ms * 0.93
