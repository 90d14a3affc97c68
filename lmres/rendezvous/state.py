"""The records of a run, and the view that an agent has of them.

Every record lives under one key of the store (``lmres.ids``) and is written by whoever is named here:

=========== ======================= ==========================================================================
record      written by              meaning
=========== ======================= ==========================================================================
RunConfig   the first agent         what all agents of the run must agree on; never changes
Member      its agent               a registration; a new incarnation replaces it
Door        its agent               who registered last; who wipes the records makes sure that nobody comes in
Lease       its agent               a counter that moves while the agent lives
Gone        its agent or observers  this incarnation left, or was found lost; final for the incarnation
Parted      the witness             its connections to an incarnation broke, or are there again (``parting.py``)
Hold        the operator            drain or readmit a node; the latest one counts
Evidence    the witness             what was seen to fail in a generation
Sighting    its agent               what its workers were doing, after an alarm (``lmres.scout.sighting``)
Paused      its agent               where its workers stand still, or how far they may come (``pausing.py``)
Health      its agent               whether its host is fit for training; written when that changes
Plan        one agent, once         the only plan of its generation; never changes (``plan.py``)
Ready       its agent               its old workers are gone, it waits for the plan's group
Formed      slot 0                  all were ready: where the group meets; never changes
Done        its agent               all its workers of the generation ended with 0
Recovered   its agent               how long each phase of a recovery took here
Holdings    its agent               what its vault held when it was frozen (``lmres.gemini.inventory``)
Banned      the witness             a state that led to a failure or can not be restored; final
Finished    one agent, once         the run succeeded or failed
=========== ======================= ==========================================================================

The view keeps each record with the revision of its last change. A record that cannot be read, or stands under another
record's key, counts as absent, or as it was when it was last read; its revision is kept, so that a compare-and-set can
replace it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lmres.errors import RecordError
from lmres.gemini.inventory import Holdings
from lmres.ids import Keys
from lmres.ports import Entry
from lmres.rendezvous.codec import decode
from lmres.rendezvous.plan import Cause, Plan
from lmres.scout.sighting import Pace, Sighting

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """``policy`` is the canonical policy as JSON text, or None when the run has none.

    ``token`` is unique to this set of records, also among runs of one id: memory that a vault still holds for another
    token is of another run, in which the same origins meant other images.
    """

    min_nodes: int
    max_nodes: int
    local_world_size: int
    role: str
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    policy: str | None
    written_by: str
    version: str
    token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A registration. ``boot_id``, ``pid`` and ``pid_start`` (clock ticks since boot) name the process exactly.

    ``pulse_port``: where neighbours keep a connection to it, at ``address``; 0 if it does not listen.
    """

    node_id: str
    incarnation: str
    address: str
    host: str
    boot_id: str
    pid: int
    pid_start: int
    failure_domain: str
    state_dir: str = ""
    pulse_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a node's vault keeps, for people. ``copies`` of ``copies_wanted``, the own one included."""

    memory_bytes: int
    memory_limit_bytes: int
    safe_step: int | None
    copies: int
    copies_wanted: int
    durable_step: int | None = None
    verified_step: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    incarnation: str
    counter: int
    step: int | None = None
    keeping: Keeping | None = None
    paces: tuple[Pace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """``how``: ``left`` by itself, ``lost`` as seen by others, ``refused`` at the door. ``planned``: told to leave.

    ``quiet_ms``: how long its lease had stood still when it was found lost; ``step``: the last one its lease told;
    ``witnesses``: to whom connections to it had closed, if it was found lost by that.
    """

    node_id: str
    incarnation: str
    how: Literal["left", "lost", "refused"]
    reason: str
    by: str
    planned: bool = False
    quiet_ms: int | None = None
    step: int | None = None
    witnesses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """The connections of a witness (``by``) to this incarnation broke. ``back``: they are there again.

    ``number`` counts the breaks that this witness has seen: a new one is a new record.
    """

    node_id: str
    incarnation: str
    by: str
    by_incarnation: str
    number: int
    back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """``generation`` is the newest one when the operator spoke."""

    node_id: str
    kind: Literal["drain", "readmit"]
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One failure as its witness saw it.

    ``reaction``: ``recover``, a plan follows; ``replace``, nothing has failed yet, and the suspect's node is replaced
    when a standby is there; ``report``, it is told and nothing follows. ``evict``: with ``recover``, the node is put
    aside if a standby is there. ``trusted``: with ``recover``, only states up to this (step, origin) are restored.
    ``attributed`` False: it is not known who is at fault; nobody is struck or put aside for it.

    ``cause`` names node, rank, exit code or exception. ``at_ms`` is the witness's CLOCK_MONOTONIC, comparable only
    between records of one ``boot_id``. ``fit`` False says that the suspect's node cannot go on at all.
    """

    generation: int
    reporter: str
    incarnation: str
    weight: Literal["primary", "ambiguous", "secondary"]
    cause: Cause
    boot_id: str
    at_ms: int
    fit: bool = True
    reaction: Literal["recover", "replace", "report"] = "recover"
    evict: bool = False
    trusted: tuple[int, int] | None = None
    attributed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the host of this incarnation is fit for training. ``reason``: one line, empty while it is."""

    node_id: str
    incarnation: str
    fit: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """``reach``: the step that no worker here passes without standing still. ``step``: at whose boundary all of them
    stand, their states captured; None while they do not. ``problem``: why they can not."""

    generation: int
    node_id: str
    incarnation: str
    reach: int
    step: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """``restarts_left`` is torch's budget on this agent, None when unknown."""

    generation: int
    node_id: str
    incarnation: str
    address: str
    master_port: int
    restarts_left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    generation: int
    master_address: str
    master_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    generation: int
    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Phases of one recovery on one node, in seconds; None where not known."""

    generation: int
    node_id: str
    cause: str
    phases: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Banned:
    """The images of this key are never restored (again)."""

    step: int
    origin: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    outcome: Literal["succeeded", "failed"]
    exit_code: int
    reason: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record with the revision of its last change.

    ``problem`` says why the newest text could not be read; ``record`` is then the last that could, or None.
    """

    record: Any
    revision: int
    created: int
    problem: str = ""


_SECTIONS: dict[str, type] = {
    "config": RunConfig,
    "member": Member,
    "door": Door,
    "gone": Gone,
    "parted": Parted,
    "hold": Hold,
    "stop": StopRequest,
    "evidence": Evidence,
    "sighting": Sighting,
    "health": Health,
    "paused": Paused,
    "plan": Plan,
    "ready": Ready,
    "formed": Formed,
    "done": Done,
    "recovered": Recovered,
    "holdings": Holdings,
    "banned": Banned,
    "finished": Finished,
}


@dataclass(slots=True)
class View:
    """What an agent knows of the store. Grows by ``apply``; ``revision`` is the newest one it has read."""

    keys: Keys
    revision: int = 0
    stored: dict[str, Stored] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    _sections: dict[str, dict[str, Stored]] = field(default_factory=dict)
    _head: Plan | None = None
    _live: tuple[Member, ...] | None = None
    _parted: dict[str, tuple[tuple[int, Parted], ...]] | None = None

    def apply(self, entries: Iterable[Entry], revision: int) -> None:
        for entry in entries:
            self._apply_one(entry)
        self.revision = max(self.revision, revision)

    def _apply_one(self, entry: Entry) -> None:
        key = entry.key
        section = self._section(key)
        if section not in _SECTIONS:
            return
        try:
            record: Any = decode(_SECTIONS[section], entry.value)
            if not self._belongs(record, key):
                raise RecordError(f"{type(record).__name__} of another key found under {key}")
            problem = ""
            self.problems.pop(key, None)
        except RecordError as error:
            before = self.stored.get(key)
            record, problem = before.record if before is not None else None, str(error)
            self.problems[key] = problem
        stored = Stored(record=record, revision=entry.mod_revision, created=entry.create_revision, problem=problem)
        self.stored[key] = stored
        self._sections.setdefault(section, {})[key] = stored
        if section in ("member", "gone"):
            self._live = self._parted = None
        elif section == "parted":
            self._parted = None
        if isinstance(record, Plan) and (self._head is None or record.generation >= self._head.generation):
            self._head = record

    def drop(self, prefixes: tuple[str, ...]) -> None:
        """Forgets records that were deleted."""
        for key in [k for k in self.stored if k.startswith(prefixes)]:
            del self.stored[key]
            self._sections.get(self._section(key), {}).pop(key, None)
            self.problems.pop(key, None)

    def _section(self, key: str) -> str:
        for prefix in (self.keys.ctl, self.keys.reg):
            if key.startswith(prefix):
                return key[len(prefix) :].split("/", 1)[0]
        return ""

    def _belongs(self, record: Any, key: str) -> bool:
        match record:
            case Plan():
                return key == self.keys.plan(record.generation)
            case Formed():
                return key == self.keys.formed(record.generation)
            case Member():
                return key == self.keys.member(record.node_id)
            case Gone():
                return key == self.keys.gone(record.node_id)
            case Parted():
                return key == self.keys.parted(record.node_id, record.by)
            case Hold():
                return key == self.keys.hold(record.node_id)
            case Ready():
                return key == self.keys.ready(record.generation, record.node_id)
            case Done():
                return key == self.keys.done(record.generation, record.node_id)
            case Holdings():
                return key == self.keys.holdings(record.node_id)
            case Banned():
                return key == self.keys.banned(record.step, record.origin)
            case Sighting():
                return key == self.keys.sighting(record.generation, record.node_id)
            case Paused():
                return key == self.keys.paused(record.generation, record.node_id)
            case Health():
                return key == self.keys.health(record.node_id)
            case Evidence():
                number = key.rsplit("/", 1)[-1]
                return number.isdecimal() and key == self.keys.evidence(record.generation, record.reporter, int(number))
            case _:
                return True

    def get(self, key: str, kind: type[T]) -> T | None:
        stored = self.stored.get(key)
        return stored.record if stored is not None and isinstance(stored.record, kind) else None

    def mod_revision(self, key: str) -> int:
        stored = self.stored.get(key)
        return stored.revision if stored is not None else 0

    def holds(self, key: str, record: object) -> bool:
        """Whether exactly this record stands in the store, whole."""
        stored = self.stored.get(key)
        return stored is not None and not stored.problem and stored.record == record

    def under(self, prefix: str, kind: type[T]) -> Iterator[tuple[Stored, T]]:
        """The readable records of a kind below a prefix, in key order."""
        section = self._sections.get(self._section(prefix), {})
        for key in sorted(k for k in section if k.startswith(prefix)):
            stored = section[key]
            if isinstance(stored.record, kind):
                yield stored, stored.record

    # -- what the protocol asks ---------------------------------------------------------------------------------

    @property
    def config(self) -> RunConfig | None:
        return self.get(self.keys.config, RunConfig)

    @property
    def finished(self) -> Finished | None:
        return self.get(self.keys.finished, Finished)

    def head(self) -> Plan | None:
        """The plan of the newest generation."""
        return self._head

    def plans_after(self, generation: int) -> tuple[Plan, ...]:
        """The plans of all newer generations, oldest first."""
        return tuple(p for _, p in self.under(f"{self.keys.ctl}plan/", Plan) if p.generation > generation)

    def formed(self, generation: int) -> Formed | None:
        return self.get(self.keys.formed(generation), Formed)

    def member(self, node_id: str) -> Member | None:
        return self.get(self.keys.member(node_id), Member)

    def gone(self, node_id: str) -> Gone | None:
        """Set if the node's newest incarnation is gone."""
        member, gone = self.member(node_id), self.get(self.keys.gone(node_id), Gone)
        if gone is None or member is None or gone.incarnation != member.incarnation:
            return None
        return gone

    def is_live(self, node_id: str, incarnation: str) -> bool:
        member = self.member(node_id)
        return member is not None and member.incarnation == incarnation and self.gone(node_id) is None

    def live_members(self) -> tuple[Member, ...]:
        """In the order of their registration."""
        if self._live is None:
            members = [
                pair for pair in self.under(f"{self.keys.reg}member/", Member) if self.gone(pair[1].node_id) is None
            ]
            self._live = tuple(m for _, m in sorted(members, key=lambda pair: pair[0].revision))
        return self._live

    def parted(self) -> dict[str, tuple[tuple[int, Parted], ...]]:
        """By the node id of each live subject: what live witnesses have noted of it, with the revision at which."""
        if self._parted is None:
            found: dict[str, list[tuple[int, Parted]]] = {}
            for stored, p in self.under(f"{self.keys.reg}parted/", Parted):
                told = not p.back and not stored.problem and p.by != p.node_id
                if told and self.is_live(p.node_id, p.incarnation) and self.is_live(p.by, p.by_incarnation):
                    found.setdefault(p.node_id, []).append((stored.revision, p))
            self._parted = {node_id: tuple(noted) for node_id, noted in found.items()}
        return self._parted

    def unreadable_members(self) -> tuple[str, ...]:
        """Node ids under which something stands that can not be read, and never could: somebody may be there."""
        prefix = f"{self.keys.reg}member/"
        section = self._sections.get("member", {})
        return tuple(key[len(prefix) :] for key in sorted(section) if section[key].record is None)

    def evidence(self, generation: int) -> tuple[Evidence, ...]:
        """In the order of arrival."""
        found = [
            (stored.created, e)
            for stored, e in self.under(f"{self.keys.reg}evidence/{generation:08d}/", Evidence)
            if e.generation == generation
        ]
        return tuple(e for _, e in sorted(found, key=lambda pair: pair[0]))

    def ready(self, generation: int) -> dict[str, Ready]:
        prefix = f"{self.keys.reg}ready/{generation:08d}/"
        return {r.node_id: r for _, r in self.under(prefix, Ready) if r.generation == generation}

    def done(self, generation: int) -> dict[str, Done]:
        prefix = f"{self.keys.reg}done/{generation:08d}/"
        return {d.node_id: d for _, d in self.under(prefix, Done) if d.generation == generation}

    def holdings(self) -> dict[str, tuple[int, Holdings]]:
        """What each node said last, with the revision at which it did."""
        return {h.node_id: (stored.revision, h) for stored, h in self.under(f"{self.keys.reg}holdings/", Holdings)}

    def sightings(self, generation: int) -> dict[str, Sighting]:
        """Of this generation, by node id."""
        prefix = f"{self.keys.reg}sighting/{generation:08d}/"
        return {s.node_id: s for _, s in self.under(prefix, Sighting) if s.generation == generation}

    def paused(self, generation: int) -> dict[str, Paused]:
        """Of this generation, by node id."""
        prefix = f"{self.keys.reg}paused/{generation:08d}/"
        return {p.node_id: p for _, p in self.under(prefix, Paused) if p.generation == generation}

    def unfit_reason(self, node_id: str) -> str | None:
        """Why the host of the node's newest incarnation is unfit, as its own agent says; None if it is fit."""
        health, member = self.get(self.keys.health(node_id), Health), self.member(node_id)
        if health is None or health.fit or member is None or member.incarnation != health.incarnation:
            return None
        return health.reason or "unfit"

    def banned(self) -> tuple[Banned, ...]:
        return tuple(b for _, b in self.under(f"{self.keys.reg}banned/", Banned))

    def stop_request(self) -> StopRequest | None:
        return self.get(self.keys.stop, StopRequest)

    def hold(self, node_id: str) -> Hold | None:
        return self.get(self.keys.hold(node_id), Hold)

    def quarantine_reason(self, node_id: str) -> str | None:
        """Why this node may not be used now; None if it may."""
        hold, head = self.hold(node_id), self.head()
        if hold is not None and hold.kind == "drain":
            return f"drained by the operator: {hold.reason}"
        for item in head.quarantined if head is not None else ():
            if item.node_id == node_id and not (hold is not None and hold.generation >= item.generation):
                return item.reason
        return None

    def standbys(self) -> tuple[Member, ...]:
        """Live, fit for use, not active in the newest plan and not sent away by it; in order of registration."""
        head = self.head()
        busy = {(s.node_id, s.incarnation) for s in head.active} if head is not None else set()
        return tuple(
            m
            for m in self.live_members()
            if (m.node_id, m.incarnation) not in busy
            and self.quarantine_reason(m.node_id) is None
            and not self._is_dismissed(m.node_id)
        )

    def _is_dismissed(self, node_id: str) -> bool:
        """By the newest plan; an agent that registered after it is a new one."""
        head = self.head()
        if head is None or node_id not in head.dismissed:
            return False
        return self.mod_revision(self.keys.member(node_id)) < self.mod_revision(self.keys.plan(head.generation))
