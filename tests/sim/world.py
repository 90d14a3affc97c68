"""A run in one process: hosts with clocks of their own, a store, a network that loses and delays, and one scheduler.

Rules:

1. The only source of chance is ``World.rng``, made from the seed; what happens at the same moment is ordered by it.
2. The agents are the shipped ones. Each of their store requests is an event of its own: sent, applied, answered. An
   agent may be stopped, killed or cut off between any two of them.
3. What happened is written to a log; its digest depends on the seed alone.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lmres.ids import Keys
from lmres.ports import DeletePrefix, Put, Txn, TxnResult
from lmres.rendezvous.edge.stores.engine import Engine
from tests.sim.doubts import Doubts
from tests.sim.links import Links
from tests.sim.looks import Looks
from tests.sim.oracle import Oracle
from tests.sim.process import Process
from tests.sim.program import Program
from tests.sim.scenario import Scenario, scenario_of
from tests.sim.standing import Standing
from tests.sim.states import States


@dataclass(slots=True)
class Host:
    """A machine: its boot, its clock and the processes that run on it."""

    name: str
    boot_id: str
    origin_ms: int
    rate: float
    pids: set[int] = field(default_factory=set)

    def clock_ms(self, now_ms: int) -> int:
        return self.origin_ms + int(now_ms * self.rate)


class World:
    """Everything of one seed. ``now_ms`` is the simulation's own time, which no agent ever sees."""

    def __init__(self, seed: int, *, scenario: Scenario | None = None, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        drawn = scenario_of(self.rng)
        self.scenario = scenario or drawn
        self.keys = Keys(run=f"sim-{seed}")
        self.engine = Engine()
        self.states = States.of(self)
        self.links = Links.of(self)
        self.looks = Looks.of(self)
        self.doubts = Doubts.of(self)
        self.standing = Standing.of(self)
        self.oracle = Oracle(self)
        self.program = Program(self)
        self.now_ms = 0
        self.calm = False
        self.at_success: Callable[[], None] | None = None
        self.hosts: dict[str, Host] = {}
        self.processes: list[Process] = []
        self.frozen_until_ms = 0
        self.slow_until_ms = 0
        self.freezes: list[tuple[int, int]] = []
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._events = 0
        self._pids = 1000
        self._trace = trace
        self._digest = hashlib.sha256()

    # -- time ---------------------------------------------------------------------------------------------------------

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (self.now_ms + max(0, delay_ms), self.rng.random(), self._events, action))

    def run(self, until_ms: int, done: Callable[[], bool]) -> bool:
        """Until ``done``, or that moment, or nothing is left to happen. True if done."""
        while not done():
            if not self._heap or self._heap[0][0] > until_ms:
                self.now_ms = max(self.now_ms, until_ms)
                return False
            at_ms, _, _, action = heapq.heappop(self._heap)
            self.now_ms = max(self.now_ms, at_ms)
            action()
        return True

    def log(self, line: str) -> None:
        text = f"{self.now_ms / 1000:9.3f} {line}"
        self._digest.update(text.encode() + b"\n")
        if self._trace:
            print(text, flush=True)

    def digest(self) -> str:
        return self._digest.hexdigest()

    # -- hosts and processes ------------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = Host(
                name=name,
                boot_id=f"boot-{name}",
                origin_ms=self.rng.randint(0, 10_000_000),
                rate=1 + self.rng.uniform(-0.03, 0.03),
            )
        return self.hosts[name]

    def launch(self, node_id: str, host_name: str | None = None) -> Process:
        """Starts an agent. The same node id again is a new process, as a scheduler would start it."""
        self._pids += 1
        number = sum(p.node_id == node_id for p in self.processes)
        process = Process(self, node_id=node_id, number=number, host=self.host(host_name or node_id), pid=self._pids)
        self.processes.append(process)
        process.boot()
        return process

    def living(self) -> list[Process]:
        return [p for p in self.processes if p.alive]

    # -- the store and the way to it ----------------------------------------------------------------------------------

    def freeze(self, duration_ms: int) -> None:
        if self.now_ms < self.frozen_until_ms:
            return
        self.frozen_until_ms = self.now_ms + duration_ms
        self.freezes.append((self.now_ms, self.frozen_until_ms))
        self.log(f"FAULT the store does not answer for {duration_ms} ms")

    def thaw(self) -> None:
        if self.now_ms < self.frozen_until_ms:
            self.frozen_until_ms = self.now_ms
            self.freezes[-1] = (self.freezes[-1][0], self.now_ms)

    def request(self, txn: Txn, who: Process, answer: Callable[[TxnResult], None]) -> None:
        """Carries a request to the store and, chance permitting, the answer back."""
        s, rng = self.scenario, self.rng
        chance = 1.0 if self.calm else rng.random()
        there_ms, back_ms = rng.randint(1, 6), rng.randint(1, 6)
        slow = 0.5 if self.now_ms < self.slow_until_ms else s.slow_requests
        if not self.calm and rng.random() < slow:
            there_ms += rng.randint(50, 900)
        if chance < s.lost_requests:
            self.log(f"{who.name} request lost")
            return
        lost = chance < s.lost_requests + s.lost_answers
        if not lost and chance < s.lost_requests + s.lost_answers + s.late_requests:
            there_ms += rng.randint(s.client_timeout_ms, 4 * s.client_timeout_ms)

        def arrive() -> None:
            if self.now_ms < self.frozen_until_ms:
                self.after(self.frozen_until_ms - self.now_ms + rng.randint(0, 20), arrive)
                return
            result = self.apply(txn, who)
            if lost:
                self.log(f"{who.name} answer lost")
            else:
                self.after(back_ms, lambda: answer(result))

        self.after(there_ms, arrive)

    def apply(self, txn: Txn, who: Process | None) -> TxnResult:
        """One transaction at the store, shown to the oracle, and a hint to those who wait there."""
        expected = {c.key: c.mod_revision for c in txn.compares}
        before = self.oracle.before(txn)
        result = self.engine.apply(txn)
        branch = txn.success if result.succeeded else txn.failure
        wake = False
        for op in branch:
            if isinstance(op, Put):
                self.oracle.wrote(op.key, before.get(op.key), op.value, who, expected)
                wake = wake or not op.key.startswith(self.keys.leases)
            elif isinstance(op, DeletePrefix):
                if op.prefix == self.keys.base:
                    self.oracle.wiped(who)
                else:
                    self.oracle.pruned(op.prefix)
                wake = True
        if wake:
            for process in self.living():
                if self.calm or self.rng.random() >= self.scenario.missed_wakes:
                    process.wake(self.rng.randint(1, 25))
        return result
