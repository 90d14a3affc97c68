"""Connections between neighbours as facts: who has one to whom, what breaks it, and who notices.

Who calls whom is the shipped rule (``parting.neighbours``), and so is what a break says. Played are the sockets: the
kernel of a dead agent closes its connections and refuses new ones; a stopped agent's stay open; a cut between two hosts
breaks or refuses them for a while, though both agents live. In about half of the seeds agents keep none, as where no
port can be opened, so that those seeds mean what they always meant.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmres.rendezvous.parting import Answer, Break, neighbours, speaks_of_death
from lmres.rendezvous.rounds import Broken

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World


@dataclass(slots=True)
class Links:
    """``open``: pairs of incarnations, the caller first. ``cuts``: pairs of hosts, until when, and how calls fail."""

    world: World
    on: bool
    chance: random.Random
    open: set[tuple[str, str]] = field(default_factory=set)
    cuts: dict[frozenset[str], tuple[int, Answer]] = field(default_factory=dict)
    isolated: dict[str, int] = field(default_factory=dict)
    died_ms: dict[str, int] = field(default_factory=dict)
    _calling: set[tuple[str, str]] = field(default_factory=set)
    _number: int = 0

    @staticmethod
    def of(world: World) -> Links:
        chance = random.Random(f"connections of {world.seed}")
        return Links(world=world, on=chance.random() < 0.5 and world.scenario.theme != "large", chance=chance)

    # -- an agent keeps its connections -------------------------------------------------------------------------------

    def follow(self, process: Process) -> None:
        """After each round, as the edge."""
        view, me = process.agent.view, process.agent.me
        members = view.live_members()
        if process.linked_as != me.incarnation:
            self.open = {p for p in self.open if process.linked_as not in p}  # with goodbye
            process.linked_as = me.incarnation
            process.broken.clear()
        wanted = {m.incarnation for m in neighbours(members, me)}
        for pair in sorted(self.open):
            if me.incarnation == pair[0] and pair[1] not in wanted:
                self.open.discard(pair)  # with goodbye
        live = {m.incarnation for m in members}
        process.broken = {i: b for i, b in process.broken.items() if i in live}
        for incarnation in sorted(wanted):
            self._call(process, me.incarnation, incarnation)

    def _call(self, process: Process, caller: str, peer: str) -> None:
        pair = (caller, peer)
        if pair in self.open or pair in self._calling:
            return
        self._calling.add(pair)

        def answered() -> None:
            self._calling.discard(pair)
            other = self.world.oracle.process_of(peer)
            if other is None or any(not p.alive or p.paused or p.left for p in (process, other)):
                return
            if process.agent.me.incarnation == caller and self._ask(process, peer) is Answer.THERE:
                self.open.add(pair)
                self._back(process, peer)
                self._back(other, caller)

        self.world.after(self.chance.randint(2, 30), answered)

    def _back(self, process: Process, incarnation: str) -> None:
        if process.broken.pop(incarnation, None) is not None:
            self.world.log(f"{process.name} has a connection to {incarnation} again")
            process.wake(1)

    def _ask(self, process: Process, incarnation: str) -> Answer:
        """What the address of an incarnation says to this process now."""
        other = self.world.oracle.process_of(incarnation)
        if other is None or not other.alive or other.agent.me.incarnation != incarnation:
            return Answer.REFUSED
        until_ms, answer = self.cuts.get(frozenset((process.host.name, other.host.name)), (0, Answer.NONE))
        if self.world.now_ms < until_ms:
            return answer
        if self.world.now_ms < max(self.isolated.get(process.name, 0), self.isolated.get(other.name, 0)):
            return Answer.REFUSED
        return Answer.THERE

    # -- what breaks them ---------------------------------------------------------------------------------------------

    def died(self, process: Process, *, goodbye: bool) -> None:
        """The kernel closes what the process had."""
        if not self.on:
            return
        incarnation = process.linked_as
        if not goodbye:
            self.died_ms[incarnation] = self.world.now_ms
        for pair in [p for p in sorted(self.open) if incarnation in p]:
            self.open.discard(pair)
            witness = pair[1] if pair[0] == incarnation else pair[0]
            if not goodbye:
                self._notice(witness, incarnation, Break.CLOSED)

    def broke(self, pair: tuple[str, str], how: Break, *, sides: tuple[int, ...] = (0, 1)) -> None:
        """A connection between two living agents breaks; ``sides`` notice it."""
        if pair in self.open:
            self.open.discard(pair)
            for side in sides:
                self._notice(pair[side], pair[1 - side], how)

    def _notice(self, witness: str, incarnation: str, how: Break) -> None:
        process = self.world.oracle.process_of(witness)
        if process is None or not process.alive:
            return

        def noticed() -> None:
            if process.agent.me.incarnation != witness or {(witness, incarnation), (incarnation, witness)} & self.open:
                return
            if incarnation not in process.broken and speaks_of_death(how, self._ask(process, incarnation)):
                self._number += 1
                node_id = incarnation.split("#", 1)[0]
                process.broken[incarnation] = Broken(node_id=node_id, incarnation=incarnation, number=self._number)
                self.world.log(f"{process.name} has lost its connections to {incarnation}")
                process.wake(self.chance.randint(1, 5))

        process.later(self.chance.randint(1, 25), noticed)

    def cut(self, one: str, other: str, duration_ms: int, answer: Answer, how: Break) -> None:
        """Between two hosts nothing goes through; the store is still in reach of both."""
        self.cuts[frozenset((one, other))] = (self.world.now_ms + duration_ms, answer)
        for pair in sorted(self.open):
            if {self._host(pair[0]), self._host(pair[1])} == {one, other}:
                self.broke(pair, how)

    def isolate(self, process: Process, duration_ms: int) -> None:
        """An agent that lives loses all of its connections, and can not get any."""
        self.isolated[process.name] = self.world.now_ms + duration_ms
        for pair in sorted(self.open):
            if process.linked_as in pair:
                self.broke(pair, Break.CLOSED)

    def _host(self, incarnation: str) -> str:
        process = self.world.oracle.process_of(incarnation)
        return process.host.name if process is not None else ""

    # -- what the oracle asks -----------------------------------------------------------------------------------------

    def calm(self) -> None:
        self.cuts.clear()
        self.isolated.clear()
