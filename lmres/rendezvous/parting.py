"""Closed connections as evidence: who keeps one to whom, what a break says, and when it is enough to declare a loss.

The kernel of a host whose agent has died closes the agent's connections at once, long before its lease is over. So each
agent keeps a connection to the next two members of a ring and is connected to by the two before it. The rules:

1. *Only what is closed counts, never what is silent.* A break is looked into at once: the peer's address is asked
   again. ``speaks_of_death`` says which breaks count. Silence (a pulled cable, a stopped process) is left to the lease,
   so that ``heartbeat.timeout_s`` means what it says.
2. *Two witnesses.* One may have lost its own way to the peer. Only where just one other agent lives one must do.
3. *The lease has the last word.* What a witness has noted counts only as long as the lease of its subject has not moved
   after it: the store's revisions tell the order, no clock does. Then the lease must stand still for an interval after
   the observer has read of it and be late (``needed_quiet_ms``). Whoever only lost connections goes on beating, and is
   never declared.
4. *An outage of the store is no silence.* It delays all heartbeats, and by more than itself. Who has not beaten since
   the observer could look again is left to its lease.
5. What was noted is taken back when the connection is there again.

The ring is ordered by incarnation, which is drawn by chance: neighbours in it are seldom neighbours in a rack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from lmres.ports import Put
from lmres.rendezvous.codec import encode
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.ledger import Ledger
from lmres.rendezvous.rounds import Inputs, Requests
from lmres.rendezvous.state import Member, Parted, View

NEIGHBOURS = 2
"""So many connections an agent opens."""
WITNESSES = 2


class Break(Enum):
    """How a connection ended without goodbye. SILENT: this host gave it up, from the other end there was no word."""

    CLOSED = "closed"
    SILENT = "silent"


class Answer(Enum):
    """What the peer's address says when it is asked again.

    THERE: a process still holds the listener, though it may not speak (it may be stopped). REFUSED: nobody listens, or
    somebody else does. NONE: no answer, or there was no address to ask.
    """

    THERE = "there"
    REFUSED = "refused"
    NONE = "none"


def speaks_of_death(how: Break, answer: Answer) -> bool:
    """Whether a break may be told as a witness."""
    match answer:
        case Answer.THERE:
            return False
        case Answer.REFUSED:
            return True
        case Answer.NONE:
            return how is Break.CLOSED


def neighbours(members: Sequence[Member], me: Member) -> tuple[Member, ...]:
    """To whom this member keeps connections: the next ones in the ring that listen. Empty for one that is not in it."""
    if not any(m.incarnation == me.incarnation for m in members):
        return ()
    ring = sorted((m for m in members if m.pulse_port), key=lambda m: m.incarnation)
    after = [m for m in ring if m.incarnation > me.incarnation]
    before = [m for m in ring if m.incarnation < me.incarnation]
    return tuple((after + before)[:NEIGHBOURS])


@dataclass(slots=True)
class Witness:
    """This agent's own notes. ``_noted`` names the subjects of which one may stand in the store."""

    ledger: Ledger
    _noted: set[str] = field(default_factory=set)

    def note(self, inputs: Inputs) -> Requests:
        """Notes broken connections to live members, and takes back those that are there again."""
        view, me = self.ledger.view, self.ledger.me
        broken = {b.node_id: b for b in inputs.broken if view.is_live(b.node_id, b.incarnation)}
        for node_id in sorted(self._noted | set(broken)):
            key = self.ledger.keys.parted(node_id, me.node_id)
            b, stands = broken.get(node_id), view.get(key, Parted)
            if b is None and (stands is None or not view.is_live(node_id, stands.incarnation)):
                self._noted.discard(node_id)
                continue
            told = b or stands
            assert told is not None
            record = Parted(
                node_id=node_id,
                incarnation=told.incarnation,
                by=me.node_id,
                by_incarnation=me.incarnation,
                number=told.number,
                back=b is None,
            )
            self._noted.add(node_id)
            if not view.holds(key, record):
                yield from self.ledger.write(Put(key=key, value=encode(record)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A member that is lost by witnesses."""

    witnesses: tuple[str, ...]
    quiet_ms: int

    @property
    def reason(self) -> str:
        seen_by = ", ".join(self.witnesses)
        return f"connections to it closed (seen by {seen_by}) and no heartbeat for {self.quiet_ms / 1000:.1f} s"


@dataclass(slots=True)
class Partings:
    """An observer's memory of what witnesses have noted. ``interval_ms``: how often a lease moves.

    ``_since``: when each standing note, named by its revision, was first seen.
    """

    interval_ms: int
    _since: dict[int, int] = field(default_factory=dict)

    def observe(self, view: View, leases: LeaseTable, now_ms: int) -> None:
        """Remembers when notes were first seen, on the clock that leaves out the time in which nobody looked."""
        if not self._since and not view.parted():
            return
        attended_ms = leases.attended_ms(now_ms)
        standing = [revision for subject in view.parted() for revision in _standing(view, leases, subject)]
        self._since = {revision: self._since.get(revision, attended_ms) for revision in standing}

    def find(self, view: View, leases: LeaseTable, member: Member, now_ms: int) -> Finding | None:
        """Set if this member is lost."""
        left = self._left_ms(view, leases, member, now_ms)
        if left is None or left > 0:
            return None
        witnesses = tuple(_standing(view, leases, member.node_id).values())
        return Finding(witnesses=witnesses, quiet_ms=leases.quiet_ms(member.node_id, now_ms))

    def next_ms(self, view: View, leases: LeaseTable, members: Sequence[Member], now_ms: int) -> int | None:
        """Until one of these may be found lost; None if nothing speaks for it."""
        if not self._since:
            return None
        left = [self._left_ms(view, leases, m, now_ms) for m in members]
        return min((ms for ms in left if ms is not None), default=None)

    def _left_ms(self, view: View, leases: LeaseTable, member: Member, now_ms: int) -> int | None:
        notes, needed = _standing(view, leases, member.node_id), needed_witnesses(view)
        if len(notes) < needed or not leases.heard_since_gap(member.node_id):
            return None
        attended_ms = leases.attended_ms(now_ms)
        waited_ms = attended_ms - min(self._since.get(revision, attended_ms) for revision in notes)
        quiet_ms = leases.quiet_ms(member.node_id, now_ms)
        return max(self.interval_ms - waited_ms, needed_quiet_ms(needed, self.interval_ms) - quiet_ms, 0)


def needed_witnesses(view: View) -> int:
    """One where nobody but the subject and its witness lives."""
    return WITNESSES if len(view.live_members()) > 2 else 1


def needed_quiet_ms(witnesses: int, interval_ms: int) -> int:
    """One heartbeat missed, or two if only one witness speaks; and half an interval, by which a beat may be late."""
    return (2 if witnesses < WITNESSES else 1) * interval_ms + interval_ms // 2


def _standing(view: View, leases: LeaseTable, node_id: str) -> dict[int, str]:
    """By the revision of its note: the live witnesses after whose note the subject's lease has not moved."""
    beat = leases.revision(node_id)
    return {revision: noted.by for revision, noted in view.parted().get(node_id, ()) if revision > beat}
