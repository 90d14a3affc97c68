"""Who is slower than the others, though not stuck.

All ranks wait for the slowest in each step, so their steps take equally long and only their work tells them apart: the
time that is neither waiting for others nor writing files, divided into computing (``busy``) and waiting for data
(``input``). Peer-relative and persistent, as in arXiv 2410.12588 and 2411.01791:

1. A *window* closes when every rank has made ``WINDOW_STEPS`` more steps and a second has passed.
2. In a window a rank is slow if it works ``slowdown`` times as long a step as the median of the others, and longer by
   at least 5 ms and a fifth of that median. What slows all is nobody's fault: it moves the median.
3. Slow in ``windows`` windows in a row is a verdict, once for a rank in a generation; if it has been as fast as the
   others since, again after a minute.
4. The cause is what it spends its excess on, computing or input, over those windows.
5. If all ranks of a node are slow in the same way, and it has several, it is the node. Of a node with one rank the two
   can not be told apart, and the rank is named.
6. Of two ranks it is only known that they differ, and a slot that is slow with another node too is not slow because of
   its node: that is told, and nobody is replaced (``lmres.rendezvous.edge.scouting``).

A slow connection is not judged: in a ring or a tree all ranks wait equally for the slowest link, so that none stands
out, and a longer wait of all may as well be the program (another phase of training). ``Pace`` counts from the start of
a generation; a count that goes back starts the windows anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from lmres.scout.sighting import Pace

WINDOW_STEPS = 10
WINDOW_MS = 1_000
LEAST_US = 5_000
LEAST_SHARE = 0.2
AGAIN_MS = 60_000

SlowCause = Literal["compute", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """``rank`` None: all ranks of the node. Microseconds a step, in the last window; ``usual_us``: the others'."""

    node_id: str
    rank: int | None
    cause: SlowCause
    work_us: int
    usual_us: int
    detail: str


@dataclass(slots=True)
class _Track:
    """What is known of one rank."""

    streak: int = 0
    excess_busy_us: float = 0.0
    excess_input_us: float = 0.0
    work_us: float = 0.0
    usual_us: float = 0.0
    told_ms: int | None = None
    recovered: bool = True

    @property
    def cause(self) -> SlowCause:
        return "input" if self.excess_input_us > self.excess_busy_us else "compute"


