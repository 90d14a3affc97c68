"""How the control plane grows with the number of agents: the shipped rounds and decisions, no process, no network.

    python -m benchmarks.scale [--agents 10 100 1000 10000] [--all-up-to 100] [--json FILE]

A store in memory (the shipped engine), a clock that is an argument. ``SAMPLE`` agents are the shipped rounds: the
observers, who watch everybody and decide, and some who are not; the others are played by the records that they would
write. Up to ``--all-up-to`` agents everybody is real, so that both can be compared. Half of the agents more than
needed are standbys, at most eight.

- ``form``: requests an agent makes from its start until the group has formed. Watchers' wake-ups are made as at the
  edge: by every change of plans, for observers by every registration too, at most ten times a second (``JOIN_MS``: how
  long it takes until the last agent has registered, whatever their number).
- ``rest``: requests an agent makes in a second when nothing happens, and the records that it reads in one.
- ``decide``: milliseconds of CPU that a decision takes when nothing has happened, for a crash, for a lost node, and the
  same two where states are kept and all vaults have told. ``round``: a whole round of an observer and of another
  agent at rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lmres.cli.text import table
from lmres.gemini.inventory import Copy, Holdings, Part, topology_text
from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Entry, Put, Txn, TxnResult
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Observed, decide
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.ledger import OBSERVERS
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import Inputs, Outcome, Settings
from lmres.rendezvous.state import Door, Evidence, Gone, Lease, Member, Ready, RunConfig, View

SAMPLE = OBSERVERS + 4
STANDBYS = 8
JOIN_MS = 10_000
WAKE_MS = 100
INTERVAL_MS = 500
REST_MS = 4_000
REPEATS = 3


def name_of(number: int) -> str:
    return f"node-{number:05d}"


def member_of(number: int) -> Member:
    name = name_of(number)
    return Member(
        node_id=name,
        incarnation=f"{name}.1",
        address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        host=name,
        boot_id=f"boot-{name}",
        pid=1000,
        pid_start=0,
        failure_domain=f"rack-{number // 16}",
    )


def config_of(agents: int) -> RunConfig:
    return RunConfig(
        min_nodes=agents - min(STANDBYS, agents // 2),
        max_nodes=agents,
        local_world_size=1,
        role="default",
        heartbeat_interval_ms=INTERVAL_MS,
        heartbeat_timeout_ms=5_000,
        policy=None,
        written_by=name_of(0),
        version="benchmark",
    )


@dataclass(slots=True)
class Real:
    """One agent whose rounds are run."""

    number: int
    agent: Agent
    port: int = 20_000
    requests: int = 0
    records: int = 0
    woken: bool = True
    due_ms: int = 0
    watched_ms: int = 0
    outcome: Outcome | None = None

    def round(self, world: World) -> None:
        inputs = Inputs(now_ms=world.now_ms, waiting=not world.formed, master_port=self.port)
        steps = self.agent.round(inputs)
        try:
            txn = next(steps)
            while True:
                self.requests += 1
                answer = world.apply(txn)
                self.records += sum(len(entries) for entries in answer.reads)
                txn = steps.send(answer)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            self.outcome = outcome
            self.due_ms = world.now_ms + outcome.next_ms
            self.woken = False

    @property
    def observes(self) -> bool:
        ledger = self.agent.ledger
        return not ledger.registered or ledger.observer_index() is not None


@dataclass(slots=True)
class World:
    """A store, the agents that are run, and those that are played."""

    agents: int
    real: int
    keys: Keys = field(default_factory=lambda: Keys(run="scale"))
    engine: Engine = field(default_factory=lambda: Engine(max_bytes=1 << 40))
    now_ms: int = 0
    formed: bool = False
    _ctl: int = 0
    _reg: int = 0

    def apply(self, txn: Txn) -> TxnResult:
        result = self.engine.apply(txn)
        for op in txn.success if result.succeeded else txn.failure:
            if isinstance(op, Put):
                self._ctl = max(self._ctl, result.revision if op.key.startswith(self.keys.ctl) else 0)
                self._reg = max(self._reg, result.revision if op.key.startswith(self.keys.reg) else 0)
        return result

    def put(self, *pairs: tuple[str, object]) -> None:
        self.apply(Txn(success=tuple(Put(key=key, value=encode(record)) for key, record in pairs)))

    def run(self, reals: list[Real], until: Callable[[], bool], limit_ms: int) -> None:
        """Rounds of the real agents, woken as the edge wakes them, in steps of 10 ms."""
        while not until():
            self.now_ms += 10
            if self.now_ms > limit_ms:
                raise SystemExit(f"{self.agents} agents: nothing happens: {reals[0].outcome}")
            self.play()
            for real in reals:
                seen = real.agent.view.revision
                newest = max(self._ctl, self._reg if real.observes else 0)
                if newest > seen and self.now_ms >= real.watched_ms:
                    real.woken, real.watched_ms = True, self.now_ms + WAKE_MS
                    real.requests += 1  # the answered wait
                if real.woken or self.now_ms >= real.due_ms:
                    real.round(self)

    # -- those that are played -----------------------------------------------------------------------------------------

    _joined: int = 0
    _ready: int = 0

    def play(self) -> None:
        """Registrations spread over ``JOIN_MS``; when there is a plan, everybody is ready soon."""
        played = self.agents - self.real
        wanted = played if self.now_ms >= JOIN_MS else played * self.now_ms // JOIN_MS
        while self._joined < wanted and self.now_ms > 200:
            member = member_of(self.real + self._joined)
            name, incarnation = member.node_id, member.incarnation
            self.put(
                (self.keys.member(name), member),
                (self.keys.door, Door(node_id=name, incarnation=incarnation)),
                (self.keys.lease(name), Lease(incarnation=incarnation, counter=1)),
            )
            self._joined += 1
        if self.now_ms % INTERVAL_MS == 0:
            self.beat(1 + self.now_ms // INTERVAL_MS)
        plan = self.reader.view.head() if self.reader is not None else None
        if plan is not None and not self.formed and self._ready < played:
            for number in range(self.real, min(self.agents, self.real + self._ready + max(1, played // 100))):
                if number - self.real >= self._ready:
                    member = member_of(number)
                    if plan.slot_of(member.node_id, member.incarnation) is not None:
                        self.put((self.keys.ready(1, member.node_id), ready_of(member)))
                    self._ready += 1

    reader: Agent | None = None

    def beat(self, counter: int) -> None:
        """Everybody who is played moves its lease."""
        for number in range(self.real, self.real + self._joined):
            name = name_of(number)
            self.put((self.keys.lease(name), Lease(incarnation=f"{name}.1", counter=counter)))


def ready_of(member: Member) -> Ready:
    return Ready(
        generation=1,
        node_id=member.node_id,
        incarnation=member.incarnation,
        address=member.address,
        master_port=20_000,
        restarts_left=3,
    )


def made(number: int, config: RunConfig) -> Real:
    settings = Settings(
        keys=Keys(run="scale"),
        me=member_of(number),
        config=replace(config, written_by=name_of(number)),
        recovery=Recovery(),
        join_timeout_ms=600_000,
        form_timeout_ms=60_000,
    )
    agent = Agent(
        settings=settings, new_incarnation=lambda: f"{name_of(number)}.2", process_is_dead=lambda _member: False
    )
    return Real(number=number, agent=agent)


# -- what is measured -------------------------------------------------------------------------------------------------


def measure(agents: int, all_up_to: int) -> dict[str, Any]:
    real = agents if agents <= all_up_to else SAMPLE
    config = config_of(agents)
    world = World(agents=agents, real=real)
    reals = [made(number, config) for number in range(real)]
    world.reader = reals[0].agent

    def all_formed() -> bool:
        waiting = [r for r in reals if r.outcome is not None and r.outcome.slot is not None]
        return bool(waiting) and all(r.outcome is not None and r.outcome.formed is not None for r in waiting)

    began = time.process_time()
    world.run(reals, all_formed, 20 * JOIN_MS)
    world.formed = True
    observers = [r for r in reals if r.agent.ledger.observer_index() is not None]
    others = [r for r in reals if r.agent.ledger.observer_index() is None] or observers
    found: dict[str, Any] = {"agents": agents, "real": real, "took_s": time.process_time() - began}
    found["form observer"] = statistics.mean(r.requests for r in observers)
    found["form other"] = statistics.mean(r.requests for r in others)
    total = found["form observer"] * len(observers) + found["form other"] * (agents - len(observers))
    found["form per agent"] = total / agents
    found.update(_at_rest(world, reals, observers, others))
    found.update(decisions(reals[0].agent.view, config))
    return found


def _at_rest(world: World, reals: list[Real], observers: list[Real], others: list[Real]) -> dict[str, float]:
    """Heartbeats only. The records of an answer are those of all leases for an observer."""
    for r in reals:
        r.requests = r.records = 0
    took: dict[int, list[float]] = {}
    start_ms = world.now_ms
    while world.now_ms < start_ms + REST_MS:
        world.now_ms += INTERVAL_MS
        world.beat(2 + world.now_ms // INTERVAL_MS)
        for r in reals:
            began = time.process_time()
            r.round(world)
            took.setdefault(r.number, []).append(time.process_time() - began)
    span_s = REST_MS / 1000

    def mean(group: list[Real], what: Callable[[Real], float]) -> float:
        return statistics.mean(what(r) for r in group)

    return {
        "rest observer": mean(observers, lambda r: r.requests / span_s),
        "rest other": mean(others, lambda r: r.requests / span_s),
        "records observer": mean(observers, lambda r: r.records / span_s),
        "records other": mean(others, lambda r: r.records / span_s),
        "round observer ms": 1000 * mean(observers, lambda r: statistics.median(took[r.number])),
        "round other ms": 1000 * mean(others, lambda r: statistics.median(took[r.number])),
    }


def decisions(view: View, config: RunConfig) -> dict[str, float]:
    """Milliseconds of a decision on this view, by case."""
    head = view.head()
    assert head is not None
    victim = head.active[-1]
    crash = Evidence(
        generation=1,
        reporter=victim.node_id,
        incarnation=victim.incarnation,
        weight="primary",
        cause=Cause(
            failure_class="process_crash",
            node_id=victim.node_id,
            incarnation=victim.incarnation,
            host=victim.node_id,
            detail="killed by SIGKILL",
            rank=1,
            exit_status=-9,
        ),
        boot_id="boot",
        at_ms=1,
    )
    gone = Gone(
        node_id=victim.node_id, incarnation=victim.incarnation, how="lost", reason="no heartbeat for 5.0 s", by="a"
    )
    crashed: tuple[str, object] = (view.keys.evidence(1, victim.node_id, 0), crash)
    lost: tuple[str, object] = (view.keys.gone(victim.node_id), gone)
    told = _holdings(view, config, but=victim.node_id)
    kept = Checkpointing(enabled=True)
    return {
        "decide rest ms": _timed(view, [], Checkpointing()),
        "decide crash ms": _timed(view, [crashed], Checkpointing()),
        "decide node ms": _timed(view, [lost], Checkpointing()),
        "decide crash kept ms": _timed(view, [crashed, *told, *_holdings(view, config, only=victim.node_id)], kept),
        "decide node kept ms": _timed(view, [lost, *told], kept),
    }


def _holdings(view: View, config: RunConfig, *, but: str = "", only: str = "") -> list[tuple[str, object]]:
    """Every active node holds its own ranks' parts and those of the slot before it."""
    head = view.head()
    assert head is not None
    size, nodes = config.local_world_size, len(head.active)
    topology = topology_text(nodes=nodes, local_world_size=size)
    found: list[tuple[str, object]] = []
    slots = {n.node_id: n.slot for n in head.active}
    for m in view.live_members():
        if m.node_id == but or (only and m.node_id != only):
            continue
        slot = slots.get(m.node_id)
        held = [] if slot is None else [slot, (slot - 1) % nodes]
        copies = tuple(
            _copy(s * size + local, step, topology) for s in held for local in range(size) for step in (100, 101)
        )
        record = Holdings(
            node_id=m.node_id,
            incarnation=m.incarnation,
            generation=1,
            address=m.address if copies else "",
            port=20_001 if copies else 0,
            copies=copies,
        )
        found.append((view.keys.holdings(m.node_id), record))
    return found


