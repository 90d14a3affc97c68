"""Nobody acts on a plan that is not committed: workers start only in the slot that a committed, formed plan names for
this very incarnation, and are stopped for a plan only if it is committed. An agent never goes back."""

from lmres.rendezvous.rounds import Outcome
from tests.sim.oracle import Invariant, Oracle
from tests.sim.process import Process


class CommittedFirst(Invariant):
    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self._last: dict[str, int] = {}

    def starts(self, process: Process, generation: int, slot: int) -> None:
        plan = self.oracle.plan(generation, known_to=process)
        if plan is None:
            self.fail(f"{process.name} starts workers of generation {generation}, which has no plan")
        assert plan is not None
        if plan.slot_of(process.node_id, process.agent.me.incarnation) != slot:
            self.fail(f"{process.name} starts workers of slot {slot} in generation {generation}: not named in the plan")
        if (process.round_epoch, generation) not in self.oracle.formed_ms:
            self.fail(f"{process.name} starts workers of generation {generation}, which has not formed")
        if generation <= self._last.get(process.name, 0):
            self.fail(f"{process.name} goes back from generation {self._last[process.name]} to {generation}")
        self._last[process.name] = generation

    def stops(self, process: Process, outcome: Outcome) -> None:
        if outcome.plan is not None and outcome.plan not in self.oracle.plans.values():
            self.fail(f"{process.name} stops its workers for {outcome.plan.plan_id}, which is not committed")
