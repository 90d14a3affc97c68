"""Watches this node's workers from outside: the agent's side of hangs and stragglers.

A thread reads the workers' progress pages, ``/proc`` and, after an alarm, their stacks; it never asks them to do
anything but to run a signal handler in C. Rules:

1. The thread owns all that it knows of the workers. The control thread asks (``look``), hands over what the other
   agents tell (``paces_of_all``), and takes what is ready (``sighting``, ``paces``): nothing here makes it wait.
2. A worker that has been quiet for longer than it may (``lmres.scout.hangs``) raises an alarm, which is told anew each
   time that long has passed again, and is withdrawn when the worker moves. Who hangs, and whether anybody does, is not
   decided here (``lmres.scout.localize``).
3. Not watched is a worker that has ended, that holds after an exception, or that is being stopped.
4. Watching never harms the run. Where it fails for one rank (a page that is broken, a program without torch, marks
   that failed in the worker), that is said once and the others stay watched; where the thread itself fails, that is
   said once, and training goes on. The next generation has a new thread.
5. Stragglers are judged by the node of slot 0 alone, from the paces of all ranks that the leases carry. Of two ranks
   nobody can tell which is slow and which is fast, and a slot that is slow again with another node was not slow because
   of its node: then nobody is replaced, whatever the policy says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lmres.policy import Detection
from lmres.rendezvous.codec import encode
from lmres.rendezvous.edge.crew import Crew, now_ms
from lmres.rendezvous.edge.workers.process import WorkerProcess
from lmres.rendezvous.edge.workers.proctree import read_process
from lmres.rendezvous.edge.workers.progress import PageView
from lmres.rendezvous.edge.workers.stacks import MAX_WAIT_S, read_stacks
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.state import Member
from lmres.scout.hangs import History, Quiet, teaches, timeout_ms
from lmres.scout.sighting import MAX_RECENT, MAX_STACK_LINES, GroupSight, Pace, Sighting, WorkerSight
from lmres.scout.straggler import Slow, StragglerJudge

log = logging.getLogger("lmres")

ADAPTER = "scout"
PARTS = ("hang", "straggler")
TURN_S = 0.25
LEAST_TURN_S = 0.02
ANSWER_MS = 500
"""Who is asked again within this time has been answered."""
STACKS_S = 1.0
"""For the stacks of all workers here."""
UNARMED_MS = 120_000
"""A program that has not imported torch by then does without it."""
MAX_SIGHTING_BYTES = 256 << 10
_CLOSE_S = 2.0
_SURE_STATES = frozenset("TtZX")
"""The others may be seen by chance: they count when seen twice in a row."""


class Scouting:
    """What the node uses; its methods may be called from any thread.

    ``member``: the registration of a node. ``emit``: an event's name, its generation, its fields. ``poke`` wakes the
    control thread.
    """

    def __init__(
        self,
        *,
        detection: Detection,
        crew: Crew,
        me: Callable[[], Member],
        member: Callable[[str], Member | None],
        poke: Callable[[], None],
        emit: Callable[..., None],
    ) -> None:
        self.detection = detection
        self.crew = crew
        self.me = me
        self.member = member
        self.poke = poke
        self.emit = emit
        self.history = History()
        self.in_place_of_slow: frozenset[str] = frozenset()
        """Nodes whose slot has been taken from a slow one."""
        self._watch: _Watch | None = None

    def begin(self, generation: int, *, slot: int, ranks: int) -> None:
        """The crew's next workers belong to ``generation``; ``ranks``: how many there are on all nodes."""
        if not self.detection.enabled:
            return
        before, self._watch = self._watch, _Watch(self, generation, slot=slot, ranks=ranks)
        if before is not None:
            before.end()
        try:
            self._watch.start()
        except RuntimeError as error:  # no more threads
            self._watch.give_up(error)

    def look(self, generation: int) -> None:
        """Somebody wants to know what the workers of this generation are doing."""
        watch = self._watch
        if watch is not None and watch.generation == generation:
            watch.ask()

    def paces_of_all(self, paces: Mapping[str, tuple[Pace, ...]]) -> None:
        """By node id, of all active nodes as far as known."""
        watch = self._watch
        if watch is not None:
            watch.all_paces = dict(paces)

    @property
    def sighting(self) -> Sighting | None:
        """The newest one of this generation, if there was a cause to look."""
        watch = self._watch
        return watch.sighting if watch is not None else None

    @property
    def paces(self) -> tuple[Pace, ...]:
        """Of the ranks here, since they began."""
        watch = self._watch
        return watch.paces if watch is not None else ()

    def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            watch.join(_CLOSE_S)


