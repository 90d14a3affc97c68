"""A plan that nothing forces (a node is drained, unfit or slow, and a standby is there) waits until all workers stand
at one step whose state is saved, and resumes there: no completed step is lost. Unless the time for that is over, or it
is said that somebody can not stand still; or that state was lost or corrupted since."""

from lmres.gemini.inventory import Key
from lmres.rendezvous.pausing import PAUSE_MS
from lmres.rendezvous.plan import Plan
from tests.sim.invariants import truth
from tests.sim.oracle import Invariant


class NoStepLost(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        states, deciding = self.world.states, self.oracle.deciding
        if previous is None or deciding is None or not states.on or plan.action != "replace":
            return
        read, group = self.oracle.read(plan), (self.oracle.epoch, previous.generation)
        forced = any(e.reaction == "recover" for e in read.evidence) or "in time" in plan.reason
        forced = forced or plan.failure_class not in ("drain", "node_unhealthy", "straggler")
        forced = forced or any(self.oracle.may_be_vacated(n.node_id, n.incarnation) for n in previous.active)
        if forced or not read.formed or any(p.problem for p in read.paused.values()):
            return
        asked_ms = self.world.standing.asked_ms.get(group, self.world.now_ms)
        if self.world.now_ms - asked_ms >= PAUSE_MS * 0.93:
            return
        step = self.world.program.step
        standing = [w for _, w in self.world.program.group(group) if w.state == "running" and w.stood != step]
        if standing or not self.world.program.has_trained(group):
            self.fail(f"{plan.plan_id} is made while workers of {[w.slot for w in standing]} do not stand at {step}")
        key = Key(step, previous.origin)
        vaults = truth.vaults_of(self.world, truth.told(deciding))
        spoilt = key in states.corrupted or states.lost_at_ms or self.world.doubts.is_distrusted(key)
        if plan.recovery_step != step and not spoilt and states.is_whole(key, len(plan.active), vaults):
            self.fail(f"{plan.plan_id} resumes at {plan.recovery_step}, though all stood at {step}")
        if plan.recovery_step != step and not spoilt:
            self.fail(f"{plan.plan_id} resumes at {plan.recovery_step}: {key} was saved, and is not whole")