@dataclass(slots=True)
class StragglerJudge:
    """One generation's. ``ranks``: how many there are; nothing is judged before all have been heard of."""

    ranks: int
    slowdown: float
    windows: int
    _begin: dict[int, Pace] = field(default_factory=dict)
    _last: dict[int, Pace] = field(default_factory=dict)
    _begin_ms: int = 0
    _tracks: dict[int, _Track] = field(default_factory=dict)

    def see(self, paces: Mapping[str, Iterable[Pace]], now_ms: int) -> tuple[Slow, ...]:
        """``paces``: of each node's ranks, the newest. Answers new verdicts, in the order of ranks."""
        nodes = {p.rank: node_id for node_id, of_node in paces.items() for p in of_node}
        newest = {p.rank: p for of_node in paces.values() for p in of_node}
        if len(newest) < max(2, self.ranks):
            return ()
        if newest.keys() != self._begin.keys() or any(_went_back(self._last[r], p) for r, p in newest.items()):
            self._open(newest, now_ms)
            return ()
        self._last = newest
        advanced = all(p.steps - self._begin[r].steps >= WINDOW_STEPS for r, p in newest.items())
        if not advanced or now_ms - self._begin_ms < WINDOW_MS:
            return ()
        self._judge(newest)
        found = self._verdicts(nodes, now_ms)
        self._open(newest, now_ms)
        return found

    def _open(self, paces: dict[int, Pace], now_ms: int) -> None:
        self._begin, self._last, self._begin_ms = dict(paces), dict(paces), now_ms

    def _judge(self, paces: Mapping[int, Pace]) -> None:
        """Closes a window: who was slow in it."""
        busy = {r: _per_step(self._begin[r], p, p.busy_us - self._begin[r].busy_us) for r, p in paces.items()}
        data = {r: _per_step(self._begin[r], p, p.input_us - self._begin[r].input_us) for r, p in paces.items()}
        work = {r: busy[r] + data[r] for r in paces}
        medians = (_Others(work), _Others(busy), _Others(data))
        for rank in sorted(paces):
            track = self._tracks.setdefault(rank, _Track())
            usual, usual_busy, usual_data = (m.median_without(rank) for m in medians)
            track.work_us, track.usual_us = work[rank], usual
            least = max(LEAST_US, LEAST_SHARE * usual)
            if work[rank] < self.slowdown * usual or work[rank] - usual < least:
                track.streak, track.excess_busy_us, track.excess_input_us = 0, 0.0, 0.0
                track.recovered = True
                continue
            track.streak += 1
            track.excess_busy_us += busy[rank] - usual_busy
            track.excess_input_us += data[rank] - usual_data

    def _verdicts(self, nodes: Mapping[int, str], now_ms: int) -> tuple[Slow, ...]:
        slow = [r for r, t in sorted(self._tracks.items()) if t.streak >= self.windows]
        due = [r for r in slow if self._may_tell(self._tracks[r], now_ms)]
        found: list[Slow] = []
        for node_id in sorted({nodes[r] for r in due}):
            on_node = [r for r, n in nodes.items() if n == node_id]
            mine = [r for r in due if nodes[r] == node_id]
            causes = {self._tracks[r].cause for r in on_node}
            whole = len(on_node) > 1 and all(r in slow for r in on_node) and len(causes) == 1
            found += [self._slow(node_id, None, on_node)] if whole else [self._slow(node_id, r, [r]) for r in mine]
            for rank in on_node if whole else mine:
                track = self._tracks[rank]
                track.told_ms, track.recovered = now_ms, False
        return tuple(sorted(found, key=lambda s: (-1 if s.rank is None else s.rank, s.node_id)))

    def _may_tell(self, track: _Track, now_ms: int) -> bool:
        return track.told_ms is None or (track.recovered and now_ms - track.told_ms >= AGAIN_MS)

    def _slow(self, node_id: str, rank: int | None, ranks: list[int]) -> Slow:
        tracks = [self._tracks[r] for r in ranks]
        work, usual = median(t.work_us for t in tracks), median(t.usual_us for t in tracks)
        cause = tracks[0].cause
        who = f"rank {rank} on {node_id}" if rank is not None else f"each of the {len(ranks)} ranks of node {node_id}"
        times = f", {work / usual:.1f} times as long" if usual > 0 else ""
        what = "waiting for its data" if cause == "input" else "computing"
        detail = (
            f"{who} works {work / 1000:.1f} ms a step, the others {usual / 1000:.1f} ms{times}, "
            f"in {min(t.streak for t in tracks)} windows in a row: it spends more on {what}"
        )
        return Slow(node_id=node_id, rank=rank, cause=cause, work_us=round(work), usual_us=round(usual), detail=detail)


class _Others:
    """Medians of all values but one, without sorting for each."""

    def __init__(self, values: Mapping[int, float]) -> None:
        order = sorted(values, key=lambda r: (values[r], r))
        self._place = {r: i for i, r in enumerate(order)}
        self._sorted = [values[r] for r in order]

    def median_without(self, rank: int) -> float:
        gone, n = self._place[rank], len(self._sorted) - 1

        def at(i: int) -> float:
            return self._sorted[i if i < gone else i + 1]

        return at(n // 2) if n % 2 else (at(n // 2 - 1) + at(n // 2)) / 2


def _went_back(before: Pace, now: Pace) -> bool:
    return now.steps < before.steps or now.busy_us < before.busy_us or now.input_us < before.input_us


def _per_step(before: Pace, now: Pace, spent_us: int) -> float:
    return spent_us / (now.steps - before.steps)
