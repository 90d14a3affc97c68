"""Once a plan was made from evidence that casts doubt on all states newer than one, none of those is ever restored, by
that plan or by a later one."""

from lmres.gemini.inventory import Key
from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant


class OnlyTrustedStates(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        key = Key(plan.recovery_step, plan.recovery_origin)
        if plan.action != "stop" and self.world.doubts.is_distrusted(key):
            self.fail(f"{plan.plan_id} resumes at {key}, which is not to be trusted")
