"""The training program: a group makes steps only while all of it runs, and what breaks in one place shows in others."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tests.sim.process import Process, Workers
    from tests.sim.world import World

STEP_MS = 250
Group: TypeAlias = tuple[int, int]
"""The epoch of the records and the generation."""
_BROKEN = (
    ("torch.distributed.DistBackendError", "[1] Connection closed by peer [10.0.0.{n}]:{port}"),
    ("RuntimeError", "Broken pipe while writing to 10.0.0.{n}:{port}"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
)


class Program:
    """``step`` is where the whole run is; a new generation goes on from it, or from the state that its plan names."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.step = 0
        self._groups: dict[Group, dict[int, tuple[Process, Workers]]] = {}
        self._begun: dict[Group, int] = {}
        self._standing: set[Group] = set()

    def joined(self, process: Process, workers: Workers) -> None:
        group = self._groups.setdefault(workers.group, {})
        group[workers.slot] = (process, workers)
        world = self.world

        def started() -> None:
            if workers.state == "starting":
                workers.state = "running"
                self._try_step(workers.group)

        process.later(world.rng.randint(100, 800), started)

    def members(self) -> list[tuple[Process, Workers]]:
        """All workers that run now."""
        found = [pair for _, group in sorted(self._groups.items()) for _, pair in sorted(group.items())]
        return [(p, w) for p, w in found if p.alive and w.state == "running"]

    def _whole(self, name: Group) -> dict[int, tuple[Process, Workers]] | None:
        group, plan = self._groups.get(name, {}), self.world.oracle.plans.get(name)
        if plan is None or len(group) < len(plan.active):
            return None
        return group if all(w.state == "running" for _, w in group.values()) else None

    def _try_step(self, name: Group) -> None:
        if self._whole(name) is None or name in self._begun:
            return
        plan = self.world.oracle.plans[name]
        if self.world.states.on:
            self.step = plan.recovery_step
        self._begun[name] = self.step
        self._moved(name)
        self.world.oracle.trains(plan, self._groups[name])
        self.world.log(f"generation {name[1]} trains from step {self.step}")
        self.world.after(STEP_MS, lambda: self._tick(name))

    def _tick(self, name: Group) -> None:
        group = self._whole(name)
        if group is None or any(w.stands_at is not None for _, w in group.values()):
            self._standing.add(name)
            return
        world, rng = self.world, self.world.rng
        self.step += 1
        self._moved(name)
        if self.step == world.scenario.poison_step:
            self.step -= 1
            process, workers = group[0]
            process.worker_failed(workers, exception=("ValueError", "this sample can not be read"))
            return
        for _, (_, workers) in sorted(group.items()):
            if workers.vault is not None and world.states.chance.random() > 0.05:
                workers.vault.capture(self.step)
        if self.step >= world.scenario.total_steps:
            for _, (process, workers) in sorted(group.items()):
                self._finish(process, workers, rng.randint(0, 2500))
            return
        world.standing.boundary(self.group(name))
        world.after(STEP_MS, lambda: self._tick(name))

    def _finish(self, process: Process, workers: Workers, delay_ms: int) -> None:
        process.later(delay_ms, lambda: process.workers_succeeded(workers))

    def _moved(self, name: Group) -> None:
        for workers in (w for _, w in self._groups[name].values()):
            workers.moved_ms = self.world.now_ms

    # -- workers that stand still -------------------------------------------------------------------------------------

    def has_trained(self, name: Group) -> bool:
        return name in self._begun

    def begun_at(self, name: Group) -> int:
        return self._begun.get(name, 0)

    def steps_in(self, name: Group) -> int:
        """Of the newest group: no older one is asked for."""
        return max(0, self.step - self.begun_at(name))

    def moves(self, name: Group) -> bool:
        return self._whole(name) is not None and not any(w.stands_at is not None for _, w in self.group(name))

    def group(self, name: Group) -> list[tuple[Process, Workers]]:
        return [pair for _, pair in sorted(self._groups.get(name, {}).items())]

    def steps_again(self, process: Process, workers: Workers) -> None:
        """It stood still at a boundary, and goes on: the group with it, if it was the last one that stood."""
        if workers.state == "running" and process.alive:
            self.goes_on(process, workers)

    def goes_on(self, process: Process, workers: Workers) -> None:
        """A worker that stood still runs again: the group with it, or it finds out that others have gone."""
        name = workers.group
        workers.moved_ms = self.world.now_ms
        if name not in self._begun:
            self._try_step(name)
        elif self.moves(name):
            self._moved(name)
            if name in self._standing:
                self._standing.discard(name)
                self.world.after(STEP_MS, lambda: self._tick(name))
        elif any(w.state not in ("running", "stuck", "hung") for _, w in self._groups[name].values()):
            self._break(process, workers, self.world.rng.randint(5, 900))

    def changed(self, name: Group) -> None:
        """A worker of this generation is no longer there: the others find a broken connection, or just hang."""
        for _, (process, workers) in sorted(self._groups.get(name, {}).items()):
            if workers.state != "running" or not process.alive:
                continue
            rng = self.world.rng
            if rng.random() < 0.3 and name in self._begun:
                workers.state = "hung"
                continue
            self._break(process, workers, rng.randint(5, 900))

    def _break(self, process: Process, workers: Workers, delay_ms: int) -> None:
        rng = self.world.rng
        kind, text = rng.choice(_BROKEN)
        message = text.format(n=rng.randint(1, 9), port=rng.randint(30_000, 60_000))

        def broken() -> None:
            if workers.state == "running" and self.step < self.world.scenario.total_steps:
                process.worker_failed(workers, exception=(kind, message))

        process.later(delay_ms, broken)
