"""Workers that are asked to stand still at a boundary before a plan that nothing forces.

What is asked, and when all stand, is the shipped protocol; played are the agent's word on the page, the worker that
looks at it once a step, saves and says so, or does not, late, or can not. Steps are made by a group together, so one
that stands holds up the others within their next step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from lmres.rendezvous.pausing import NEXT_BOUNDARY
from lmres.rendezvous.state import Paused

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.program import Group
    from tests.sim.world import World

STAND_MS = 10_000
RETRY_MS = 40

Kind = Literal["good", "late", "can not", "does not"]
KINDS: tuple[Kind, ...] = ("good", "late", "can not", "does not")


@dataclass(slots=True)
class Standing:
    """``asked_ms``: when an agent was first asked, since it was last let go, in a generation."""

    world: World
    chance: random.Random
    asked_ms: dict[Group, int] = field(default_factory=dict)
    kinds: dict[tuple[Group, int], Kind] = field(default_factory=dict)

    @staticmethod
    def of(world: World) -> Standing:
        return Standing(world=world, chance=random.Random(f"standing of {world.seed}"))

    def kind(self, workers: Workers) -> Kind:
        key = (workers.group, workers.slot)
        if key not in self.kinds:
            self.kinds[key] = self.chance.choices(KINDS, weights=(6, 1, 1, 1))[0]
        return self.kinds[key]

    # -- the agent ----------------------------------------------------------------------------------------------------

    def follow(self, process: Process) -> None:
        """After each round: the word is written, then it is read how far the workers have come."""
        outcome, workers = process.outcome, process.workers
        plan = outcome.plan if outcome is not None else None
        if outcome is None or plan is None or workers is None or plan.generation != workers.generation:
            return
        if outcome.pause is None and process.paused_word is not None:
            self.asked_ms.pop(workers.group, None)
        elif outcome.pause is not None:
            self.asked_ms.setdefault(workers.group, self.world.now_ms)
        if outcome.pause == process.paused_word:
            return
        process.paused_word, workers.word = outcome.pause, outcome.pause or 0
        program = self.world.program
        if outcome.pause is None:
            process.stands, workers.stood = None, None
        elif process.stands is None:
            done = self._done(workers)
            process.stands = Paused(
                generation=workers.generation,
                node_id=process.node_id,
                incarnation=process.agent.me.incarnation,
                reach=max(done, 1) + 1,
            )
        self.world.log(f"{process.name} asks its worker to stand still at {outcome.pause}: {_shown(process.stands)}")
        self._judge(process, workers)
        if workers.stands_at is not None:
            self._look(process, workers)
        elif program.has_trained(workers.group) and workers.state != "running":
            self.tell(process, workers, problem="it has ended")

    def _done(self, workers: Workers) -> int:
        program, plan = self.world.program, self.world.oracle.plans[workers.group]
        return program.step if program.has_trained(workers.group) else plan.recovery_step

    def tell(self, process: Process, workers: Workers, *, problem: str = "", not_before: int = 0) -> None:
        if process.stands is None or process.workers is not workers:
            return
        if problem:
            process.stands = replace(process.stands, problem=problem)
        elif not_before:
            process.stands = replace(process.stands, reach=max(process.stands.reach, not_before))
        else:
            workers.stood = workers.stands_at
        self._judge(process, workers)

    def _judge(self, process: Process, workers: Workers) -> None:
        if process.stands is None:
            return
        before = process.stands
        step = process.paused_word if workers.stood == process.paused_word else None
        process.stands = replace(before, step=step)
        self.world.log(f"{process.name} its worker stands: {_shown(process.stands)}")
        process.wake(1)

    # -- the worker ---------------------------------------------------------------------------------------------------

    def boundary(self, group: list[tuple[Process, Workers]]) -> None:
        """A step is done: whoever is asked to stands still."""
        step = self.world.program.step
        for process, workers in group:
            asked = workers.word not in (0, workers.ignored) and workers.word <= max(step, NEXT_BOUNDARY)
            if not asked or self.kind(workers) == "does not":
                continue
            workers.stands_at = step
            self._look(process, workers)
            until = self.world.now_ms + STAND_MS
            self.world.after(STAND_MS, lambda p=process, w=workers, u=until: self._over(p, w, u))  # type: ignore[misc]

    def _over(self, process: Process, workers: Workers, until_ms: int) -> None:
        if workers.stands_at is not None and self.world.now_ms >= until_ms:
            self.world.log(f"{process.name} its worker has stood for long enough")
            self._go_on(process, workers, ignored=True)

    def _look(self, process: Process, workers: Workers) -> None:
        """What the word means to a worker that stands."""
        step = workers.stands_at
        assert step is not None
        if workers.word == 0 or workers.word > step:
            self._go_on(process, workers)
        elif NEXT_BOUNDARY < workers.word < step:
            self.tell(process, workers, not_before=step + 1)
            self._go_on(process, workers, ignored=True)
        elif workers.word == step:
            if self.kind(workers) == "can not":
                self.tell(process, workers, problem="its state is not protected")
                return
            delay_ms = self.chance.choice((2, 10, 30))
            if self.kind(workers) == "late":
                delay_ms = self.chance.choice((1_000, 6_000))
            self.world.after(delay_ms, lambda: self._save(process, workers, step))

    def _save(self, process: Process, workers: Workers, step: int) -> None:
        vault = workers.vault
        if workers.stands_at != step or workers.word != step or workers.stood == step or vault is None:
            return
        if not vault.alive or workers.state != "running":
            self.tell(process, workers, problem="there is no vault")
        elif vault.save(step):
            self.tell(process, workers)
        elif vault.verdict.gate > step:
            self.tell(process, workers, not_before=vault.verdict.gate)
        else:
            self.world.after(RETRY_MS, lambda: self._save(process, workers, step))

    def _go_on(self, process: Process, workers: Workers, *, ignored: bool = False) -> None:
        workers.ignored = workers.word if ignored else workers.ignored
        workers.stands_at = None
        self.world.program.steps_again(process, workers)


def _shown(paused: Paused | None) -> str:
    if paused is None:
        return "it goes on"
    return f"reach {paused.reach} stands at {paused.step}{f', {paused.problem}' if paused.problem else ''}"
