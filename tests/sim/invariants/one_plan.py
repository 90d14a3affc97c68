"""A generation has exactly one plan, which never changes, and generations rise by one."""

from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant, Write


class OnePlan(Invariant):
    def wrote(self, write: Write) -> None:
        plan = write.record
        if not isinstance(plan, Plan) or write.by is None:
            return
        if write.key != self.world.keys.plan(plan.generation):
            self.fail(f"plan {plan.plan_id} stands under {write.key}")
        known = self.oracle.plan(plan.generation)
        if known is not None and known != plan:
            self.fail(f"generation {plan.generation} has two plans: {known.plan_id} and {plan.plan_id}")
        head = self.oracle.head()
        newest = head.generation if head is not None else 0
        if known is None and plan.generation != newest + 1:
            self.fail(f"plan {plan.plan_id} follows generation {newest}")
