"""Workers are called hung only while an alarm stands, as the deciding agent last read it: never for one that was
withdrawn, nor for one of another generation. A desync needs an alarm too, or a worker that failed as if a peer had
gone."""

from lmres.rendezvous.plan import Plan
from tests.sim.oracle import Invariant


class AlarmBeforeHang(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None or plan.failure_class not in ("hang", "collective_desync"):
            return
        read = self.oracle.read(plan)
        vague = [e for e in read.evidence if e.reaction == "recover" and e.weight != "primary"]
        if not read.alarms and not (vague and plan.failure_class == "collective_desync"):
            told = sorted(read.sightings)
            self.fail(f"{plan.plan_id} calls workers hung, but no alarm stands; told have {told}")