def _copy(rank: int, step: int, topology: str) -> Copy:
    """Of data-parallel training: ``shared`` is the same everywhere."""
    shared, own = Part(digest=f"{step:032x}", length=1 << 30), Part(digest=f"{(rank << 32) + step:032x}", length=65_536)
    return Copy(
        rank=rank,
        step=step,
        origin=1,
        shared=shared,
        own=own,
        log=own,
        has=("shared", "own", "log"),
        place="memory",
        finite=True,
        trust="unverified",
        topology=topology,
    )


def _timed(view: View, records: list[tuple[str, object]], kept: Checkpointing) -> float:
    """On a copy of the view: the first decision after news, and the median of some. All with the records read."""
    copied = View(keys=view.keys)
    entries = [
        Entry(key=key, value=encode(stored.record), create_revision=stored.created, mod_revision=stored.revision)
        for key, stored in view.stored.items()
        if stored.record is not None
    ]
    copied.apply(entries, view.revision)
    news = [
        Entry(key=key, value=encode(record), create_revision=view.revision + 1 + i, mod_revision=view.revision + 1 + i)
        for i, (key, record) in enumerate(records)
    ]
    copied.apply(news, view.revision + len(news))
    took = []
    for _ in range(REPEATS):
        began = time.process_time()
        decision = decide(copied, Recovery(), Observed(), kept)
        took.append(time.process_time() - began)
    if bool(records) != isinstance(decision, Commit):
        raise SystemExit(f"not the decision that was meant: {str(decision)[:500]}")
    return 1000 * statistics.median(took)


GROUPS = (
    ("requests", ("real", "form observer", "form other", "form per agent", "rest observer", "rest other")),
    ("records and rounds", ("records observer", "records other", "round observer ms", "round other ms")),
    (
        "decisions, ms",
        ("decide rest ms", "decide crash ms", "decide node ms", "decide crash kept ms", "decide node kept ms"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--all-up-to", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for agents in options.agents:
        results.append(measure(agents, options.all_up_to))
        print(f"{agents} agents: {results[-1]['took_s']:.1f} s to simulate", file=sys.stderr, flush=True)
    for title, keys in GROUPS:
        rows = [["agents", *keys]]
        rows += [
            [str(r["agents"]), *(f"{r[k]:.1f}" if isinstance(r[k], float) else str(r[k]) for k in keys)]
            for r in results
        ]
        print(f"\n{title}")
        print("\n".join(table(rows, width=10_000)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
