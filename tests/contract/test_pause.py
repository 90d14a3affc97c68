"""Workers that are asked to stand still, by real pages and channels: the crew asks, and learns where they stand."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmres.adapters.bootstrap import page
from lmres.rendezvous.edge.workers import progress
from lmres.rendezvous.state import Paused
from tests.contract.test_crew import Harness, eventually

ROOT = str(Path(__file__).parents[2])
PROGRAM = """
import os, sys, time
sys.path[:0] = [{root!r}]
from lmres.adapters.bootstrap import session as sessions
from lmres.adapters.bootstrap.page import COUNTERS, COUNTERS_AT
from lmres.adapters.bootstrap.protect import Reporter
from lmres.adapters.resume import standing as standings
from lmres.adapters.resume.standing import CanNotSave, Standing
sessions.attach(os.environ["LMRES_WORKER_FDS"])
session = sessions.current()
reporter = Reporter(session)
standings.STAND_S = {stand_s}
standing = Standing(reporter)
def save():
    if step < {not_before}:
        raise CanNotSave(not_before={not_before})
    return True
for step in range(1, {steps} + 1):
    time.sleep({step_s})
    COUNTERS.pack_into(session.page, COUNTERS_AT, step, time.monotonic_ns())
    if {unprotected} == step:
        reporter.off("planted")
    if {uncovered} == step:
        reporter.replays(0, 3, "planted")
    if standing.is_asked(step):
        standing.stand(step, save)
