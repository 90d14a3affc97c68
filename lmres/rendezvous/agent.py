"""One agent's round: read, report, judge, decide, follow.

A round is a generator that yields one store request at a time and is sent the answer; whoever drives it (a thread with
a real store, or the simulator) may stop it between any two requests. Nothing is remembered that an answer has not
confirmed, so a round that is cut off is simply run again: every write is either a compare-and-set or harmless when
repeated.

The round never acts. Its ``Outcome`` says what this agent must do: which plan it follows, whether its workers must
stop, whether the group has formed, whether and how to end.

              +---------+  registered   +---------+  plan names it   +--------+
              | joining | ------------> | standby | ---------------> | active |
              +---------+               +---------+ <--------------- +--------+
                   ^                         |        plan drops it      |
                   |    found lost, workers stopped                      |
                   +-------------------------+---------------------------+
                                             v
                                         +-------+
                                         | ended |   stop plan, run finished, refused, dismissed
                                         +-------+
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from lmres.errors import ExitCode
from lmres.ids import Keys
from lmres.ports import Put, Txn, TxnResult
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Decision, Finish, Observed, Wait, decide
from lmres.rendezvous.joining import Joining, end_of_run, run_is_over
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.ledger import Displaced, Ledger, StoreReset
from lmres.rendezvous.looking import LOOK_MS, alarmed, is_wanted, localized, sighted, unseen, witness
from lmres.rendezvous.notes import fault_note, gone_cause, look_note, plan_note, unfit_note
from lmres.rendezvous.parting import Partings, Witness
from lmres.rendezvous.pausing import allowed_ms, target
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.resume import TELL_MS, untold
from lmres.rendezvous.rounds import End, Inputs, Leave, Note, Outcome, Requests, Settings, Standing
from lmres.rendezvous.state import Done, Formed, Health, Member, Ready, View
from lmres.scout.sighting import Sighting

BRIEF_MS = 20
"""After a clear cause: what failed together on several nodes, or on one, is then one decision in most cases."""
KEPT_GENERATIONS = 32
"""Evidence and reports of so many generations stay in the store, for ``lmres incidents``."""
VAIN_MS = 60_000
"""After a replacement that would have lost too much, all are left alone for so long."""
WHOLE_NODE = frozenset({"node_lost", "drain", "node_unhealthy"})
"""Causes that only the plan may tell of; of any other there is evidence, which is told as such."""
STAGGER_MS = 150
MAX_STAGGER = 10


@dataclass(slots=True)
class Agent:
    """The agent's memory between rounds. One owner; not thread-safe.

    ``new_incarnation`` gives a fresh unique text; ``process_is_dead`` tells of a member's process on this very boot
    whether it is certainly gone (False when it can not know).
    """

    settings: Settings
    new_incarnation: Callable[[], str]
    process_is_dead: Callable[[Member], bool]
    ledger: Ledger = field(init=False)
    joining: Joining = field(init=False)
    witness: Witness = field(init=False)
    partings: Partings = field(init=False)
    end: End | None = None
    reason: str = "joining"
    _started_ms: int | None = None
    _sent_faults: int = 0
    _sent_recovered: int = 0
    _sent_banned: int = 0
    _head_seen: tuple[int, int] = (0, 0)
    _formed_seen: tuple[int, int] = (0, 0)
    _evidence_seen: tuple[int, int] = (0, 0)
    _proposed: tuple[int, int] | None = None
    _waiting_ms: int | None = None
    _untold_ms: dict[str, int] = field(default_factory=dict)
    _freeze: int | None = None
    _asked_freeze: int | None = None
    _look: int | None = None
    _unseen_ms: dict[str, int] = field(default_factory=dict)
    _pause: int | None = None
    _pausing_ms: int | None = None
    _vain: tuple[str, int] = ("", 0)
    _alert: bool = False
    _due_ms: int | None = None
    _notes: list[Note] = field(default_factory=list)
    _told_generation: int = 0
    _told: set[str] = field(default_factory=set)
    _left: bool = False

    def __post_init__(self) -> None:
        config = self.settings.config
        leases = LeaseTable(interval_ms=config.heartbeat_interval_ms, timeout_ms=config.heartbeat_timeout_ms)
        self.ledger = Ledger(keys=self.settings.keys, me=self.settings.me, leases=leases)
        self.witness = Witness(ledger=self.ledger)
        self.partings = Partings(interval_ms=config.heartbeat_interval_ms)
        self.joining = Joining(
            ledger=self.ledger,
            config=config,
            new_incarnation=self.new_incarnation,
            process_is_dead=self.process_is_dead,
        )

    @property
    def keys(self) -> Keys:
        return self.settings.keys

    @property
    def view(self) -> View:
        return self.ledger.view

    @property
    def me(self) -> Member:
        return self.ledger.me

    # -- the round ----------------------------------------------------------------------------------------------------

    def round(self, inputs: Inputs) -> Generator[Txn, TxnResult, Outcome]:
        """One round. May be abandoned between any two requests; the next one starts from what was confirmed."""
        self._due_ms = self._freeze = self._look = self._pause = None
        self._alert = False
        if self._started_ms is None:
            self._started_ms = inputs.now_ms
        if inputs.leave is not None:
            yield from self._leave(inputs, inputs.leave)
        elif self.end is None:
            try:
                yield from self._work(inputs)
            except StoreReset:
                self._finish(ExitCode.INFRASTRUCTURE_LOST, "the store has lost its records (was it started anew?)")
            except Displaced:
                self._displaced()
        return self._outcome(inputs)

    def _work(self, inputs: Inputs) -> Requests:
        ledger = self.ledger
        yield from ledger.refresh(inputs)
        self._mark_evidence(inputs.now_ms)
        if ledger.registered and self.view.gone(self.me.node_id) is not None:
            ledger.registered = False
        if not ledger.registered:
            yield from self._join(inputs)
        if self.end is None and ledger.registered:
            yield from self._send(inputs)
            yield from self.witness.note(inputs)
            yield from self.ledger.restore_lasting()
            yield from self._declare_lost(inputs)
            yield from self._advance(inputs)
            yield from self._tell_holdings(inputs)
            yield from self._tell_health(inputs)
            yield from self._tell_sighting(inputs)
            yield from self._tell_paused(inputs)
            yield from self._decide(inputs)
            self._follow(inputs)
            self._tell()

    def _join(self, inputs: Inputs) -> Requests:
        yield from self.joining.attempt(inputs)
        self.reason = self.joining.reason
        self.end = self.end or self.joining.end
        if self.ledger.registered:
            fields = {"address": self.me.address, "reason": "registered"}
            self._notes.append(Note(event="agent_joined", fields=fields))

    def _displaced(self) -> None:
        self.ledger.registered = False
        member = self.view.member(self.me.node_id)
        if member is None or member.incarnation == self.me.incarnation:
            self._finish(ExitCode.INFRASTRUCTURE_LOST, "the store has lost this agent's registration")
            return
        where = f"the agent with pid {member.pid} on host {member.host}"
        self._finish(ExitCode.BAD_CONFIGURATION, f"node_id {member.node_id!r} was taken over by {where}")

    # -- reporting ----------------------------------------------------------------------------------------------------

    def _send(self, inputs: Inputs) -> Requests:
        """Evidence and reports that the store has not confirmed yet. Their keys are unique: a repeat is harmless.

        A state that is banned for a failure is so before anybody hears of the failure.
        """
        while self._sent_banned < len(inputs.banned):
            banned = inputs.banned[self._sent_banned]
            key = self.keys.banned(banned.step, banned.origin)
            if not (yield from self.ledger.write(Put(key=key, value=encode(banned)))):
                return
            self._sent_banned += 1
        while self._sent_faults < len(inputs.faults):
            number = self._sent_faults
            fault = inputs.faults[number]
            key = self.keys.evidence(fault.generation, self.me.node_id, number)
            if not (yield from self.ledger.write(Put(key=key, value=encode(fault)))):
                return
            self._sent_faults = number + 1
        while self._sent_recovered < len(inputs.recovered):
            record = inputs.recovered[self._sent_recovered]
            key = self.keys.recovered(record.generation, self.me.node_id)
            if not (yield from self.ledger.write(Put(key=key, value=encode(record)))):
                return
            self._sent_recovered += 1

    def _tell_holdings(self, inputs: Inputs) -> Requests:
        """What the vault held when it was frozen in this generation. Anew if that was said before the group formed, and
        is still asked for: it must not be taken for what workers have captured since.

        Who comes while a generation runs says only where its vault is, so that copies can be kept there.
        """
        generation, held = self._generation(), inputs.holdings
        if not self.settings.checkpointing.enabled:
            return
        if held is None:
            yield from self._take_back_holdings(inputs, generation)
            return
        key, formed = self.keys.holdings(self.me.node_id), self.keys.formed(generation)
        record = replace(held, node_id=self.me.node_id, incarnation=self.me.incarnation)
        if held.generation != generation:
            said = self.view.holdings().get(self.me.node_id)
            if held.port and (said is None or said[1].incarnation != self.me.incarnation):
                where = replace(record, generation=0, copies=())
                yield from self.ledger.write(Put(key=key, value=encode(where)))
            return
        if self.view.holds(key, record) and self.view.mod_revision(key) > self.view.mod_revision(formed):
            return
        if self.view.mod_revision(formed) and self._asked_freeze != generation:
            return
        yield from self.ledger.write(Put(key=key, value=encode(record)), compares=(self.ledger.unchanged(formed),))

    def _take_back_holdings(self, inputs: Inputs, generation: int) -> Requests:
        """What was said in this generation before its workers were started here counts no more."""
        said = self.view.holdings().get(self.me.node_id)
        if said is None or said[1].incarnation != self.me.incarnation or said[1].generation != generation:
            return
        if generation and inputs.workers_generation == generation:
            key = self.keys.holdings(self.me.node_id)
            yield from self.ledger.write(Put(key=key, value=encode(replace(said[1], generation=0, copies=()))))

    def _tell_health(self, inputs: Inputs) -> Requests:
        health = inputs.health
        if health is None:
            return
        key = self.keys.health(self.me.node_id)
        record = replace(health, node_id=self.me.node_id, incarnation=self.me.incarnation)
        if record.fit and self.view.get(key, Health) is None:
            return  # nobody asks for it
        if not self.view.holds(key, record):
            yield from self.ledger.write(Put(key=key, value=encode(record)))

    def _tell_sighting(self, inputs: Inputs) -> Requests:
        """The newest one, once."""
        seen, slot = inputs.sighting, self._slot()
        if seen is None or slot is None or seen.generation != self._generation():
            return
        key = self.keys.sighting(seen.generation, self.me.node_id)
        record = replace(seen, node_id=self.me.node_id, incarnation=self.me.incarnation)
        said = self.view.get(key, Sighting)
        if said is None or said.incarnation != record.incarnation or said.number < record.number:
            yield from self.ledger.write(Put(key=key, value=encode(record)))

    def _tell_paused(self, inputs: Inputs) -> Requests:
        paused = inputs.paused
        if paused is None or self._slot() is None or paused.generation != self._generation():
            return
        key = self.keys.paused(paused.generation, self.me.node_id)
        record = replace(paused, node_id=self.me.node_id, incarnation=self.me.incarnation)
        if not self.view.holds(key, record):
            yield from self.ledger.write(Put(key=key, value=encode(record)))

    def _declare_lost(self, inputs: Inputs) -> Requests:
        leases, now_ms = self.ledger.leases, inputs.now_ms
        self.partings.observe(self.view, leases, now_ms)
        for member in self.ledger.watched():
            if leases.is_over(member.node_id, now_ms):
                yield from self.ledger.give_up_silent(member, now_ms)
                continue
            found = self.partings.find(self.view, leases, member, now_ms)
            if found is not None:
                yield from self.ledger.give_up(member, found.reason, quiet_ms=found.quiet_ms, witnesses=found.witnesses)
        yield from self.joining.leave_if_too_many()
        self.end = self.end or self.joining.end

    # -- moving on ----------------------------------------------------------------------------------------------------

    def _slot(self) -> int | None:
        head = self.view.head()
        if head is None or head.action == "stop" or not self.ledger.registered:
            return None
        return head.slot_of(self.me.node_id, self.me.incarnation)

    def _advance(self, inputs: Inputs) -> Requests:
        """Says that this node is ready, that the group has formed, that the workers here have ended well."""
        head, slot = self.view.head(), self._slot()
        if head is None or slot is None:
            return
        generation = head.generation
        if inputs.waiting and not inputs.workers_alive and inputs.workers_generation < generation:
            yield from self._say_ready(inputs, generation)
        if slot == 0 and self.view.formed(generation) is None:
            yield from self._say_formed(head)
        done = Done(generation=generation, node_id=self.me.node_id, incarnation=self.me.incarnation)
        key = self.keys.done(generation, self.me.node_id)
        if inputs.succeeded == generation and not self.view.holds(key, done):
            yield from self.ledger.write(Put(key=key, value=encode(done)))

    def _say_ready(self, inputs: Inputs, generation: int) -> Requests:
        ready = Ready(
            generation=generation,
            node_id=self.me.node_id,
            incarnation=self.me.incarnation,
            address=self.me.address,
            master_port=inputs.master_port,
            restarts_left=inputs.restarts_left,
        )
        key = self.keys.ready(generation, self.me.node_id)
        if not self.view.holds(key, ready):
            yield from self.ledger.write(Put(key=key, value=encode(ready)))

    def _say_formed(self, head: Plan) -> Requests:
        ready = self.view.ready(head.generation)
        if any(n.node_id not in ready or ready[n.node_id].incarnation != n.incarnation for n in head.active):
            return
        first = ready[head.active[0].node_id]
        formed = Formed(generation=head.generation, master_address=first.address, master_port=first.master_port)
        won = yield from self.ledger.create(self.keys.formed(head.generation), encode(formed))
        if won and head.generation > KEPT_GENERATIONS:
            yield from self.ledger.prune(head.generation - KEPT_GENERATIONS)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self, inputs: Inputs) -> Requests:
        """Everybody must know whether a plan is coming; only observers make it."""
        self._mark_times(inputs.now_ms)
        settings = self.settings
        decision = decide(
            self.view, settings.recovery, self._observed(inputs), settings.checkpointing, watched=settings.watched
        )
        self._mark_freeze(decision)
        self._mark_look(decision, inputs)
        self._mark_pause(decision, inputs)
        if isinstance(decision, Wait) and decision.vain:
            self._vain = (decision.vain, self.ledger.leases.attended_ms(inputs.now_ms))
        if self.ledger.observer_index() is None:
            return
        match decision:
            case Wait():
                self._note_wait(decision, inputs)
            case Commit():
                self.reason = f"deciding: {decision.plan.reason}"
                if self._settled(decision, inputs.now_ms):
                    key = self.keys.plan(decision.plan.generation)
                    over = (self.keys.finished,)
                    yield from self.ledger.create(key, encode(decision.plan), unless_changed=over)
            case Finish():
                next_plan = (self.keys.plan(self._generation() + 1),)
                yield from self.ledger.create(self.keys.finished, encode(decision.record), unless_changed=next_plan)

    def _mark_freeze(self, decision: Decision) -> None:
        match decision:
            case Wait():
                wanted = decision.freeze
            case Commit():
                wanted = decision.plan.action != "stop"
            case Finish():
                wanted = False
        self._freeze = self._generation() if wanted and self.settings.checkpointing.enabled else None
        self._asked_freeze = self._freeze

    def _mark_look(self, decision: Decision, inputs: Inputs) -> None:
        """Everybody that is asked looks, also those that do not decide.

        Who has not told in time is not waited for again until it has told, however often others raise their alarms.
        """
        head = self.view.head()
        asked = decision.unseen if isinstance(decision, Wait) else ()
        if head is not None and self._unseen_ms:
            done = frozenset(self.view.done(head.generation))
            left = unseen(self.view, head, done) if is_wanted(self.view, head) else ()
            self._unseen_ms = {n: ms for n, ms in self._unseen_ms.items() if n in left}
        for node_id in asked:
            self._unseen_ms.setdefault(node_id, self.ledger.leases.attended_ms(inputs.now_ms))
        self._look = self._generation() if self.me.node_id in {*asked, *self._unseen_ms} else None

    def _mark_pause(self, decision: Decision, inputs: Inputs) -> None:
        head = self.view.head()
        wanted = not isinstance(decision, Finish) and decision.pause
        if not wanted or head is None:
            self._pausing_ms = None
        elif self._pausing_ms is None:
            self._pausing_ms = self.ledger.leases.attended_ms(inputs.now_ms)
        self._pause = target(self.view, head) if wanted and head is not None else None

    def _unpaused(self, attended_ms: int, generation_ms: int) -> bool:
        """Whether workers have had long enough to stand still."""
        head = self.view.head()
        if head is None or self._pausing_ms is None:
            return False
        return attended_ms - self._pausing_ms >= allowed_ms(generation_ms, self._newest_step() - head.recovery_step)

    def _newest_step(self) -> int:
        """As the leases of the active nodes tell; 0 if none does."""
        head = self.view.head()
        return max((self.ledger.leases.step(n.node_id) or 0 for n in head.active), default=0) if head is not None else 0

    def _generation(self) -> int:
        head = self.view.head()
        return head.generation if head is not None else 0

    def _mark_times(self, now_ms: int) -> None:
        """Remembers when this agent first saw the newest plan and its formation.

        Waiting for other nodes is measured on the clock that leaves out the time in which this agent could not look.
        """
        generation = self._generation()
        if self._head_seen[0] != generation:
            self._head_seen = (generation, self.ledger.leases.attended_ms(now_ms))
            self._waiting_ms = self._pausing_ms = None
            self._vain = ("", 0)
            self._untold_ms.clear()
            self._unseen_ms.clear()
        if self._formed_seen[0] != generation and self.view.formed(generation) is not None:
            self._formed_seen = (generation, now_ms)

    def _mark_evidence(self, now_ms: int) -> None:
        """Remembers when this agent first saw evidence of a failure of this generation together with the leases.

        Evidence that is read later in a round may be younger than a heartbeat that the next round finds.
        """
        generation = self._generation()
        failed = any(e.reaction == "recover" for e in self.view.evidence(generation))
        if self._evidence_seen[0] != generation and failed:
            self._evidence_seen = (generation, now_ms)

    def _unconfirmed(self) -> frozenset[str]:
        head, leases = self.view.head(), self.ledger.leases
        if head is None:
            return frozenset()
        seen = self._evidence_seen
        others = [n.node_id for n in head.active if n.node_id != self.me.node_id]
        return frozenset(n for n in others if seen[0] != head.generation or (leases.heard_ms(n) or 0) <= seen[1])

    def _observed(self, inputs: Inputs) -> Observed:
        now_ms, generation, leases = inputs.now_ms, self._generation(), self.ledger.leases
        formed = self._formed_seen[0] == generation and generation > 0
        attended_ms = leases.attended_ms(now_ms)
        waited = attended_ms - self._waiting_ms if self._waiting_ms is not None else 0
        generation_ms = now_ms - self._formed_seen[1] if formed else 0
        return Observed(
            unconfirmed=self._unconfirmed(),
            late=self._late(attended_ms),
            silent=frozenset(m.node_id for m in self.ledger.watched() if leases.is_silent(m.node_id, now_ms)),
            generation_ms=generation_ms,
            wait_over=waited >= self.settings.join_timeout_ms,
            unpaused=self._unpaused(attended_ms, generation_ms),
            step=self._newest_step(),
            vain=self._vain[0] if attended_ms - self._vain[1] < VAIN_MS else "",
            unlooked=frozenset(n for n, ms in self._unseen_ms.items() if attended_ms - ms >= LOOK_MS),
            overdue=frozenset(m.node_id for m in self.view.live_members() if self._is_overdue(m, attended_ms)),
        )

    def _is_overdue(self, member: Member, attended_ms: int) -> bool:
        since_ms = self._untold_ms.get(member.incarnation)
        return since_ms is not None and attended_ms - since_ms >= TELL_MS

    def _late(self, attended_ms: int) -> frozenset[str]:
        """Nodes that live but do not become ready (their old workers can not be killed, say)."""
        head = self.view.head()
        if head is None or head.action == "stop" or self.view.formed(head.generation) is not None:
            return frozenset()
        if attended_ms - self._head_seen[1] < self.settings.form_timeout_ms:
            return frozenset()
        ready = self.view.ready(head.generation)
        return frozenset(n.node_id for n in head.active if n.node_id not in ready)

    def _note_wait(self, wait: Wait, inputs: Inputs) -> None:
        self.reason = wait.reason
        self._alert = wait.for_standby
        self._proposed = None
        attended_ms = self.ledger.leases.attended_ms(inputs.now_ms)
        if not wait.for_standby and not wait.untold:
            self._waiting_ms = None
        elif wait.for_standby and self._waiting_ms is None:
            self._waiting_ms = attended_ms
        left = untold(self.view, self.view.head(), frozenset()) if wait.freeze else ()  # else nobody is asked
        live = {m.incarnation for m in self.view.live_members() if m.node_id in left}
        self._untold_ms = {i: ms for i, ms in self._untold_ms.items() if i in live}
        for member in self.view.live_members():
            if member.node_id in wait.untold:
                self._untold_ms.setdefault(member.incarnation, attended_ms)
        waited = attended_ms - (self._started_ms or 0)
        if self.view.head() is None and waited >= self.settings.join_timeout_ms:
            self._finish(ExitCode.INFRASTRUCTURE_LOST, f"no group within join_timeout: {wait.reason}")

    def _settled(self, decision: Commit, now_ms: int) -> bool:
        """Listens as long as the decision asks, then lets the observers before this one go first.

        The time runs from the first proposal for this generation, so that news does not put a decision off for ever.
        After a clear cause it runs from the first evidence: what was heard while the vaults told counts too.
        """
        generation = decision.plan.generation
        if self._proposed is None or self._proposed[0] != generation:
            self._proposed = (generation, now_ms)
        window_ms = round(self.settings.recovery.evidence_window_s * 1000)
        listen_ms = {"now": 0, "brief": min(BRIEF_MS, window_ms), "window": window_ms}[decision.settle]
        index = self.ledger.observer_index() or 0
        since_ms = self._proposed[1]
        if decision.settle == "brief" and self._evidence_seen[0] == decision.plan.from_generation:
            listen_ms = max(0, listen_ms - max(0, since_ms - self._evidence_seen[1]))
        left = listen_ms + STAGGER_MS * min(index, MAX_STAGGER) - (now_ms - since_ms)
        self._due_ms = max(1, left)
        return left <= 0

    # -- following ----------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str, *, cause: Cause | None = None) -> None:
        if self.end is None:
            self.end = End(exit_code=int(code), reason=reason, cause=cause)

    def _follow(self, inputs: Inputs) -> None:
        """Ends this agent if the newest records say so."""
        me, aside, dismissed = self.me.node_id, self._quarantine(), None
        if self._slot() is None:
            dismissed = next((p for p in self._unseen_plans(inputs) if me in p.dismissed), None)
        if run_is_over(self.view):
            self.end = self.end or end_of_run(self.view)
        elif dismissed is not None:
            self._finish(ExitCode.TRAINING_FAILED, dismissed.dismissed[me], cause=dismissed.cause)
        elif aside and self.settings.recovery.quarantined == "exit":
            self._finish(ExitCode.QUARANTINED, f"this node was put aside: {aside}")

    def _unseen_plans(self, inputs: Inputs) -> tuple[Plan, ...]:
        """The plans since the workers here were started: one may have been missed. None for a new process."""
        return self.view.plans_after(inputs.workers_generation) if inputs.workers_generation else ()

    def _quarantine(self) -> str | None:
        return self.view.quarantine_reason(self.me.node_id) if self._slot() is None else None

    def _leave(self, inputs: Inputs, leave: Leave) -> Requests:
        """The last one out wipes the records of the run."""
        if not self._left:
            yield from self.joining.settle(inputs)
            if self.ledger.registered:
                yield from self.ledger.resign("left", leave.reason, planned=leave.planned)
            if self.joining.tried and not self.view.live_members() and not self.view.unreadable_members():
                yield from self.ledger.clear()
            self._left = True
        self._finish(ExitCode.SUCCEEDED, leave.reason)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Events for what is new in the view, each once: each plan after the faults that led to it."""
        head = self.view.head()
        if head is None:
            return
        for plan in self.view.plans_after(self._told_generation):
            self._tell_faults(plan.from_generation)
            self._tell_gone(plan)
            self._notes.append(plan_note(plan))
            self._told_generation = plan.generation
        self._tell_faults(head.generation)
        self._tell_unfit(head)
        done = self.view.done(head.generation)
        for node in head.active:
            gone = self.view.gone(node.node_id)
            left = gone is not None and gone.incarnation == node.incarnation and node.node_id not in done
            if gone is not None and left and head.action != "stop":
                cause = gone_cause(gone, self.view.member(node.node_id))
                self._once(f"gone {node.incarnation}", fault_note(cause, "primary", gone.by, head.generation))

    def _tell_gone(self, plan: Plan) -> None:
        """What led to the plan, if it is a whole node: unless there is evidence of it, which is told as such."""
        cause = plan.cause
        if cause is None or cause.rank is not None or not cause.incarnation or cause.failure_class not in WHOLE_NODE:
            return
        if all(e.cause != cause for e in self.view.evidence(plan.from_generation)):
            note = fault_note(cause, "primary", "", plan.from_generation)
            self._once(f"gone {cause.incarnation}", note)

    def _tell_faults(self, generation: int) -> None:
        for e in self.view.evidence(generation):
            key = f"evidence {generation} {e.reporter} {e.cause.pid} {e.cause.node_id} {e.at_ms}"
            self._once(key, fault_note(e.cause, e.weight, e.reporter, generation, attributed=e.attributed))
        self._tell_seen(generation)

    def _tell_seen(self, generation: int) -> None:
        """What came of an alarm, or ranks that do not agree and so failed: when all have told, or a plan was made."""
        head = next((p for p in self.view.plans_after(generation - 1) if p.generation == generation), None)
        if head is None or not self.settings.watched or head.action == "stop" or not is_wanted(self.view, head):
            return
        over = self.view.plans_after(generation)
        if not over and unseen(self.view, head, frozenset(self.view.done(generation))):
            return
        found = localized(self.view, head)
        if found.excused:
            return
        if alarmed(self.view, head) is None and found.failure_class != "collective_desync":
            return
        headline = witness(self.view, head, found).cause.headline()
        seen = list(sighted(self.view, head).values())
        self._once(f"seen {generation}", look_note(found, seen, generation, headline))

    def _tell_unfit(self, head: Plan) -> None:
        for node in head.active:
            reason, member = self.view.unfit_reason(node.node_id), self.view.member(node.node_id)
            if reason is not None and member is not None and head.action != "stop":
                self._once(f"unfit {node.incarnation} {reason}", unfit_note(member, reason, head.generation))

    def _once(self, key: str, note: Note) -> None:
        if key not in self._told:
            self._told.add(key)
            self._notes.append(note)

    def _outcome(self, inputs: Inputs) -> Outcome:
        head, slot = self.view.head(), self._slot()
        notes, self._notes = tuple(self._notes), []
        behind = head is not None and inputs.workers_generation < head.generation
        over = self.end is not None or not self.ledger.registered
        return Outcome(
            standing=self._standing(),
            waiting_for=self.end.reason if self.end is not None else self.reason,
            next_ms=self._next_ms(inputs.now_ms),
            plan=head if self.ledger.registered else None,
            formed=self.view.formed(head.generation) if head is not None and slot is not None else None,
            slot=slot,
            stop_workers=behind or over,
            workers_generation=inputs.workers_generation,
            charged=slot is not None and any(self.me.node_id in p.charged for p in self._unseen_plans(inputs)),
            alert=self._alert,
            freeze=self._freeze if self.end is None else None,
            look=self._look if self.end is None else None,
            pause=self._pause if self.end is None else None,
            end=self.end,
            notes=notes,
        )

    def _standing(self) -> Standing:
        if self.end is not None:
            return "ended"
        if not self.ledger.registered:
            return "joining"
        if self._slot() is not None:
            return "active"
        return "quarantined" if self._quarantine() else "standby"

    def _next_ms(self, now_ms: int) -> int:
        """No later than the next heartbeat, the first lease that may run out, and the end of a settling time."""
        leases, members = self.ledger.leases, self.ledger.watched()
        watched = [m.node_id for m in members]
        due = [self.settings.config.heartbeat_interval_ms, leases.next_expiry_ms(watched, now_ms)]
        suspected = self.partings.next_ms(self.view, leases, members, now_ms)
        if suspected is not None:
            due.append(suspected)
        if self._due_ms is not None:
            due.append(self._due_ms)
        return max(1, min(due))
