"""Success is reported only when the workers of all slots of one generation have ended well; and the end of a run is
one: there is never both a success and a stop."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.rounds import End
from lmres.rendezvous.state import Done, Finished
from tests.sim.oracle import Invariant, Write
from tests.sim.process import Process


class HonestSuccess(Invariant):
    def wrote(self, write: Write) -> None:
        record, oracle = write.record, self.oracle
        if write.by is None:
            return
        if isinstance(record, Done) and (oracle.epoch, record.generation, record.node_id) not in oracle.trained:
            self.fail(f"{record.node_id} says that its workers of generation {record.generation} ended well")
        if isinstance(record, Finished) and record.outcome == "succeeded":
            plan = oracle.plan(record.generation)
            missing = [
                n.node_id
                for n in (plan.active if plan is not None else ())
                if (oracle.epoch, record.generation, n.node_id) not in oracle.trained
            ]
            if plan is None or missing:
                self.fail(f"the run is said to have succeeded, but not on {missing}")
            head = oracle.head()
            if head is not None and head.generation != record.generation:
                self.fail(f"generation {record.generation} succeeded after {head.plan_id} had been committed")

    def planned(self, plan: Plan, previous: Plan | None) -> None:
        if self.oracle.of_kind(Finished):
            self.fail(f"{plan.plan_id} was committed after the end of the run")

    def ends(self, process: Process, end: End) -> None:
        if end.exit_code != 0:
            return
        if not any(f.outcome == "succeeded" for f in self.oracle.finished):
            self.fail(f"{process.name} ends with 0, but no run has succeeded: {end.reason}")
