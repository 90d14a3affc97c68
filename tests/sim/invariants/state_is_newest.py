"""The run goes on from the newest state that is left: never older than one that all ranks could get from the vaults
that were heard, and never older than the newest safe one while each rank's image is still with one of its holders.

A run ends for want of a state only if there is none. States that are not to be trusted count for nothing."""

from lmres.gemini.inventory import Key
from lmres.rendezvous.plan import Plan
from tests.sim.invariants import truth
from tests.sim.oracle import Invariant


class StateIsNewest(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        states, deciding = self.world.states, self.oracle.deciding
        if deciding is None or not states.on:
            return
        lost = plan.action == "stop" and "ways out" in plan.reason
        if plan.action == "stop" and not lost:
            return
        chosen = Key(plan.recovery_step, plan.recovery_origin)
        banned = {Key(b.step, b.origin) for b in deciding.agent.view.banned()}
        vaults = truth.vaults_of(self.world, truth.told(deciding))
        ranks = len(plan.active)
        banned |= {k for k in states.keys(vaults) if self.world.doubts.is_distrusted(k)}
        for key in states.keys(vaults) - banned:
            if (lost or key > chosen) and states.is_whole(key, ranks, vaults):
                self.fail(f"{plan.plan_id} {'gives up' if lost else f'resumes at {chosen}'}, but {key} is there")
        self._check_safe(plan, chosen, banned, lost)

    def _check_safe(self, plan: Plan, chosen: Key, banned: set[Key], lost: bool) -> None:
        states, deciding = self.world.states, self.oracle.deciding
        safe, states.newest_safe = states.newest_safe, None
        if safe is None or deciding is None:
            return
        key, holders = safe
        if key == chosen:
            states.newest_safe = safe
        heard = set(truth.vaults_of(self.world, truth.told(deciding)))
        all_known = len(holders) == len(plan.active)  # else a vault was killed before it had its rank
        kept = all_known and all(any(v in heard for v in of_rank) for of_rank in holders.values())
        distrusted = self.world.doubts.is_distrusted(key)
        if kept and not distrusted and key not in banned | states.corrupted and (lost or key > chosen):
            self.fail(
                f"{plan.plan_id} {'gives up' if lost else f'resumes at {chosen}'}, but {key} was safe and is held"
            )
