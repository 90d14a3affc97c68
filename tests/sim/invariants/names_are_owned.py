"""A node id is taken over only when the agent that held it is gone: left, found lost, or its process ended."""

from lmres.rendezvous.state import Member
from tests.sim.oracle import Invariant, Write


class NamesAreOwned(Invariant):
    def wrote(self, write: Write) -> None:
        member = write.record
        if not isinstance(member, Member) or write.by is None:
            return
        known = self.oracle.member(member.node_id)
        if known is None or known.incarnation == member.incarnation:
            return
        if self.oracle.torn_and_silent(known):
            return
        if self.oracle.is_live(known.node_id, known.incarnation):
            self.fail(f"{member.incarnation} takes the name of {known.incarnation}, which is not gone")
