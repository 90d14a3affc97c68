"""What has not failed costs nothing: a rank that is only reported is left alone; one that is to be replaced leaves when
a standby is there, and is neither charged nor struck; nor is anybody for evidence that does not know who it is. And
none of it ever ends a run."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Evidence, StopRequest
from tests.sim.invariants.truth import LOCALIZED
from tests.sim.oracle import Invariant


class DoubtsCostNothing(Invariant):
    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if previous is None:
            return
        read = self.oracle.read(plan)
        if plan.action == "stop" and not self._must_stop(plan, previous, read.evidence):
            self.fail(f"{plan.plan_id} ends the run, though nothing has failed: {plan.reason}")
        asking = [e for e in read.evidence if e.reaction == "replace" and e.attributed]
        if plan.failure_class == "straggler":
            self._check_replaced(plan, previous, {e.cause.node_id for e in asking})
        if plan.cause is None or plan.action == "stop":
            return
        causes = [e for e in read.evidence if e.cause == plan.cause]
        if causes and all(e.reaction == "report" for e in causes):
            self.fail(f"{plan.plan_id} follows from what was only reported: {plan.cause.headline()}")
        if causes and not any(e.attributed for e in causes):
            self._check_inconclusive(plan, previous, read.evidence)

    def _must_stop(self, plan: Plan, previous: Plan, evidence: tuple[Evidence, ...]) -> bool:
        failed = any(e.reaction == "recover" for e in evidence) or " in time" in plan.reason
        failed = failed or plan.failure_class in LOCALIZED or bool(self.oracle.of_kind(StopRequest))
        return failed or any(self.oracle.may_be_vacated(n.node_id, n.incarnation) for n in previous.active)

    def _check_replaced(self, plan: Plan, previous: Plan, asked: set[str]) -> None:
        before = {n.incarnation for n in previous.active}
        came = {n.node_id for n in plan.active if n.incarnation not in before}
        left = {n.node_id for n in previous.active} - {n.node_id for n in plan.active}
        if plan.action != "replace" or not came <= self.oracle.read(plan).standbys or not left & asked:
            self.fail(f"{plan.plan_id} is for {sorted(asked)}, but is {plan.action} with {sorted(came)}")
        if plan.charged or plan.dismissed or set(plan.strikes) - set(previous.strikes):
            self.fail(f"{plan.plan_id} charges or strikes {plan.charged} for a rank that was slow")

    def _check_inconclusive(self, plan: Plan, previous: Plan, evidence: tuple[Evidence, ...]) -> None:
        if plan.charged or plan.dismissed or set(plan.strikes) - set(previous.strikes):
            self.fail(f"{plan.plan_id} charges or strikes {plan.charged}, though nobody knows who it was")
        if plan.verdict != "inconclusive":
            self.fail(f"{plan.plan_id} is {plan.verdict}, though nobody knows who it was")
        asked = {e.cause.node_id for e in evidence if e.attributed and (e.evict or e.reaction == "replace")}
        known = {q.node_id for q in previous.quarantined}
        for item in plan.quarantined:
            other = any(words in item.reason for words in ("is drained", "is unhealthy", "is unfit"))
            if item.node_id not in known | asked and not other:
                self.fail(f"{plan.plan_id} puts {item.node_id} aside, though nobody knows who it was")
