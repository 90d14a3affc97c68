"""No plan that starts workers is made before every live member has said what state it holds; left out is only who is
silent and has no slot, or has had long enough."""

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.resume import TELL_MS
from lmres.rendezvous.state import Evidence, Gone, Lease, Member
from tests.sim.invariants import truth
from tests.sim.oracle import Invariant, Write


class AllHaveTold(Invariant):
    def __init__(self, oracle) -> None:  # type: ignore[no-untyped-def]
        super().__init__(oracle)
        self._trouble_ms: dict[tuple[int, int], int] = {}
        self._joined_ms: dict[str, int] = {}
        self._back_ms: dict[str, int] = {}

    def wrote(self, write: Write) -> None:
        record, now_ms = write.record, self.world.now_ms
        if isinstance(record, Lease):
            quiet_ms = now_ms - self.oracle.beat_ms.get(record.incarnation, now_ms)
            if quiet_ms >= 2 * self.world.scenario.interval_ms:
                self._back_ms[record.incarnation] = now_ms
        head = self.oracle.head()
        generation = head.generation if head is not None else 0
        if isinstance(record, Member):
            self._joined_ms.setdefault(record.incarnation, now_ms)
        if isinstance(record, (Evidence, Gone, Member)):
            self._trouble_ms.setdefault((self.oracle.epoch, generation), now_ms)

    def planned(self, plan: Plan, previous: Plan | None) -> None:
        deciding = self.oracle.deciding
        if plan.action == "stop" or deciding is None or not self.world.states.on:
            return
        members = deciding.agent.view.live_members()
        head, told = deciding.agent.view.head(), set(truth.told(deciding))
        busy = {n.node_id for n in (*head.active, *plan.active)} if head is not None else {m.node_id for m in members}
        generation = head.generation if head is not None else 0
        group = (self.oracle.epoch, generation)
        # A group that does not form is trouble too, of which no record tells.
        since_ms = min(self._trouble_ms.get(group, 0), self.oracle.asked_ms.get(group, self.world.now_ms))
        for member in members:
            if member.node_id in told:
                continue
            quiet_ms = self.world.now_ms - self.oracle.beat_ms.get(member.incarnation, 0)
            quiet = quiet_ms >= 2 * self.world.scenario.interval_ms
            just_back = self.world.now_ms - self._back_ms.get(member.incarnation, -10_000) < 2_500
            silent = member.node_id not in busy and (quiet or just_back)
            waited_ms = self.world.now_ms - max(since_ms, self._joined_ms.get(member.incarnation, 0))
            if not silent and waited_ms < TELL_MS * 0.93:
                self.fail(f"{plan.plan_id} was made {waited_ms} ms after trouble, without word from {member.node_id}")
            if f"{member.node_id}" not in plan.reason:
                self.fail(f"{plan.plan_id} does not say that it was made without word from {member.node_id}")
