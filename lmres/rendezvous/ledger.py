"""An agent's page of the store: what it has read, what it writes, whose leases it watches.

The ledger owns the view and the leases and knows the few forms of request: read what changed, write under compares,
move the own lease, give a member up. Everything that a registered agent writes is fenced by its registration: once
another stands there, or the records were wiped, nothing of it goes through, however late a request arrives. Who is not
registered reads everything anew each time, because a wiped record is not seen to go.

Above ``ALL_OBSERVE_UP_TO`` members only the first ``OBSERVERS`` watch everybody and decide; the others watch the
observers, so that the number of records read by an agent does not grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lmres.ids import Keys
from lmres.ports import Compare, DeletePrefix, Entry, Get, Op, Put, Range, Txn, TxnResult
from lmres.rendezvous.codec import encode
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.rounds import Asked, Inputs, Requests
from lmres.rendezvous.state import Banned, Finished, Formed, Gone, Lease, Member, RunConfig, View

ALL_OBSERVE_UP_TO = 32
OBSERVERS = 8
_LASTING = (RunConfig, Plan, Formed, Finished, Banned)


@dataclass(slots=True)
class Ledger:
    """``registered``: this incarnation's registration stands in the store as far as is known."""

    keys: Keys
    me: Member
    leases: LeaseTable
    view: View = field(init=False)
    registered: bool = False
    _counter: int = 0
    _order: tuple[object, object, tuple[str, ...]] | None = None
    """Observers, with what they follow from: asked for several times a round, and there may be thousands."""

    def __post_init__(self) -> None:
        self.view = View(keys=self.keys)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _changes(self) -> tuple[Op, ...]:
        since = self.view.revision + 1
        return tuple(Range(prefix=p, min_mod_revision=since) for p in (self.keys.ctl, self.keys.reg))

    def _learn(self, result: TxnResult) -> None:
        for entries in result.reads[:2]:
            self.view.apply(entries, result.revision)

    def write(self, *puts: Put, compares: tuple[Compare, ...] = ()) -> Asked:
        """Writes under the compares and learns what changed either way. True if the write was done."""
        reads = self._changes()
        if self.registered:
            compares = (self._registration(), *compares)
        result = yield Txn(compares=compares, success=(*puts, *reads), failure=reads)
        self._learn(result)
        return result.succeeded

    def create(self, key: str, value: str, *, unless_changed: tuple[str, ...] = ()) -> Asked:
        """Writes a key that nobody has written since it was last read; for one never written, creates it.

        Nor may any of ``unless_changed`` have been written since.
        """
        compares = tuple(self.unchanged(k) for k in (key, *unless_changed))
        return (yield from self.write(Put(key=key, value=value), compares=compares))

    def unchanged(self, key: str) -> Compare:
        return Compare(key=key, mod_revision=self.view.mod_revision(key))

    def _registration(self) -> Compare:
        return self.unchanged(self.keys.member(self.me.node_id))

    def refresh(self, inputs: Inputs) -> Requests:
        """Moves the own lease, reads what changed, looks at the leases.

        Raises StoreReset when the store is not the one that was read before, Displaced when the registration of this
        incarnation no longer stands.
        """
        if not self.registered:
            self.view = View(keys=self.keys)
        reads = (*self._changes(), *self._lease_reads())
        if not self.registered:
            result = yield Txn(success=reads)
        else:
            result = yield Txn(compares=(self._registration(),), success=(self.beat(inputs), *reads), failure=reads)
        if result.revision < self.view.revision:
            raise StoreReset
        self._learn(result)
        torn = self.registered and self.keys.member(self.me.node_id) in self.view.problems
        if (torn or not result.succeeded) and not (yield from self._restore_registration(inputs)):
            raise Displaced
        self._counter += 1
        self._observe(result.reads[2:], inputs.now_ms)

    def _restore_registration(self, inputs: Inputs) -> Asked:
        """A registration that was torn, and not replaced, is written again."""
        key = self.keys.member(self.me.node_id)
        stored = self.view.stored.get(key)
        if stored is None or not stored.problem:
            return False
        return (yield from self.write(Put(key=key, value=encode(self.me)), self.beat(inputs)))

    def restore_lasting(self) -> Requests:
        """A record that never changes, and was torn after it was read, is written again as it was."""
        for key in sorted(self.view.problems):
            stored = self.view.stored[key]
            if isinstance(stored.record, _LASTING):
                yield from self.create(key, encode(stored.record))

    def beat(self, inputs: Inputs) -> Put:
        lease = Lease(
            incarnation=self.me.incarnation,
            counter=self._counter + 1,
            step=inputs.step,
            keeping=inputs.keeping,
            paces=inputs.paces,
        )
        return Put(key=self.keys.lease(self.me.node_id), value=encode(lease))

    def _lease_reads(self) -> tuple[Op, ...]:
        few = len(self.view.live_members()) <= ALL_OBSERVE_UP_TO
        if few or not self.registered or self.observer_index() is not None:
            return (Range(prefix=self.keys.leases),)
        return tuple(Get(key=self.keys.lease(n)) for n in self.observers())

    def _observe(self, reads: tuple[tuple[Entry, ...], ...], now_ms: int) -> None:
        prefix = len(self.keys.leases)
        self.leases.observe(((e.key[prefix:], e) for entries in reads for e in entries), now_ms)
        self.leases.expect((m.node_id for m in self.watched()), now_ms)

    def give_up(
        self, member: Member, reason: str, *, quiet_ms: int | None = None, witnesses: tuple[str, ...] = ()
    ) -> Asked:
        """Final for this incarnation, and only if its lease, registration and goodbye are still as they were read.

        So must be what its witnesses have noted, and they must still be there.
        """
        gone = Gone(
            node_id=member.node_id,
            incarnation=member.incarnation,
            how="lost",
            reason=reason,
            by=self.me.node_id,
            quiet_ms=quiet_ms,
            step=self.leases.step(member.node_id),
            witnesses=witnesses,
        )
        lease = Compare(key=self.keys.lease(member.node_id), mod_revision=self.leases.revision(member.node_id))
        won = yield from self.write(
            Put(key=self.keys.gone(member.node_id), value=encode(gone)),
            compares=(
                lease,
                *(self.unchanged(k(member.node_id)) for k in (self.keys.member, self.keys.gone)),
                *(self.unchanged(self.keys.parted(member.node_id, by)) for by in witnesses),
                *(self.unchanged(self.keys.gone(by)) for by in witnesses),
            ),
        )
        if won:
            self.leases.forget(member.node_id)
        return won

    def resign(self, how: Literal["left", "refused"], reason: str, *, planned: bool) -> Requests:
        """This incarnation's own goodbye."""
        me = self.me
        gone = Gone(
            node_id=me.node_id, incarnation=me.incarnation, how=how, reason=reason, by=me.node_id, planned=planned
        )
        yield from self.create(self.keys.gone(me.node_id), encode(gone))
        self.registered = False

    def prune(self, generation: int) -> Requests:
        """Drops the details of a generation long past; its plan stays."""
        kinds = ("evidence", "sighting", "paused", "ready", "done", "recovered")
        prefixes = tuple(f"{self.keys.reg}{kind}/{generation:08d}/" for kind in kinds)
        yield Txn(compares=(self._registration(),), success=tuple(DeletePrefix(prefix=p) for p in prefixes))
        self.view.drop(prefixes)

    def clear(self) -> Requests:
        """Wipes the run's records, if nobody has come in since they were read."""
        yield Txn(compares=(self.unchanged(self.keys.door),), success=(DeletePrefix(prefix=self.keys.base),))
        self.view = View(keys=self.keys)

    # -- who watches --------------------------------------------------------------------------------------------------

    def observers(self) -> tuple[str, ...]:
        """Active nodes in slot order, then standbys: the first of them watch everybody and decide."""
        members, head = self.view.live_members(), self.view.head()
        if self._order is None or self._order[0] is not members or self._order[1] is not head:
            live = dict.fromkeys(m.node_id for m in members)
            active = dict.fromkeys(n.node_id for n in head.active if n.node_id in live) if head is not None else {}
            order = (*active, *(n for n in live if n not in active))
            self._order = members, head, order if len(order) <= ALL_OBSERVE_UP_TO else order[:OBSERVERS]
        return self._order[2]

    def observer_index(self) -> int | None:
        observers = self.observers()
        return observers.index(self.me.node_id) if self.me.node_id in observers else None

    def watched(self) -> tuple[Member, ...]:
        """The other members whose leases this agent judges."""
        live = self.view.live_members()
        if self.observer_index() is None:
            observers = set(self.observers())
            live = tuple(m for m in live if m.node_id in observers)
        return tuple(m for m in live if m.node_id != self.me.node_id)

    def give_up_silent(self, member: Member, now_ms: int) -> Asked:
        """Gives up a member whose lease is over."""
        quiet_ms = self.leases.quiet_ms(member.node_id, now_ms)
        return (yield from self.give_up(member, f"no heartbeat for {quiet_ms / 1000:.1f} s", quiet_ms=quiet_ms))


class StoreReset(Exception):
    """The store's revision went back: it has lost its records."""


class Displaced(Exception):
    """The registration is gone, or another incarnation stands there."""
