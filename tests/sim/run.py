"""One seed from beginning to end: the safety phase, in which anything may fail, then the liveness phase, in which
nothing does and a healthy rest must come to an end."""

from __future__ import annotations

import random
from unittest import mock

from tests.sim import faults
from tests.sim.scenario import Scenario, large_scenario_of
from tests.sim.world import World

REST_MS = 25_000
KEPT_GENERATIONS = 2
"""Fewer than the shipped agents keep, so that old records are dropped here too."""


def run_seed(seed: int, *, scenario: Scenario | None = None, trace: bool = False) -> World:
    """Raises Violation. The world that is returned has come to its end."""
    with mock.patch("lmres.rendezvous.agent.KEPT_GENERATIONS", KEPT_GENERATIONS):
        return _run(seed, scenario, trace)


def _run(seed: int, scenario: Scenario | None, trace: bool) -> World:
    world = World(seed, scenario=scenario, trace=trace)
    s = world.scenario
    for number in range(s.agents):
        delay_ms = world.rng.choice((0, world.rng.randint(0, 5_000)))
        world.after(delay_ms, lambda n=number: world.launch(f"n{n}"))  # type: ignore[misc]
    faults.schedule(world)
    world.run(s.safety_ms, lambda: False)
    settle(world)
    world.run(world.now_ms + s.patience_ms, lambda: not world.living())
    world.oracle.at_end()
    world.log(f"end: {sorted((p.name, p.exit_code) for p in world.processes)} at step {world.program.step}")
    return world


def run_large(seed: int, *, trace: bool = False) -> World:
    """A run with more members than all of whom are observers; those are killed at once."""
    return run_seed(seed, scenario=large_scenario_of(random.Random(seed)), trace=trace)


def settle(world: World) -> None:
    """Faults stop. What was stopped goes on; where too few are left that may be used, the scheduler brings more."""
    world.log("-- faults stop --")
    world.calm = True
    world.thaw()
    world.links.calm()
    world.looks.calm()
    for process in world.living():
        process.resume()
    world.after(REST_MS, world.oracle.at_rest)
    if not world.oracle.finished:
        for number in range(world.scenario.min_nodes):
            world.after(2_000 * number, lambda n=number: bring(world, n))  # type: ignore[misc]


def bring(world: World, number: int) -> None:
    """One more node if the run can not go on with those that it has."""
    if not world.living() or world.oracle.finished:
        return
    head = world.oracle.head()
    aside = {q.node_id for q in head.quarantined} if head is not None else set()
    active = {n.node_id for n in head.active} if head is not None else set()
    unfit = {p.node_id for p in world.living() if world.doubts.is_unfit(p)} - active  # who has a slot keeps it
    usable = [p for p in world.living() if p.node_id not in aside | unfit and p.leave is None]
    if len({p.node_id for p in usable}) < world.scenario.min_nodes:
        world.launch(f"spare{number}")
