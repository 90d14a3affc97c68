"""Workers that stand still, and what their agents see of them: alarms, answers to them, withdrawals.

What an alarm leads to is the shipped protocol, and who is at fault says the shipped ``localize``. Played are the
workers and their progress pages. A group uses one process group in which each step makes two collectives; a rank that
stands still has not entered the next one, or has not come out of the last one, or is inside like all others; who waits
for it is inside. The page of a worker that has ended can sometimes still be read.

In about half of the seeds nobody watches, so that those seeds mean what they always meant.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmres.scout.sighting import GroupSight, OpMark, Phase, Sighting, WorkerSight

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.program import Group
    from tests.sim.world import World

OPS_A_STEP = 2
RECENT = 8
START_FACTOR = 4
SAVING_FACTOR = 3
FOR_EVER_MS = 10_000_000
_OP, _SHAPES = "c10d::allreduce_", ("float32[1000]", "float32[17]")
_OUTSIDE: tuple[Phase, ...] = ("user", "forward", "backward", "optimizer", "loader", "checkpoint_io")

Place = Literal["before", "inside", "all inside", "busy"]
"""``before``: the next collective is not entered; ``busy``: nor that, but something moves. ``inside``: the others have
come out of the one that it is in; ``all inside``: nobody has."""


@dataclass(slots=True)
class Stop:
    """A worker is at fault: the truth, which no agent knows. ``until_ms``: when it went on."""

    group: Group
    slot: int
    node_id: str
    place: Place
    phase: Phase
    state: str
    since_ms: int
    until_ms: int = FOR_EVER_MS


@dataclass(frozen=True, slots=True)
class Desync:
    """From operation ``number`` on this slot does something else than the others."""

    slot: int
    number: int
    how: Literal["op", "shape", "left out", "one too many", "step"]


@dataclass(slots=True)
class Looks:
    """``deaf``: until when a process does not see or answer. ``frontier``: operations that a group which stands still
    has left behind. ``since_ms``: by incarnation and number of a sighting with an alarm, when that was first raised."""

    world: World
    on: bool
    chance: random.Random
    timeout_ms: int
    stops: list[Stop] = field(default_factory=list)
    desyncs: dict[Group, Desync] = field(default_factory=dict)
    deaf: dict[str, int] = field(default_factory=dict)
    frontier: dict[Group, int] = field(default_factory=dict)
    since_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    withdrawn: int = 0
    _answering: set[tuple[str, Group]] = field(default_factory=set)
    _alarmed_ms: dict[str, int] = field(default_factory=dict)
    _slow: dict[Group, tuple[Process, Workers]] = field(default_factory=dict)

    @staticmethod
    def of(world: World) -> Looks:
        chance = random.Random(f"looks of {world.seed}")
        on = chance.random() < 0.5 and world.scenario.theme != "large"
        return Looks(world=world, on=on, chance=chance, timeout_ms=chance.choice((1_500, 2_500, 4_000)))

    # -- an agent watches ---------------------------------------------------------------------------------------------

    def watch(self, process: Process, workers: Workers) -> None:
        """From the start of its workers to their end."""
        workers.moved_ms = self.world.now_ms

        def turn() -> None:
            if process.workers is workers and (workers.alive or self._stands(process, workers)):
                self._judge(process, workers)
                process.later(self.chance.choice((60, 120, 250)), turn)

        process.later(self.chance.randint(50, 300), turn)

    def _judge(self, process: Process, workers: Workers) -> None:
        if self._is_deaf(process) and not self.world.calm:
            return
        over, stands = self._is_over(workers), self._stands(process, workers)
        again = self.world.now_ms - self._alarmed_ms.get(process.name, 0) >= self.timeout_ms
        if over and (not stands or again):
            self._tell(process, workers, alarm=True)
        elif stands and not over:
            self.withdrawn += workers.state == "running"
            self._tell(process, workers, alarm=False)

    def _stands(self, process: Process, workers: Workers) -> bool:
        seen = process.sighting
        return seen is not None and seen.generation == workers.generation and seen.alarm

    def _is_over(self, workers: Workers) -> bool:
        """Whether it has been quiet for too long. What has ended is no hang, nor is the way out of the last step."""
        if workers.state not in ("starting", "running", "stuck", "hung"):
            return False
        ending = self.world.program.step >= self.world.scenario.total_steps
        return not ending and self._quiet_ms(workers) >= self._limit_ms(workers)

    def _quiet_ms(self, workers: Workers) -> int:
        stop = self.stop_of(workers)
        if stop is not None and stop.place == "busy":
            return self.chance.randint(5, self.timeout_ms // 2)
        return self.world.now_ms - workers.moved_ms

    def _limit_ms(self, workers: Workers) -> int:
        stop = self.stop_of(workers)
        if not self.world.program.has_trained(workers.group):
            return START_FACTOR * self.timeout_ms
        saves = stop is not None and stop.phase == "checkpoint_io"
        return SAVING_FACTOR * self.timeout_ms if saves else self.timeout_ms

    def follow(self, process: Process) -> None:
        """After each round: it answers if it is asked, in its own time."""
        asked = process.outcome.look if process.outcome is not None else None
        if asked is None or self._is_deaf(process):
            return
        turn = (process.name, (process.round_epoch, asked))
        if turn in self._answering:
            return
        self._answering.add(turn)

        def answer() -> None:
            self._answering.discard(turn)
            workers = process.workers if process.workers_generation == asked else None
            if process.outcome is not None and process.outcome.look == asked and not self._is_deaf(process):
                alarm = workers is not None and self._is_over(workers)
                self._tell(process, workers, alarm=alarm, generation=asked)

        process.later(self.chance.choice((5, 20, 20, 100, 400, 1_200)), answer)

    def _is_deaf(self, process: Process) -> bool:
        return self.world.now_ms < self.deaf.get(process.name, 0)

    def _tell(self, process: Process, workers: Workers | None, *, alarm: bool, generation: int = 0) -> None:
        sight = self._sight(process, workers) if workers is not None else None
        before, me = process.sighting, process.agent.me.incarnation
        process.sights += 1
        if alarm:
            same = before is not None and before.alarm and before.incarnation == me
            first_ms = self.since_ms[me, process.sights - 1] if same else self.world.now_ms
            self.since_ms[me, process.sights] = first_ms
            self._alarmed_ms[process.name] = self.world.now_ms
        process.sighting = Sighting(
            generation=workers.generation if workers is not None else generation,
            node_id=process.node_id,
            incarnation=me,
            number=process.sights,
            alarm=alarm,
            timeout_ms=self.timeout_ms,
            workers=(sight,) if sight is not None else (),
        )
        self.world.log(f"{process.name} {'ALARM' if alarm else 'looked'}: {_shown(sight)}")
        process.wake(1)
        slow = self._slow.pop(workers.group, None) if alarm and workers is not None else None
        if slow is not None:
            self.world.after(self.chance.randint(10, 600), lambda: self.release(*slow))

    # -- the pages ----------------------------------------------------------------------------------------------------

    def _sight(self, process: Process, workers: Workers) -> WorkerSight | None:
        program, name = self.world.program, workers.group
        ended = workers.state in ("dead", "gone", "done", "stopping")
        if workers.state == "done" or (ended and self.chance.random() < 0.5):
            return None
        stop = self.stop_of(workers)
        entered, left, phase = self._counts(workers, stop)
        state = "Z" if ended else stop.state if stop is not None else self.chance.choice("SSR")
        group = GroupSight(
            name="default_pg",
            ranks=tuple(range(len(self.world.oracle.plans[name].active))),
            entered=entered,
            left=left,
            recent=tuple(self._mark(workers, n) for n in range(max(1, entered - RECENT + 1), entered + 1)),
        )
        return WorkerSight(
            rank=workers.slot,
            local_rank=0,
            pid=process.pid + 1,
            step=program.step,
            phase=phase,
            phase_ms=self._quiet_ms(workers),
            quiet_ms=self._quiet_ms(workers),
            state=state,
            groups=(group,) if program.has_trained(name) else (),
            timeout_ms=self._limit_ms(workers),
        )

    def _counts(self, workers: Workers, stop: Stop | None) -> tuple[int, int, Phase]:
        """Operations entered and left, and the phase."""
        program, name = self.world.program, workers.group
        if not program.has_trained(name):
            return 0, 0, "start"
        behind = OPS_A_STEP * program.steps_in(name)
        if program.moves(name):
            inside = self.chance.random() < 0.5
            return behind + inside, behind, "collective" if inside else "forward"
        behind = self.stand(name) - 1
        first = next((s for s in self.stops if s.group == name and s.until_ms == FOR_EVER_MS), None)
        ahead = 1 if first is not None and first.place == "inside" else 0  # the others have come out of one more
        if stop is first and stop is not None:
            outside = stop.place in ("before", "busy")
            return behind + (not outside), behind, stop.phase if outside else "collective"
        if first is None and workers.state in ("dead", "gone"):
            return behind, behind, "forward"
        return behind + ahead + 1, behind + ahead, "collective"

    def _mark(self, workers: Workers, number: int) -> OpMark:
        """What this rank's page says of one operation."""
        desync = self.desyncs.get(workers.group)
        odd = desync if desync is not None and desync.slot == workers.slot and number >= desync.number else None
        usual, steps, op, shape = number, 0, _OP, ""
        if odd is not None:
            usual += {"left out": 1, "one too many": -1}.get(odd.how, 0)
            steps = int(odd.how == "step")
            if number == odd.number:
                op = "c10d::broadcast_" if odd.how in ("op", "one too many") else op
                shape = "float32[9]" if odd.how == "shape" else ""
        step = self.world.program.begun_at(workers.group) + (usual - 1) // OPS_A_STEP + steps
        return OpMark(number=number, op=op, shape=shape or _SHAPES[usual % OPS_A_STEP], step=step)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def stop(self, process: Process, workers: Workers, *, place: Place | None = None, long: bool = True) -> None:
        """A running worker stands still, and with it the program. Not ``long``: it goes on when the alarm is raised."""
        chance = self.chance
        places: tuple[Place, ...] = ("before", "before", "before", "inside", "all inside", "busy")
        chosen: Place = place or chance.choice(places if long else ("before", "inside"))
        stop = Stop(
            group=workers.group,
            slot=workers.slot,
            node_id=process.node_id,
            place=chosen,
            phase=chance.choice(_OUTSIDE),
            state=chance.choice("RSSDT"),
            since_ms=self.world.now_ms,
        )
        self.stops.append(stop)
        workers.state = "stuck"
        if not long:
            self._slow[workers.group] = (process, workers)
            self.world.after(6 * self.timeout_ms, lambda: self.release(process, workers))

    def stand(self, group: Group) -> int:
        """Which operation all are in, in a group that has just been stopped in it."""
        behind = OPS_A_STEP * self.world.program.steps_in(group)
        return self.frontier.setdefault(group, behind + self.chance.randint(0, OPS_A_STEP - 1)) + 1

    def release(self, process: Process, workers: Workers) -> None:
        stop = self.stop_of(workers)
        self._slow.pop(workers.group, None)
        if stop is None or workers.state != "stuck":
            return
        self.world.log(f"{process.name} its worker goes on")
        stop.until_ms = self.world.now_ms
        workers.state = "running"
        self.frontier.pop(workers.group, None)
        self.world.program.goes_on(process, workers)

    def stop_of(self, workers: Workers) -> Stop | None:
        """Why this worker stands still now."""
        for stop in self.stops:
            if (stop.group, stop.slot) == (workers.group, workers.slot) and stop.until_ms == FOR_EVER_MS:
                return stop
        return None

    def at_fault(self, group: Group, node_id: str, since_ms: int) -> bool:
        """Whether a worker of this node was at fault at any time since then."""
        return any(s.group == group and s.node_id == node_id and s.until_ms >= since_ms for s in self.stops)

    def calm(self) -> None:
        """Who is deaf for ever never answers, but raises alarms: else nobody may be left who does."""
        self.deaf = {name: until_ms for name, until_ms in self.deaf.items() if until_ms >= FOR_EVER_MS}


def _shown(sight: WorkerSight | None) -> str:
    if sight is None:
        return "nothing to see"
    counts = f"{sight.groups[0].entered}/{sight.groups[0].left}" if sight.groups else "no group"
    return f"rank {sight.rank} {sight.phase} {sight.state} {counts} quiet {sight.quiet_ms}"
