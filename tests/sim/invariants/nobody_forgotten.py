"""The records are wiped only when nobody registered is left; and when everybody has said goodbye, nothing is left."""

from lmres.rendezvous.state import Member
from tests.sim.oracle import Invariant
from tests.sim.process import Process


class NobodyForgotten(Invariant):
    def wiped(self, by: Process | None) -> None:
        for member in self.oracle.of_kind(Member):
            if self.oracle.torn_and_silent(member):
                continue
            if self.oracle.is_live(member.node_id, member.incarnation):
                who = by.name if by is not None else "somebody"
                self.fail(f"{who} wiped the records while {member.incarnation} was registered")

    def at_end(self) -> None:
        oracle = self.oracle
        if not all(p.left for p in self.world.processes) or oracle.torn:
            return
        if any(oracle.is_live(m.node_id, m.incarnation) for m in oracle.of_kind(Member)):
            return  # registered by a request that arrived after its agent had left
        keys = [k for k in oracle.records if not k.startswith(self.world.keys.leases)]
        if keys:
            self.fail(f"all agents have left, but records are: {sorted(keys)[:5]}")