class _Seen:
    """What is known of one worker."""

    def __init__(self, worker: WorkerProcess, at_ms: int) -> None:
        self.worker = worker
        self.began_ms = at_ms
        self.quiet = Quiet()
        self.view: PageView | None = None
        self.problem = ""
        self.state = ""
        self.ended = False
        self.excused = False
        self.timeout_ms = 0
        self._raw_state = ""
        self._first: PageView | None = None
        self._was_stopped = False
        """During the pause that lasts."""

    def look(self, at_ms: int, *, excused: bool) -> int:
        """Answers the pause that has just ended, if it teaches anything; else 0. ``excused``: it is no longer to be
        watched."""
        worker = self.worker
        self.ended = self.ended or worker.exit_status() is not None
        self.excused = excused
        self._look_at_process()
        view = worker.progress.look(worker.pid)
        if view is None:
            self.problem = worker.progress.blind or "its page can not be read"
            if self.is_stopped:
                self.quiet.saw(-1, at_ms, at_ms)
            return 0
        self.problem = ""
        ended = self._teaches
        before, self.view = self.view, view
        stopped = self.state in ("T", "t")
        moved = before is None or _count(view) != _count(before)
        self._was_stopped = stopped or (self._was_stopped and not moved)
        pause_ms = self.quiet.saw(_count(view), view.event_ns // 1_000_000, at_ms)
        if self._first is None and view.first_ns:
            self._first = view
        return pause_ms if ended else 0

    @property
    def _teaches(self) -> bool:
        """Whether the pause that lasts says anything of its own work after its first step."""
        view = self.view
        return self._first is not None and view is not None and teaches(view.phase, stopped=self._was_stopped)

    @property
    def taken_for_hung_ms(self) -> int:
        """The pause that lasts, if it has raised an alarm and teaches anything."""
        return self.quiet.quiet_ms if self.loud and self._teaches else 0

    @property
    def steps(self) -> int:
        """Completed in this generation, as far as seen."""
        if self._first is None or self.view is None:
            return 0
        return max(1, self.view.step - self._first.step + 1)

    def _look_at_process(self) -> None:
        process = read_process(self.worker.pid)
        raw = "Z" if self.ended else process.state if process is not None else ""
        if raw in _SURE_STATES or raw == self._raw_state:
            self.state = raw
        elif not self.state or self.state in _SURE_STATES:
            self.state = "S"
        self._raw_state = raw

    @property
    def watched(self) -> bool:
        if self.ended or self.excused:
            return False
        return self.is_stopped or (self.view is not None and self.view.armed and not self.problem)

    @property
    def is_stopped(self) -> bool:
        """Seen directly, whatever its page says, or before there is anything on it."""
        return self.state in ("T", "t")

    @property
    def loud(self) -> bool:
        return self.watched and self.quiet.quiet_ms >= self.timeout_ms

    @property
    def pace(self) -> Pace | None:
        first, now = self._first, self.view
        if first is None or now is None or not now.armed:
            return None
        waiting = now.collective_ns - first.collective_ns
        data = now.loader_ns - first.loader_ns
        files = now.io_ns - first.io_ns
        busy = now.event_ns - first.event_ns - waiting - data - files
        return Pace(
            rank=self.worker.place.rank,
            steps=now.step - first.step,
            busy_us=max(0, busy) // 1000,
            input_us=max(0, data) // 1000,
            waiting_us=max(0, waiting) // 1000,
        )

    def sight(self, at_ms: int, stack: tuple[str, ...]) -> WorkerSight:
        place, view = self.worker.place, self.view
        blind = self.problem if view is None or self.problem else "" if view.armed else "nothing is noted on its page"
        return WorkerSight(
            rank=place.rank,
            local_rank=place.local_rank,
            pid=self.worker.pid,
            step=view.step if view is not None else 0,
            phase=view.phase if view is not None else "start",
            phase_ms=max(0, at_ms - view.phase_ns // 1_000_000) if view is not None and view.phase_ns else 0,
            quiet_ms=self.quiet.quiet_ms,
            state=self.state,
            groups=view.groups if view is not None and not blind else (),
            stack=stack,
            blind=blind[:200],
            timeout_ms=self.timeout_ms,
        )


class _Watch:
    """One generation's thread and what it knows."""

    def __init__(self, scouting: Scouting, generation: int, *, slot: int, ranks: int) -> None:
        self.generation = generation
        self.sighting: Sighting | None = None
        self.paces: tuple[Pace, ...] = ()
        self.all_paces: dict[str, tuple[Pace, ...]] | None = None
        straggler = scouting.detection.straggler
        self._scouting = scouting
        self._crew = scouting.crew
        self._ranks = ranks
        self._judge = (
            StragglerJudge(ranks=ranks, slowdown=straggler.slowdown, windows=straggler.windows) if slot == 0 else None
        )
        self._seen: dict[int, _Seen] = {}
        self._told: set[tuple[int, str]] = set()
        self._number = 0
        self._told_ms = -ANSWER_MS
        self._alarm: tuple[tuple[int, int], ...] = ()
        self._ended = False
        self._stacks: dict[int, tuple[str, ...]] | None = None
        self._asked = threading.Event()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="lmres-scout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def ask(self) -> None:
        self._asked.set()
        self._wake.set()

    def give_up(self, error: BaseException) -> None:
        log.warning("hangs and stragglers are not noticed any more: %r; training goes on", error, exc_info=error)
        self._emit("protection_off", parts=list(PARTS), reason=f"the watch has failed: {error!r}"[:500])

    def _run(self) -> None:
        try:
            self._emit("protection_armed", parts=list(PARTS), reason="watching")
            while not self._over:
                self.turn(now_ms())
                self._wake.wait(self._turn_s())
                self._wake.clear()
            self._learn_from_the_end()
        except BaseException as error:
            if not self._over:
                self.give_up(error)

    def _turn_s(self) -> float:
        setting = self._scouting.detection.hang_timeout_s
        return TURN_S if setting == "auto" else max(LEAST_TURN_S, min(TURN_S, setting / 10))

    def turn(self, at_ms: int) -> None:
        """One look at all workers here."""
        crew = self._crew
        if crew.stopping or crew.generation != self.generation:
            self._learn_from_the_end()
        if crew.generation != self.generation:
            return
        excused = crew.excused_pids
        for worker in crew.monitor.workers(self.generation):
            seen = self._seen.setdefault(worker.pid, _Seen(worker, at_ms))
            self._look_at(seen, at_ms, excused=crew.stopping or worker.pid in excused)
        if crew.stopping:
            return
        self.paces = tuple(p for s in self._seen.values() if not s.ended and (p := s.pace) is not None)
        self._tell(at_ms)
        self._judge_paces(at_ms)

    def _learn_from_the_end(self) -> None:
        """Workers are stopped while an alarm stands: maybe they only took long."""
        if not self._ended:
            self._ended = True
            for seen in self._seen.values():
                self._scouting.history.note(seen.taken_for_hung_ms)

    def _look_at(self, seen: _Seen, at_ms: int, *, excused: bool) -> None:
        pause_ms = seen.look(at_ms, excused=excused)
        history, view = self._scouting.history, seen.view
        history.note(pause_ms)
        seen.timeout_ms = timeout_ms(
            self._scouting.detection.hang_timeout_s,
            history,
            phase=view.phase if view is not None else "start",
            steps=seen.steps,
            stopped=seen.is_stopped,
        )
        self._say_what_is_off(seen, at_ms)

    def _say_what_is_off(self, seen: _Seen, at_ms: int) -> None:
        if seen.ended or seen.excused:
            return
        attached = seen.worker.pid in self._crew.attached_pids
        if seen.problem and attached:
            self._off_once(seen, "page", f"its progress page can not be used: {seen.problem}")
        elif seen.worker.pid in self._crew.watch_off:
            reason = self._crew.watch_off[seen.worker.pid]
            self._off_once(seen, "watch", f"what notes its progress has failed in it: {reason}")
        elif attached and seen.worker.pid not in self._crew.watch_told and at_ms - seen.began_ms > UNARMED_MS:
            self._off_once(seen, "torch", "the program has not imported torch: nothing tells whether it goes on")

    def _off_once(self, seen: _Seen, what: str, reason: str) -> None:
        key = (seen.worker.pid, what)
        if key in self._told:
            return
        self._told.add(key)
        rank = seen.worker.place.rank
        log.warning("rank %s is not watched for hangs: %s", rank, reason)
        self._emit("protection_off", parts=list(PARTS), reason=reason, rank=rank)

    def _emit(self, event: str, **fields: Any) -> None:
        self._scouting.emit(event, self.generation, adapter=ADAPTER, **fields)

    # -- sightings ----------------------------------------------------------------------------------------------------

    def _tell(self, at_ms: int) -> None:
        """An alarm, its end, or an answer to somebody else's."""
        # The worker and how many times its patience is over: what has changed is told anew.
        alarm = tuple(
            (s.worker.place.rank, s.quiet.quiet_ms // max(1, s.timeout_ms)) for s in self._seen.values() if s.loud
        )
        asked = self._asked.is_set() and at_ms - self._told_ms >= ANSWER_MS
        if not asked and alarm == self._alarm:
            if not alarm and at_ms - self._told_ms > 10 * ANSWER_MS:
                self._stacks = None
            return
        if alarm and not self._alarm:
            ranks = ", ".join(str(rank) for rank, _ in alarm)
            log.warning("rank %s makes no progress; asking what all ranks are doing", ranks)
        elif self._alarm and not alarm:
            log.warning("the ranks here go on")
        self._alarm = alarm
        self._asked.clear()
        self._publish(at_ms, alarm=bool(alarm))

    def _publish(self, at_ms: int, *, alarm: bool) -> None:
        if self._stacks is None:
            self._stacks = self._take_stacks()
        base_ms = timeout_ms(self._scouting.detection.hang_timeout_s, self._scouting.history)
        loud = [s.timeout_ms for s in self._seen.values() if s.loud]
        me = self._scouting.me()
        self._number += 1
        sights = [s.sight(at_ms, self._stacks.get(pid, ())) for pid, s in self._seen.items()]
        self.sighting = _fitting(
            Sighting(
                generation=self.generation,
                node_id=me.node_id,
                incarnation=me.incarnation,
                number=self._number,
                alarm=alarm,
                timeout_ms=min(loud, default=base_ms),
                workers=tuple(sorted(sights, key=lambda w: w.rank)),
                auto=self._scouting.detection.hang_timeout_s == "auto",
            )
        )
        self._told_ms = at_ms
        self._scouting.poke()

    def _take_stacks(self) -> dict[int, tuple[str, ...]]:
        """Of all workers here that can answer, within a bound for all."""
        end = time.monotonic() + STACKS_S
        found = {}
        for pid, seen in self._seen.items():
            way, left_s = self._crew.stacks.get(pid), end - time.monotonic()
            if way is not None and not seen.ended and left_s > 0:
                found[pid] = read_stacks(pid, *way, min(left_s, MAX_WAIT_S))
        return found

    # -- stragglers ---------------------------------------------------------------------------------------------------

    def _judge_paces(self, at_ms: int) -> None:
        paces, self.all_paces = self.all_paces, None
        if self._judge is None or paces is None:
            return
        for slow in self._judge.see(paces, at_ms):
            self._report(slow, at_ms)

    def _report(self, slow: Slow, at_ms: int) -> None:
        member = self._scouting.member(slow.node_id)
        if member is None:
            return
        cause = Cause(
            failure_class="straggler",
            node_id=member.node_id,
            incarnation=member.incarnation,
            host=member.host,
            detail=slow.detail,
            rank=slow.rank,
        )
        wanted = self._scouting.detection.straggler.action == "replace" and self._ranks > 2
        helps = wanted and slow.node_id not in self._scouting.in_place_of_slow
        self._crew.add_evidence(cause, "primary", at_ms, reaction="replace" if helps else "report")


def in_place_of_slow(plans: Sequence[Plan]) -> frozenset[str]:
    """Nodes of the newest plan whose slot has been taken from a slow one. ``plans``: all of the run, oldest first."""
    slots = set()
    for before, plan in pairwise(plans):
        if plan.failure_class == "straggler" and plan.action == "replace":
            was = {n.slot: n.node_id for n in before.active}
            slots |= {n.slot for n in plan.active if was.get(n.slot) != n.node_id}
    return frozenset(n.node_id for n in plans[-1].active if n.slot in slots) if plans else frozenset()


def _count(view: PageView) -> int:
    """Rises with everything that is noted on a page: a step made outside of the main thread is no event."""
    return view.event_count + view.step


def _fitting(sighting: Sighting) -> Sighting:
    """Cut, if it is too large for a record: the oldest operations and the outermost frames go first, then the ranks of
    the groups, the groups, the stacks."""
    for cut in _cuts(sighting):
        if len(encode(cut)) <= MAX_SIGHTING_BYTES:
            break
    return cut


def _cuts(sighting: Sighting) -> Iterator[Sighting]:
    """Less and less of it."""

    def cut(marks: int, lines: int, *, ranks: bool = True, groups: bool = True) -> Sighting:
        def of_group(g: GroupSight) -> GroupSight:
            return replace(g, recent=g.recent[-marks:], ranks=g.ranks if ranks else ())

        def of_worker(w: WorkerSight) -> WorkerSight:
            stack = tuple(line[:300] for line in w.stack[-lines:]) if lines else ()
            return replace(w, groups=tuple(map(of_group, w.groups)) if groups else (), stack=stack)

        return replace(sighting, workers=tuple(map(of_worker, sighting.workers)))

    yield cut(MAX_RECENT, MAX_STACK_LINES)
    yield cut(8, 20)
    yield cut(8, 20, ranks=False)
    yield cut(4, 8, ranks=False)
    yield cut(1, 3, ranks=False)
    yield cut(1, 3, groups=False)
    yield cut(1, 0, groups=False)
