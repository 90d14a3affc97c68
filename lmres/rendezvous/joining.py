"""Coming in: agree on the configuration, take the node's name, respect MAX.

One attempt a round. A name is free when nobody holds it, or when its holder is certainly dead, or when the holder's
lease is over; if the lease moves the newcomer is refused. More live agents than MAX: the latest is refused, once those
before it have shown signs of life (until then it may still be needed). Records of a run that is over, or that has
another configuration, are wiped when nobody of it is alive. An agent that was given up comes in again under a new
incarnation, but only into the run that it was in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lmres.errors import ExitCode
from lmres.ports import Put
from lmres.rendezvous.agreement import config_difference
from lmres.rendezvous.codec import encode
from lmres.rendezvous.ledger import Ledger
from lmres.rendezvous.rounds import Asked, End, Inputs, Requests
from lmres.rendezvous.state import Door, Member, RunConfig, View


@dataclass(slots=True)
class Joining:
    """The newcomer's memory. ``end`` is set when it is refused; ``reason`` says what it waits for.

    ``run`` is the revision at which the configuration of the run was created, once this agent has been in it.
    ``tried``: it has asked for a registration.
    """

    ledger: Ledger
    config: RunConfig
    new_incarnation: Callable[[], str]
    process_is_dead: Callable[[Member], bool]
    reason: str = "joining"
    end: End | None = None
    run: int = 0
    tried: bool = False
    _used: str = ""
    _admitted: bool = False
    _first_counter: dict[str, int] = field(default_factory=dict)

    def attempt(self, inputs: Inputs) -> Requests:
        ledger = self.ledger
        if inputs.workers_alive:
            self.reason = "this node was given up; it stops its workers before it joins again"
            return
        problem = config_difference(self.config, ledger.view.config)
        if self.run and self._run_of_records() != self.run:
            self._refuse(ExitCode.INFRASTRUCTURE_LOST, "the records of the run that this agent was in are gone")
        elif run_is_over(ledger.view):
            over = end_of_run(ledger.view)
            if self.run:
                self.end = over
                return
            reason = f"this run is over already ({over.reason}); a new one needs another --rdzv-id"
            yield from self._clear_unless_held(inputs, End(exit_code=over.exit_code, reason=reason, run_over=True))
        elif problem:
            yield from self._clear_unless_held(inputs, End(exit_code=int(ExitCode.BAD_CONFIGURATION), reason=problem))
        elif (yield from self._name_is_free(inputs)):
            yield from self._register(inputs)

    def _run_of_records(self) -> int:
        stored = self.ledger.view.stored.get(self.ledger.keys.config)
        return stored.created if stored is not None else 0

    def _refuse(self, code: int, reason: str) -> None:
        self.end = End(exit_code=int(code), reason=reason)

    def _clear_unless_held(self, inputs: Inputs, refusal: End) -> Requests:
        """Records that this agent can not join are wiped when nobody of theirs is alive."""
        for node_id in self.ledger.view.unreadable_members():
            if not self._is_silent(node_id, inputs):
                return
        doubtful = []
        for member in self.ledger.view.live_members():
            if (yield from self._is_dead(member, inputs)):
                continue
            if self.moves(member):
                self.end = refusal
                return
            doubtful.append(member.node_id)
        if doubtful:
            self.reason = f"{refusal.reason}; waiting to see whether {', '.join(doubtful)} is still there"
            return
        yield from self.ledger.clear()
        self.reason = "cleared the records of an earlier run with this id"

    def _name_is_free(self, inputs: Inputs) -> Asked:
        ledger = self.ledger
        member = ledger.view.member(ledger.me.node_id)
        if ledger.me.node_id in ledger.view.unreadable_members():
            return self._is_silent(ledger.me.node_id, inputs)
        if member is None or ledger.view.gone(member.node_id) is not None:
            return True
        if member.incarnation == ledger.me.incarnation:
            return True  # an earlier write of ours whose answer was lost
        if (yield from self._is_dead(member, inputs)):
            return True
        where = f"pid {member.pid} on host {member.host} ({member.address})"
        if self.moves(member):
            reason = (
                f"node_id {member.node_id!r} is in use by a live agent: {where}. "
                f"Give each agent its own, for example --rdzv-conf=node_id=NAME"
            )
            self._refuse(ExitCode.BAD_CONFIGURATION, reason)
        self.reason = f"node_id {member.node_id!r} is registered by {where}; waiting to see whether it is alive"
        return False

    def _is_silent(self, node_id: str, inputs: Inputs) -> bool:
        """For a registration that can not be read; its agent would write it again with its next heartbeat."""
        self.reason = f"the registration of {node_id} can not be read; waiting to see whether it is alive"
        leases = self.ledger.leases
        return leases.revision(node_id) == 0 or leases.is_over(node_id, inputs.now_ms)

    def moves(self, member: Member) -> bool:
        """Whether the member's lease has moved since it was first looked at."""
        counter = self.ledger.leases.counter(member.node_id)
        return counter > self._first_counter.setdefault(member.incarnation, counter)

    def _is_dead(self, member: Member, inputs: Inputs) -> Asked:
        """Gives up a member whose process has certainly ended, or whose lease is over."""
        ledger = self.ledger
        if self.process_is_dead(member):
            return (yield from ledger.give_up(member, "its process has ended"))
        if ledger.leases.is_over(member.node_id, inputs.now_ms):
            return (yield from ledger.give_up_silent(member, inputs.now_ms))
        return False

    def settle(self, inputs: Inputs) -> Requests:
        """Before leaving: whether a registration that was never confirmed went through."""
        ledger = self.ledger
        if self.tried and not ledger.registered:
            yield from ledger.refresh(inputs)
            ledger.registered = ledger.view.is_live(ledger.me.node_id, ledger.me.incarnation)

    def _register(self, inputs: Inputs) -> Requests:
        """Registration, first sign of life and, for the first agent, the configuration, in one step."""
        ledger, keys = self.ledger, self.ledger.keys
        me = ledger.me
        known, gone = ledger.view.member(me.node_id), ledger.view.gone(me.node_id)
        refused = known is not None and known.incarnation == me.incarnation and gone is not None
        if refused or me.incarnation == self._used:
            ledger.me = me = replace(me, incarnation=self.new_incarnation())
        key = keys.member(me.node_id)
        door = Door(node_id=me.node_id, incarnation=me.incarnation)
        puts = [Put(key=key, value=encode(me)), Put(key=keys.door, value=encode(door)), ledger.beat(inputs)]
        if ledger.view.config is None:
            puts.append(Put(key=keys.config, value=encode(self.config)))
        self.tried = True
        yield from ledger.write(*puts, compares=(ledger.unchanged(key), ledger.unchanged(keys.config)))
        stands = ledger.view.member(me.node_id)
        if stands is not None and stands.incarnation == me.incarnation and ledger.view.gone(me.node_id) is None:
            ledger.registered = True
            self.run, self._used = self._run_of_records(), me.incarnation
            self._first_counter.clear()
            self._admitted = False

    def leave_if_too_many(self) -> Requests:
        """For a registered standby: refused when MAX live agents came before it.

        Once there was room for it it stays, also when a node that was put aside comes back into the count.
        """
        if self._admitted:
            return
        view, me = self.ledger.view, self.ledger.me
        head = view.head()
        counted = [m for m in view.live_members() if view.quarantine_reason(m.node_id) is None]
        ahead: list[Member] = []
        for member in counted:
            if member.node_id == me.node_id:
                break
            ahead.append(member)
        limit = self.config.max_nodes
        active = head is not None and head.slot_of(me.node_id, me.incarnation) is not None
        watched = {m.node_id for m in self.ledger.watched()}
        alive = [m for m in ahead if m.node_id not in watched or self.moves(m)]
        if active or len(ahead) < limit:
            self._admitted = True
        if self._admitted or len(alive) < limit:
            return
        names = ", ".join(m.node_id for m in alive)
        reason = f"this run takes {limit} agents at most (--nnodes) and has them: {names}"
        yield from self.ledger.resign("refused", reason, planned=False)
        self._refuse(ExitCode.BAD_CONFIGURATION, reason)


def run_is_over(view: View) -> bool:
    head = view.head()
    return view.finished is not None or (head is not None and head.action == "stop")


def end_of_run(view: View) -> End:
    """How every agent of a finished or stopped run ends."""
    finished, head = view.finished, view.head()
    if finished is not None:
        return End(exit_code=finished.exit_code, reason=finished.reason, run_over=True)
    assert head is not None and head.action == "stop"
    return End(exit_code=head.exit_code or 1, reason=head.reason, cause=head.cause, run_over=True)
