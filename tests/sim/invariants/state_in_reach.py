"""A plan that starts workers names a state of which every rank's parts, of that very key, are in live vaults or files.

A vault that has died since it told what it holds is no fault of the plan's. Nor is a state named that is banned."""

from lmres.gemini.inventory import Holdings, Key
from lmres.rendezvous.plan import Plan
from tests.sim.invariants import truth
from tests.sim.oracle import Invariant, Write


class StateInReach(Invariant):
    def __init__(self, oracle) -> None:  # type: ignore[no-untyped-def]
        super().__init__(oracle)
        self._told_ms: dict[str, int] = {}

    def wrote(self, write: Write) -> None:
        if isinstance(write.record, Holdings) and write.by is not None:
            # As early as it may have been sent.
            self._told_ms[write.record.node_id] = self.world.now_ms - 5 * self.world.scenario.client_timeout_ms

    def planned(self, plan: Plan, previous: Plan | None) -> None:
        states, deciding = self.world.states, self.oracle.deciding
        if plan.action == "stop" or deciding is None or not states.on:
            return
        if set(plan.recovery_source) != {str(n.slot) for n in plan.active}:
            self.fail(f"{plan.plan_id} names sources for slots {sorted(plan.recovery_source)}")
        if not plan.recovery_step:
            return
        key = Key(plan.recovery_step, plan.recovery_origin)
        told = truth.told(deciding)
        died = [n for n in told if states.lost_at_ms.get(n, -1) >= self._told_ms.get(n, 0)]
        vaults = truth.vaults_of(self.world, told)
        if not died and len(vaults) == len(told) and not states.is_whole(key, len(plan.active), vaults):
            self.fail(f"{plan.plan_id} resumes at {key}, which is not there for all ranks")
        if any(b.step == key.step and b.origin == key.origin for b in deciding.agent.view.banned()):
            self.fail(f"{plan.plan_id} resumes at {key}, which is banned")
        seen = deciding.agent.view.evidence(plan.from_generation)
        failed = [e for e in seen if "can not be restored" in e.cause.detail]
        if failed and previous is not None and key == (previous.recovery_step, previous.recovery_origin):
            self.fail(f"{plan.plan_id} resumes at {key} again: {failed[0].cause.detail}")
        if plan.origin <= key.origin:
            self.fail(f"{plan.plan_id} captures as {plan.origin} after restoring {key}")
