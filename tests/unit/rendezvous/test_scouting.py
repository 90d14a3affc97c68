"""The watch over a node's workers, turn by turn, with pages that the test writes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmres.policy import Detection, Straggler
from lmres.rendezvous.codec import decode
from lmres.rendezvous.edge import scouting as edge
from lmres.rendezvous.edge.crew import Crew
from lmres.rendezvous.edge.scouting import MAX_SIGHTING_BYTES, Scouting
from lmres.rendezvous.edge.workers.process import WorkerPlace, WorkerProcess
from lmres.rendezvous.edge.workers.progress import PageView
from lmres.rendezvous.plan import ActiveNode, Plan
from lmres.rendezvous.state import Member
from lmres.scout.sighting import GroupSight, OpMark, Pace, Phase, Sighting, WorkerSight

T0 = 1_000_000
MS = 1_000_000


@dataclass
class Page:
    view: PageView | None
    blind: str = ""

    def look(self, pid: int | None = None) -> PageView | None:
        return self.view


@dataclass(eq=False)
class Worker:
    rank: int
    pid: int
    progress: Page
    status: int | None = None

    @property
    def place(self) -> WorkerPlace:
        return WorkerPlace(generation=1, rank=self.rank, local_rank=self.rank)

    def exit_status(self) -> int | None:
        return self.status


@dataclass
class Monitor:
    all: list[Worker]

    def workers(self, generation: int | None = None) -> tuple[WorkerProcess, ...]:
        return tuple(cast(Any, self.all))


@dataclass
class FakeCrew:
    monitor: Monitor
    generation: int = 1
    stopping: bool = False
    excused_pids: frozenset[int] = frozenset()
    attached_pids: frozenset[int] = frozenset()
    watch_told: set[int] = field(default_factory=set)
    watch_off: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, tuple[int, int]] = field(default_factory=dict)
    evidence: list[tuple[Any, str]] = field(default_factory=list)

    def add_evidence(self, cause: Any, weight: str, at_ms: int, *, reaction: str = "recover") -> None:
        self.evidence.append((cause, reaction))


def member(node_id: str) -> Member:
    return Member(
        node_id=node_id,
        incarnation="i",
        address="127.0.0.1",
        host=f"host-{node_id}",
        boot_id="b",
        pid=1,
        pid_start=1,
        failure_domain=node_id,
    )


def view(count: int, at_ms: int, *, phase: Phase = "user", started: bool = True, **more: Any) -> PageView:
    made = PageView(
        pid=os.getpid(),
        step=5,
        step_ns=at_ms * MS,
        first_ns=T0 * MS if started else 0,
        event_count=count,
        event_ns=at_ms * MS,
        phase=phase,
        phase_ns=at_ms * MS,
        collective_ns=0,
        loader_ns=0,
        io_ns=0,
        armed=True,
    )
    return replace(made, **more)


class Scene:
    """A node of two workers; its thread is not started, the test makes the turns."""

    def __init__(self, *, slot: int = 0, setting: float | str = 3.0, action: str = "report", ranks: int = 2) -> None:
        me = os.getpid()
        self.workers = [Worker(r, me + r, Page(view(1, T0))) for r in (0, 1)]
        self.crew = FakeCrew(Monitor(self.workers), attached_pids=frozenset(w.pid for w in self.workers))
        self.crew.watch_told = {w.pid for w in self.workers}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pokes = 0
        straggler = Straggler(action=cast(Any, action))
        self.scouting = Scouting(
            detection=Detection(hang_timeout_s=cast(Any, setting), straggler=straggler),
            crew=cast(Crew, self.crew),
            me=lambda: member("a"),
            member=member,
            poke=self._poke,
            emit=lambda event, generation, **fields: self.events.append((event, fields)),
        )
        self.watch = edge._Watch(self.scouting, 1, slot=slot, ranks=ranks)
        self.scouting._watch = self.watch
        self.now_ms = T0

    def _poke(self) -> None:
        self.pokes += 1

    def go(self, for_ms: int, *moving: int) -> None:
        """Turns of a quarter of a second, in which these ranks go on."""
        for _ in range(for_ms // 250):
            self.now_ms += 250
            for w in self.workers:
                if w.rank in moving and w.progress.view is not None:
                    seen = w.progress.view
                    w.progress.view = replace(
                        seen, event_count=seen.event_count + 1, event_ns=self.now_ms * MS, step=seen.step + 1
                    )
            self.watch.turn(self.now_ms)

    @property
    def sighting(self) -> Sighting:
        assert self.scouting.sighting is not None
        return self.scouting.sighting

    def off(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == "protection_off"]


def test_while_all_goes_well_nothing_is_told() -> None:
    scene = Scene()
    scene.go(10_000, 0, 1)
    assert scene.scouting.sighting is None and scene.pokes == 0


def test_a_quiet_worker_raises_an_alarm_and_withdraws_it_when_it_moves() -> None:
    scene = Scene()
    scene.go(1_000, 0, 1)
    scene.go(2_750, 0)
    assert scene.scouting.sighting is None
    scene.go(500, 0)
    first = scene.sighting
    assert (first.alarm, first.number, first.timeout_ms, first.node_id) == (True, 1, 3_000, "a")
    assert [w.quiet_ms >= 3_000 for w in first.workers] == [False, True]
    scene.go(1_000, 0)
    assert scene.sighting is first, "once"
    scene.go(250, 0, 1)
    assert (scene.sighting.alarm, scene.sighting.number) == (False, 2)
    assert scene.pokes == 2


def test_an_alarm_is_told_anew_when_the_time_has_passed_again() -> None:
    scene = Scene()
    scene.go(3_500, 0)
    scene.go(3_000, 0)
    assert (scene.sighting.alarm, scene.sighting.number) == (True, 2)


def test_who_is_asked_answers_once_and_again_later() -> None:
    scene = Scene()
    scene.go(500, 0, 1)
    scene.scouting.look(1)
    scene.scouting.look(2)
    scene.go(250, 0, 1)
    assert (scene.sighting.alarm, scene.sighting.number) == (False, 1)
    scene.scouting.look(1)
    scene.go(250, 0, 1)
    assert scene.sighting.number == 1
    scene.go(500, 0, 1)
    assert scene.sighting.number == 2


def test_before_the_first_step_there_is_time() -> None:
    scene = Scene()
    for w in scene.workers:
        w.progress.view = view(1, T0, phase="collective", started=False)
    scene.go(60_000)
    assert scene.scouting.sighting is None


@pytest.mark.parametrize("why", ["ended", "excused", "stopping", "unarmed", "older"])
def test_who_is_not_watched_raises_no_alarm(why: str) -> None:
    scene = Scene()
    second = scene.workers[1]
    match why:
        case "ended":
            second.status = 0
        case "excused":
            scene.crew.excused_pids = frozenset({second.pid})
        case "stopping":
            scene.crew.stopping = True
        case "unarmed":
            second.progress.view = view(1, T0, armed=False)
        case "older":
            scene.crew.generation = 2
    scene.go(20_000, 0)
    assert scene.scouting.sighting is None


def test_an_ended_worker_is_in_the_answer() -> None:
    scene = Scene()
    scene.go(500, 0, 1)
    scene.workers[1].status = -6
    scene.scouting.look(1)
    scene.go(250, 0)
    assert scene.sighting.workers[1].state == "Z"
    assert scene.sighting.workers[1].step == 7


def test_a_broken_page_is_said_once_and_the_other_rank_stays_watched() -> None:
    scene = Scene()
    scene.go(500, 0, 1)
    scene.workers[0].progress = Page(None, "the page begins with b'junk'")
    scene.go(4_000)
    (off,) = scene.off()
    assert (off["adapter"], off["parts"], off["rank"]) == ("scout", ["hang", "straggler"], 0)
    assert "junk" in off["reason"]
    assert scene.sighting.alarm
    assert "junk" in scene.sighting.workers[0].blind and not scene.sighting.workers[1].blind


def test_a_program_without_torch_is_said_once() -> None:
    scene = Scene()
    scene.crew.watch_told.clear()
    for w in scene.workers:
        w.progress.view = view(0, 0, armed=False, started=False)
    scene.go(edge.UNARMED_MS)
    assert scene.off() == []
    scene.go(10_000)
    assert [o["rank"] for o in scene.off()] == [0, 1]


def test_a_watch_that_failed_in_the_worker_is_said_once() -> None:
    scene = Scene()
    scene.crew.watch_off = {scene.workers[1].pid: "ImportError: no module named so"}
    scene.go(1_000, 0, 1)
    (off,) = scene.off()
    assert (off["adapter"], off["parts"], off["rank"]) == ("scout", ["hang", "straggler"], 1)
    assert "ImportError: no module named so" in off["reason"]


def in_phase(scene: Scene, phase: Phase, *ranks: int) -> None:
    for w in scene.workers:
        if w.rank in ranks and w.progress.view is not None:
            w.progress.view = replace(w.progress.view, phase=phase)


def test_auto_learns_from_pauses_that_ended() -> None:
    scene = Scene(setting="auto")
    in_phase(scene, "loader", 1)
    scene.go(1_000, 0, 1)
    scene.go(20_000, 0)
    scene.go(1_000, 0, 1)
    assert 20_000 <= scene.scouting.history.longest_ms <= 20_500
    scene.go(150_000, 0)
    assert scene.scouting.sighting is None
    scene.go(60_000, 0)
    assert scene.sighting.alarm and scene.sighting.auto


@pytest.mark.parametrize("phase", ["collective", "checkpoint_io"])
def test_nothing_is_learned_from_what_is_not_its_own_work(phase: Phase) -> None:
    scene = Scene(setting="auto")
    scene.go(1_000, 0, 1)
    in_phase(scene, phase, 1)
    scene.go(20_000, 0)
    in_phase(scene, "user", 1)
    scene.go(1_000, 0, 1)
    assert scene.scouting.history.longest_ms < 1_000


def test_nothing_is_learned_from_a_process_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ["T"]
    monkeypatch.setattr(edge, "read_process", lambda pid: SimpleNamespace(state=state[0]))
    scene = Scene(setting="auto")
    state[0] = "S"
    scene.go(1_000, 0, 1)
    state[0] = "T"
    scene.go(10_000, 0)
    state[0] = "S"
    scene.go(5_000, 0)
    scene.go(1_000, 0, 1)
    assert scene.scouting.history.longest_ms < 1_000
    scene.go(5_000, 0)
    scene.go(1_000, 0, 1)
    assert scene.scouting.history.longest_ms >= 5_000, "the next pause is its own again"


@pytest.mark.parametrize("how", ["stopping", "next", "closed"])
def test_what_was_taken_for_a_hang_teaches_when_the_workers_are_stopped(how: str) -> None:
    scene = Scene(setting="auto")
    scene.go(1_000, 0, 1)
    in_phase(scene, "collective", 0)
    scene.go(601_000)
    assert scene.sighting.alarm
    match how:
        case "stopping":
            scene.crew.stopping = True
            scene.go(1_000)
        case "next":
            scene.crew.generation = 2
            scene.go(1_000)
        case "closed":
            scene.watch.end()
            scene.watch._run()
    assert 600_000 <= scene.scouting.history.longest_ms <= 602_000, "of rank 1, in its own code; rank 0 only waited"


def test_a_pause_that_raised_no_alarm_is_not_noted_at_the_end() -> None:
    scene = Scene(setting="auto")
    scene.go(1_000, 0, 1)
    scene.go(100_000, 0)
    scene.crew.stopping = True
    scene.go(1_000, 0)
    assert scene.scouting.history.longest_ms < 1_000


def test_a_program_that_trains_in_another_thread_moves() -> None:
    """Its main thread waits: only the steps tell."""
    scene = Scene()
    for n in range(1, 40):
        for w in scene.workers:
            assert w.progress.view is not None
            w.progress.view = replace(w.progress.view, step=5 + n, step_ns=scene.now_ms * MS)
        scene.go(500)
    assert scene.scouting.sighting is None


def test_with_auto_three_steps_come_first() -> None:
    scene = Scene(setting="auto")
    in_phase(scene, "collective", 0, 1)
    scene.go(250, 0, 1)
    scene.go(100_000)
    assert scene.scouting.sighting is None
    scene.go(500, 0, 1)
    scene.go(61_000)
    assert scene.sighting.alarm


def test_paces_are_of_the_time_since_the_first_step() -> None:
    scene = Scene()
    scene.go(250, 0, 1)
    page = scene.workers[0].progress
    assert page.view is not None
    page.view = replace(
        page.view,
        step=page.view.step + 10,
        event_ns=page.view.event_ns + 1_000 * MS,
        collective_ns=300 * MS,
        loader_ns=100 * MS,
        io_ns=50 * MS,
    )
    scene.watch.turn(scene.now_ms + 1_000)
    assert scene.scouting.paces[0] == Pace(rank=0, steps=10, busy_us=550_000, input_us=100_000, waiting_us=300_000)


def goes_slowly(scene: Scene, ranks: int) -> None:
    """Rank 1 on b is slow."""

    def paces(steps: int) -> dict[str, tuple[Pace, ...]]:
        def one(rank: int) -> Pace:
            cost_us = 50_000 if rank == 1 else 20_000
            return Pace(rank=rank, steps=steps, busy_us=steps * cost_us, input_us=0, waiting_us=0)

        return {"abc"[r]: (one(r),) for r in range(ranks)}

    for n in range(5):
        scene.scouting.paces_of_all(paces(10 * n))
        scene.go(1_250, 0, 1)


@pytest.mark.parametrize(("action", "reaction"), [("report", "report"), ("replace", "replace")])
@pytest.mark.parametrize("slot", [0, 1])
def test_stragglers_are_judged_on_slot_0(slot: int, action: str, reaction: str) -> None:
    scene = Scene(slot=slot, action=action, ranks=3)
    goes_slowly(scene, 3)
    if slot:
        assert scene.crew.evidence == []
        return
    ((cause, how),) = scene.crew.evidence
    assert (cause.failure_class, cause.node_id, cause.host, cause.rank) == ("straggler", "b", "host-b", 1)
    assert how == reaction and "computing" in cause.detail


def test_of_two_ranks_none_is_replaced() -> None:
    scene = Scene(action="replace")
    goes_slowly(scene, 2)
    assert [how for _, how in scene.crew.evidence] == ["report"]


@pytest.mark.parametrize(("again", "reaction"), [("b", "report"), ("c", "replace")])
def test_a_slot_that_is_slow_again_with_another_node_is_not_replaced_again(again: str, reaction: str) -> None:
    scene = Scene(action="replace", ranks=3)
    scene.scouting.in_place_of_slow = frozenset(again)
    goes_slowly(scene, 3)
    assert [how for _, how in scene.crew.evidence] == [reaction]


def plan(generation: int, nodes: str, failure_class: str, action: Any) -> Plan:
    return Plan(
        plan_id=str(generation),
        generation=generation,
        from_generation=generation - 1,
        action=action,
        failure_class=failure_class,
        active=tuple(ActiveNode(slot=slot, node_id=n, incarnation="i") for slot, n in enumerate(nodes)),
        standby=(),
        quarantined=(),
        reason="",
        recovery_source={},
        dismissed={},
    )


def test_whose_slot_was_taken_from_a_slow_node_is_in_the_plans() -> None:
    first = plan(1, "abc", "none", "start")
    moved = plan(2, "adc", "straggler", "replace")
    crash = plan(3, "adc", "process_crash", "restart")
    lost = plan(4, "ade", "node_lost", "replace")
    assert edge.in_place_of_slow(()) == edge.in_place_of_slow((first,)) == frozenset()
    assert edge.in_place_of_slow((first, moved)) == frozenset("d")
    assert edge.in_place_of_slow((first, moved, crash, lost)) == frozenset("d")
    assert edge.in_place_of_slow((first, moved, crash, plan(4, "aec", "node_lost", "replace"))) == frozenset("e")


def test_a_sighting_of_thousands_of_ranks_fits_and_keeps_what_tells_most() -> None:
    ranks = tuple(range(8_192))
    marks = tuple(OpMark(number=n, op="allreduce", shape="float32[1]", step=n) for n in range(1, 17))
    groups = tuple(GroupSight(name=str(n), ranks=ranks, entered=16, left=16, recent=marks) for n in range(4))
    made = of_many(8, groups, ("train.py:1 main",))
    cut = edge._fitting(made)
    assert len(edge.encode(cut)) <= MAX_SIGHTING_BYTES
    assert all(g.ranks == () and g.recent[-1].number == 16 and g.entered == 16 for w in cut.workers for g in w.groups)
    assert all(w.stack for w in cut.workers)
    small = of_many(2, tuple(replace(g, ranks=(0, 1)) for g in groups), ("train.py:1 main",))
    assert edge._fitting(small) == small


def test_a_sighting_fits_whatever_is_in_it() -> None:
    mark = OpMark(number=1, op="\u0101" * 32, shape="\u0101" * 40, step=1)
    groups = tuple(GroupSight(name="\u0101" * 64, ranks=(), entered=1, left=0, recent=(mark,)) for _ in range(16))
    without_groups = edge._fitting(of_many(64, groups, ("x" * 300,)))
    assert len(edge.encode(without_groups)) <= MAX_SIGHTING_BYTES
    assert all(w.stack and not w.groups for w in without_groups.workers)
    bare = edge._fitting(of_many(256, groups, ("\u0101" * 300,) * 3))
    assert len(edge.encode(bare)) <= MAX_SIGHTING_BYTES
    assert len(bare.workers) == 256 and not any(w.stack or w.groups for w in bare.workers)


def of_many(count: int, groups: tuple[GroupSight, ...], stack: tuple[str, ...]) -> Sighting:
    worker = WorkerSight(
        rank=0, local_rank=0, pid=1, step=1, phase="user", phase_ms=0, quiet_ms=0, groups=groups, stack=stack
    )
    many = tuple(replace(worker, rank=r) for r in range(count))
    return Sighting(generation=1, node_id="a", incarnation="i", number=1, alarm=True, timeout_ms=1, workers=many)


def test_a_phase_of_a_newer_version_does_not_spoil_the_record() -> None:
    made = of_many(1, (), ())
    newer = replace(made, workers=(replace(made.workers[0], phase="dreaming"),))
    assert decode(Sighting, edge.encode(newer)) == newer


def test_a_large_sighting_is_cut() -> None:
    marks = tuple(OpMark(number=n, op="allreduce", shape="float32[1, 2, 3]", step=n) for n in range(1, 17))
    groups = tuple(GroupSight(name=str(n), ranks=(0, 1), entered=16, left=16, recent=marks) for n in range(16))
    worker = WorkerSight(
        rank=0,
        local_rank=0,
        pid=1,
        step=1,
        phase="user",
        phase_ms=0,
        quiet_ms=0,
        groups=groups,
        stack=tuple("x" * 2_000 for _ in range(40)),
    )
    many = tuple(replace(worker, rank=r) for r in range(16))
    made = Sighting(generation=1, node_id="a", incarnation="i", number=1, alarm=True, timeout_ms=1, workers=many)
    cut = edge._fitting(made)
    assert len(edge.encode(cut)) <= MAX_SIGHTING_BYTES
    assert all(g.recent[-1].number == 16 for w in cut.workers for g in w.groups)


def test_a_thread_that_fails_says_so_once_and_the_next_generation_has_a_new_one() -> None:
    scene = Scene()
    broken = scene.workers[0].progress
    broken.look = lambda pid=None: 1 / 0  # type: ignore[method-assign,assignment]
    scene.scouting.begin(1, slot=0, ranks=2)
    thread = cast(Any, scene.scouting._watch)._thread
    thread.join(10)
    assert not thread.is_alive()
    assert [event for event, _ in scene.events] == ["protection_armed", "protection_off"]
    assert "ZeroDivisionError" in scene.off()[0]["reason"]
    scene.scouting.look(1)
    scene.workers[0].progress = Page(view(1, time.monotonic_ns() // MS))
    scene.crew.generation = 2
    scene.scouting.begin(2, slot=0, ranks=2)
    assert scene.events[-1][0] == "protection_armed" or _soon(lambda: len(scene.events) == 3)
    scene.scouting.close()
    assert len(scene.off()) == 1
    assert not any(t.name == "lmres-scout" for t in threading.enumerate())


def _soon(condition: Any) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_detection_off_is_no_thread() -> None:
    scene = Scene()
    scene.scouting.detection = Detection(enabled=False)
    scene.scouting._watch = None
    scene.scouting.begin(1, slot=0, ranks=2)
    assert scene.scouting._watch is None and scene.scouting.paces == () and scene.scouting.sighting is None
