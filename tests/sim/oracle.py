"""Sees everything: each write at the moment it takes effect, and each act of each agent. Asks the invariants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmres.errors import RecordError
from lmres.ids import Keys
from lmres.ports import Put, Txn
from lmres.rendezvous import state
from lmres.rendezvous.codec import TYPE_KEY, decode
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.rounds import End, Outcome
from lmres.scout.sighting import Sighting

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.world import World

_KINDS = {
    c.__name__: c
    for c in (
        Plan,
        state.RunConfig,
        state.Member,
        state.Lease,
        state.Gone,
        state.Hold,
        state.StopRequest,
        state.Evidence,
        state.Ready,
        state.Formed,
        state.Done,
        state.Finished,
        state.Door,
        state.Banned,
        state.Parted,
        state.Holdings,
        state.Health,
        state.Paused,
        Sighting,
    )
}


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What an agent knew when it sent a plan, of the generation before. ``sightings``: the newest of each node whose
    incarnation is active. ``unfit``: incarnations. ``standbys``: node ids of those that could be used."""

    sightings: dict[str, Sighting]
    evidence: tuple[state.Evidence, ...]
    unfit: frozenset[str]
    standbys: frozenset[str]
    paused: dict[str, state.Paused]
    formed: bool

    @property
    def alarms(self) -> tuple[Sighting, ...]:
        return tuple(s for _, s in sorted(self.sightings.items()) if s.alarm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """``record`` and ``before`` are None where the text can not be read; ``by`` is None for the operator and faults."""

    key: str
    record: Any
    before: Any
    by: Process | None


class Invariant:
    """One property. Each hook is called at the moment it names; a broken property calls ``fail``."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.world = oracle.world

    def fail(self, message: str) -> None:
        name = type(self).__module__.rsplit(".", 1)[-1]
        self.world.log(f"VIOLATION {name}: {message}")
        raise Violation(f"{name}: {message} (seed {self.world.seed}, at {self.world.now_ms} ms)")

    def planned(self, plan: Plan, previous: Plan | None) -> None:
        """A plan stands in the store."""

    def wrote(self, write: Write) -> None:
        """Any record was written; ``oracle.records`` does not hold it yet."""

    def wiped(self, by: Process | None) -> None:
        """The run's records are gone; ``oracle.records`` still holds them."""

    def starts(self, process: Process, generation: int, slot: int) -> None:
        """An agent starts workers."""

    def trains(self, plan: Plan, group: dict[int, tuple[Process, Workers]]) -> None:
        """A group begins to train."""

    def stops(self, process: Process, outcome: Outcome) -> None:
        """An agent stops living workers because it was told to."""

    def charged(self, process: Process, generation: int) -> None:
        """An agent spends one of torch's restarts; already counted down."""

    def ends(self, process: Process, end: End) -> None:
        """An agent ends by itself."""

    def at_rest(self) -> None:
        """Nothing has failed for ``REST_MS``."""

    def at_end(self) -> None:
        """Nothing happens any more."""


class Oracle:
    """``epoch`` counts how often the records were wiped; ``records`` is what stands in the store, as it was last read;
    ``torn`` the keys under which it can not be read now; ``deciding`` the agent that wrote the newest plan; ``reads``
    what the writer of each plan knew, by the plan's name. ``gone`` and ``finished`` outlive the records."""

    def __init__(self, world: World) -> None:
        from tests.sim.invariants import ALL

        self.world = world
        self.epoch = 1
        self.records: dict[str, Any] = {}
        self.torn: set[str] = set()
        self.plans: dict[tuple[int, int], Plan] = {}
        self.plan_ms: dict[tuple[int, int], int] = {}
        self.formed_ms: dict[tuple[int, int], int] = {}
        self.failed_ms: dict[tuple[int, int], int] = {}
        self.finished: list[state.Finished] = []
        self.gone: list[state.Gone] = []
        self.beat_ms: dict[str, int] = {}
        self.beats: dict[str, int] = {}
        self.noted_ms: dict[str, int] = {}
        self.asked_ms: dict[tuple[int, int], int] = {}
        self.trained: set[tuple[int, int, str]] = set()
        self.readmitted: dict[str, int] = {}
        self.deciding: Process | None = None
        self.reads: dict[str, Read] = {}
        self.invariants = [kind(self) for kind in ALL]

    # -- what invariants ask ------------------------------------------------------------------------------------------

    def read(self, plan: Plan) -> Read:
        """What the writer of a plan knew."""
        return self.reads[plan.plan_id]

    def plan(self, generation: int, *, known_to: Process | None = None) -> Plan | None:
        """Of the run that an agent has read of last; records may have been wiped while it was stopped."""
        epoch = self.epoch if known_to is None else known_to.round_epoch
        return self.plans.get((epoch, generation))

    def head(self) -> Plan | None:
        newest = max((g for e, g in self.plans if e == self.epoch), default=0)
        return self.plan(newest)

    def of_kind(self, kind: type) -> list[Any]:
        return [r for _, r in sorted(self.records.items()) if isinstance(r, kind)]

    def member(self, node_id: str) -> state.Member | None:
        return self.records.get(self.world.keys.member(node_id))

    def is_live(self, node_id: str, incarnation: str) -> bool:
        member, gone = self.member(node_id), self.records.get(self.world.keys.gone(node_id))
        if member is None or member.incarnation != incarnation:
            return False
        return gone is None or gone.incarnation != incarnation

    def may_be_vacated(self, node_id: str, incarnation: str) -> bool:
        """Gone; or its registration is torn, and who has not read it before can not know of it."""
        return not self.is_live(node_id, incarnation) or self.world.keys.member(node_id) in self.torn

    def torn_and_silent(self, member: state.Member) -> bool:
        """Its registration can not be read, so it can not be declared lost by name, but its lease is over."""
        quiet_ms = self.world.now_ms - self.beat_ms.get(member.incarnation, 0)
        torn = self.world.keys.member(member.node_id) in self.torn
        return torn and quiet_ms >= self.world.scenario.timeout_ms * 0.93

    def process_of(self, incarnation: str) -> Process | None:
        name = incarnation.rsplit(".", 1)[0]
        return next((p for p in self.world.processes if p.name == name), None)

    def failed(self, group: tuple[int, int]) -> None:
        """A worker has failed, and its agent has noticed."""
        self.failed_ms.setdefault(group, self.world.now_ms)

    def asked(self, group: tuple[int, int]) -> None:
        """An agent wants to know what vaults hold, because a plan may be coming."""
        self.asked_ms.setdefault(group, self.world.now_ms)

    # -- what the world tells -----------------------------------------------------------------------------------------

    def before(self, txn: Txn) -> dict[str, Any]:
        keys = {op.key for branch in (txn.success, txn.failure) for op in branch if isinstance(op, Put)}
        return {k: self.records.get(k) for k in keys}

    def wrote(self, key: str, before: Any, value: str, by: Process | None, expected: dict[str, int]) -> None:
        del expected
        record = _read(self.world.keys, key, value)
        if not isinstance(record, state.Lease):
            who = by.name if by is not None else "OUTSIDE"
            self.world.log(f"{who} wrote {key.removeprefix(self.world.keys.base)}: {_shown(record, value)}")
        write = Write(key=key, record=record, before=before, by=by)
        for invariant in self.invariants:
            invariant.wrote(write)
        self._keep(write)

    def asks(self, process: Process, txn: Txn) -> None:
        """An agent sends a request: a plan may arrive long after its writer has read more."""
        for op in txn.success:
            plan = _read(self.world.keys, op.key, op.value) if isinstance(op, Put) and "/plan/" in op.key else None
            if isinstance(plan, Plan):
                self.reads[plan.plan_id] = _known(process.agent.view, plan.from_generation)

    def _keep(self, write: Write) -> None:
        record, now_ms = write.record, self.world.now_ms
        if record is None:
            self.torn.add(write.key)
            return  # as it was when it could be read
        self.torn.discard(write.key)
        self.records[write.key] = record
        match record:
            case state.Lease():
                self.beat_ms[record.incarnation] = now_ms
                self.beats[record.incarnation] = self.beats.get(record.incarnation, 0) + 1
            case state.Parted():
                self.noted_ms[write.key] = now_ms
            case state.Done() if self.world.at_success is not None:
                done = {d.node_id for d in self.of_kind(state.Done) if d.generation == record.generation}
                plan = self.plan(record.generation)
                if plan is not None and done >= {n.node_id for n in plan.active}:
                    self.world.at_success()
            case state.Finished():
                self.finished.append(record)
            case state.Gone():
                self.gone.append(record)
            case state.Formed():
                self.formed_ms.setdefault((self.epoch, record.generation), now_ms)
            case state.Hold() if record.kind == "readmit":
                self.readmitted[record.node_id] = max(record.generation, self.readmitted.get(record.node_id, 0))
            case Plan():
                self._keep_plan(record, write.by)

    def _keep_plan(self, plan: Plan, by: Process | None) -> None:
        known = self.plan(plan.generation)
        if known is not None:
            return  # judged by ``one_plan``
        self.plans[(self.epoch, plan.generation)] = plan
        self.plan_ms[(self.epoch, plan.generation)] = self.world.now_ms
        self.deciding = by
        if by is not None:
            self.world.doubts.learned(plan)
        for invariant in self.invariants:
            invariant.planned(plan, self.plan(plan.generation - 1))

    def wiped(self, by: Process | None) -> None:
        self.world.log(f"{by.name if by is not None else 'OUTSIDE'} wiped the records")
        for invariant in self.invariants:
            invariant.wiped(by)
        self.epoch += 1
        self.records.clear()
        self.torn.clear()
        self.readmitted.clear()

    def pruned(self, prefix: str) -> None:
        for key in [k for k in self.records if k.startswith(prefix)]:
            del self.records[key]

    def starts(self, process: Process, generation: int, slot: int) -> None:
        self.world.log(f"{process.name} starts workers: generation {generation} slot {slot}")
        for invariant in self.invariants:
            invariant.starts(process, generation, slot)

    def trains(self, plan: Plan, group: dict[int, tuple[Process, Workers]]) -> None:
        for invariant in self.invariants:
            invariant.trains(plan, group)

    def stops(self, process: Process, outcome: Outcome) -> None:
        self.world.log(f"{process.name} stops its workers of generation {process.workers_generation}")
        for invariant in self.invariants:
            invariant.stops(process, outcome)

    def charged(self, process: Process, generation: int) -> None:
        self.world.log(f"{process.name} spends a restart for generation {generation}, {process.restarts_left} left")
        for invariant in self.invariants:
            invariant.charged(process, generation)

    def succeeded(self, process: Process, workers: Workers) -> None:
        self.world.log(f"{process.name} workers of generation {workers.generation} ended well")
        self.trained.add((*workers.group, process.node_id))

    def ends(self, process: Process, end: End) -> None:
        self.world.log(f"{process.name} ends with {end.exit_code}: {end.reason}")
        for invariant in self.invariants:
            invariant.ends(process, end)

    def at_rest(self) -> None:
        for invariant in self.invariants:
            invariant.at_rest()

    def at_end(self) -> None:
        for invariant in self.invariants:
            invariant.at_end()


def _known(view: state.View, generation: int) -> Read:
    head = view.head()
    active = {n.node_id: n.incarnation for n in head.active} if head is not None else {}
    told = view.sightings(generation)
    health = [r for _, r in view.under(f"{view.keys.reg}health/", state.Health)]
    return Read(
        sightings={n: s for n, s in told.items() if active.get(n) == s.incarnation},
        evidence=view.evidence(generation),
        unfit=frozenset(h.incarnation for h in health if not h.fit),
        standbys=frozenset(m.node_id for m in view.standbys()),
        paused=view.paused(generation),
        formed=view.formed(generation) is not None,
    )


def _read(keys: Keys, key: str, value: str) -> Any:
    """The record, if it is whole and stands where it belongs."""
    try:
        body = json.loads(value)
        record = decode(_KINDS[body[TYPE_KEY]], value)
    except (RecordError, ValueError, KeyError, TypeError):
        return None
    return record if key.startswith(_home(keys, record)) else None


def _home(keys: Keys, record: Any) -> str:
    match record:
        case Plan():
            return keys.plan(record.generation)
        case state.Formed():
            return keys.formed(record.generation)
        case state.Evidence():
            return f"{keys.reg}evidence/{record.generation:08d}/{record.reporter}/"
        case state.Ready():
            return keys.ready(record.generation, record.node_id)
        case state.Done():
            return keys.done(record.generation, record.node_id)
        case state.Member():
            return keys.member(record.node_id)
        case state.Gone():
            return keys.gone(record.node_id)
        case state.Hold():
            return keys.hold(record.node_id)
        case state.Parted():
            return keys.parted(record.node_id, record.by)
        case state.Lease():
            return keys.lease(record.incarnation.split("#", 1)[0])
        case state.RunConfig():
            return keys.config
        case state.StopRequest():
            return keys.stop
        case state.Finished():
            return keys.finished
        case state.Banned():
            return keys.banned(record.step, record.origin)
        case state.Holdings():
            return keys.holdings(record.node_id)
        case state.Health():
            return keys.health(record.node_id)
        case state.Paused():
            return keys.paused(record.generation, record.node_id)
        case Sighting():
            return keys.sighting(record.generation, record.node_id)
        case _:
            return keys.door


def _shown(record: Any, value: str) -> str:
    match record:
        case None:
            return f"unreadable {value[:40]!r}"
        case Plan():
            slots = " ".join(f"{n.slot}={n.incarnation}" for n in record.active)
            aside = ",".join(q.node_id for q in record.quarantined)
            return f"{record.action} [{slots}] charged {record.charged} aside [{aside}] because {record.reason}"
        case state.Gone():
            return f"{record.incarnation} {record.how}: {record.reason}"
        case state.Parted():
            return f"connections to {record.incarnation} {'are back' if record.back else 'broke'}"
        case state.Evidence():
            what = record.weight if record.reaction == "recover" else record.reaction
            return f"{what}: {record.cause.headline()}"
        case state.Health():
            return f"{record.incarnation} {'fit' if record.fit else f'unfit: {record.reason}'}"
        case Sighting():
            return f"sighting {record.number} of generation {record.generation}{' ALARM' if record.alarm else ''}"
        case state.Finished():
            return f"{record.outcome} {record.exit_code}: {record.reason}"
        case _:
            return type(record).__name__