time.sleep({linger_s})
"""


def test_both_sides_of_the_page_mean_the_same_word() -> None:
    assert (page.PAUSE_AT, page.PAUSE.format) == (progress.PAUSE_AT, progress.PAUSE.format)
    assert page.GROUPS_AT + 8 <= page.PAUSE_AT <= page.GROUP_AT - 8


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.crew.stop()
    made.crew.join_stop(10)
    made.crew.close()
    assert made.errors == []


def start(harness: Harness, rank: int, **how: Any) -> Any:
    values = {"step_s": 0.01, "steps": 100_000, "linger_s": 0, "not_before": 0, "stand_s": 10}
    values |= {"unprotected": -1, "uncovered": -1, **how}
    return harness.launch([sys.executable, "-c", PROGRAM.format(root=ROOT, **values)], rank)


def started(harness: Harness, *steps_s: float, **how: Any) -> list[Any]:
    harness.crew.begin(1, len(steps_s), {}, restored=how.pop("restored", None))
    workers = [start(harness, rank, step_s=s, **how) for rank, s in enumerate(steps_s)]
    eventually(lambda: all(w.progress.read()[0] > 3 for w in workers))
    return workers


def paused(harness: Harness, condition: Callable[[Paused], object] = lambda p: True) -> Paused:
    eventually(lambda: harness.crew.paused is not None and condition(harness.crew.paused))
    assert harness.crew.paused is not None
    return harness.crew.paused


def test_two_workers_of_different_speed_stop_at_one_step(harness: Harness) -> None:
    crew, workers = harness.crew, started(harness, 0.005, 0.02)
    crew.pause(1)
    told = paused(harness)
    assert told.step is None and told.generation == 1
    assert told.reach > max(w.progress.read()[0] for w in workers) - 1
    goal = told.reach + 5
    crew.pause(goal)
    assert paused(harness, lambda p: p.step is not None).step == goal
    time.sleep(0.3)
    assert [w.progress.read()[0] for w in workers] == [goal, goal]
    crew.pause(None)
    eventually(lambda: all(w.progress.read()[0] > goal + 3 for w in workers))
    assert crew.paused is None


def test_none_passes_what_was_told_without_standing_still(harness: Harness) -> None:
    crew, workers = harness.crew, started(harness, 0.001, 0.001)
    for _ in range(10):
        crew.pause(1)
        reach = paused(harness).reach
        time.sleep(0.05)
        assert max(w.progress.read()[0] for w in workers) <= reach
        crew.pause(None)
        time.sleep(0.02)


def test_what_was_restored_is_done_already(harness: Harness) -> None:
    started(harness, 0.01, restored=(5_000, 1))
    harness.crew.pause(1)
    assert paused(harness).reach == 5_001


def test_a_step_that_can_not_be_saved_moves_the_goal(harness: Harness) -> None:
    crew = harness.crew
    started(harness, 0.005, not_before=200)
    crew.pause(1)
    crew.pause(paused(harness).reach)
    assert paused(harness, lambda p: p.reach == 200).step is None
    crew.pause(200)
    assert paused(harness, lambda p: p.step is not None).step == 200


def test_a_worker_that_is_not_protected_says_that_it_can_not(harness: Harness) -> None:
    started(harness, 0.01, 0.01, unprotected=2)
    harness.crew.pause(1)
    assert "not protected" in paused(harness, lambda p: p.problem).problem


def test_one_whose_computing_is_not_compared_can(harness: Harness) -> None:
    started(harness, 0.01, 0.01, uncovered=2)
    eventually(
        lambda: [note.get("parts") for note in harness.notes if note["kind"] == "protection"] == [["replay"]] * 2
    )
    harness.crew.pause(1)
    harness.crew.pause(paused(harness).reach + 5)
    assert paused(harness, lambda p: p.step is not None).problem == ""


def test_one_that_has_ended_can_not_either(harness: Harness) -> None:
    harness.crew.begin(1, 2, {})
    start(harness, 0)
    ended = start(harness, 1, steps=1)
    eventually(lambda: ended.exit_status() == 0)
    harness.crew.pause(1)
    assert "has ended" in paused(harness, lambda p: p.problem).problem


def test_a_worker_that_is_started_later_is_asked_too(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(1, 1, {})
    crew.pause(1)
    assert paused(harness).reach == 2
    crew.pause(2)
    start(harness, 0)
    assert paused(harness, lambda p: p.step is not None).step == 2


def test_the_next_generation_is_not_asked(harness: Harness) -> None:
    crew = harness.crew
    started(harness, 0.01)
    crew.pause(1)
    paused(harness)
    crew.stop()
    eventually(lambda: not crew.alive)
    (worker,) = started_again(harness)
    assert crew.paused is None and worker.progress.read()[0] > 3


def started_again(harness: Harness) -> list[Any]:
    harness.crew.begin(2, 1, {})
    workers = [start(harness, 0)]
    eventually(lambda: all(w.progress.read()[0] > 3 for w in workers))
    return workers


def test_one_that_goes_on_before_it_is_let_go_stands_no_more(harness: Harness) -> None:
    crew, (worker,) = harness.crew, started(harness, 0.005, stand_s=1.0)
    crew.pause(1)
    goal = paused(harness).reach + 5
    crew.pause(goal)
    assert paused(harness, lambda p: p.step is not None).step == goal
    assert paused(harness, lambda p: p.step is None).step is None
    eventually(lambda: worker.progress.read()[0] > goal)


def test_a_word_that_comes_when_the_workers_were_let_go_is_forgotten(harness: Harness) -> None:
    crew, (worker,) = harness.crew, started(harness, 0.01)
    crew.pause(1)
    crew._lock.acquire()
    try:
        message = {"kind": "paused", "step": 9}
        word = threading.Thread(target=lambda: crew._stands(worker, message))
        word.start()
        time.sleep(0.1)
        crew.paused = None  # as ``pause`` does, which has the lock
    finally:
        crew._lock.release()
    word.join()
    assert crew.paused is None and harness.errors == []
    crew.pause(None)


def test_a_page_that_is_gone_can_not_be_written() -> None:
    page_ = progress.ProgressPage()
    os.close(page_.fd)
    page_.pause(3)
    page_._fd = -1
    page_.pause(3)
    page_.close()
