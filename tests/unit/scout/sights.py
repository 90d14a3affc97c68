"""Sightings in few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmres.scout.sighting import GroupSight, OpMark, Sighting, WorkerSight

TIMEOUT_MS = 3_000
QUIET_MS = 3_100


def marks(count: int, *, per_step: int = 2, shape: str = "float32[8]", last: int = 16) -> tuple[OpMark, ...]:
    """Operations 1 to ``count``, equal for all ranks."""
    found = [
        OpMark(number=n, op="allreduce", shape=shape if n % per_step else "float32[1024]", step=(n - 1) // per_step)
        for n in range(1, count + 1)
    ]
    return tuple(found[-last:])


def group(
    entered: int,
    left: int | None = None,
    *,
    ranks: Sequence[int] = (),
    name: str = "0",
    recent: tuple[OpMark, ...] | None = None,
) -> GroupSight:
    return GroupSight(
        name=name,
        ranks=tuple(ranks),
        entered=entered,
        left=entered if left is None else left,
        recent=marks(entered) if recent is None else recent,
    )


def worker(rank: int, *groups: GroupSight, **fields: Any) -> WorkerSight:
    """Quiet for longer than the timeout; where it has entered what it has not left, it waits."""
    waits = any(g.entered > g.left for g in groups)
    made = WorkerSight(
        rank=rank,
        local_rank=0,
        pid=100 + rank,
        step=5,
        phase="collective" if waits else "user",
        phase_ms=QUIET_MS,
        quiet_ms=QUIET_MS,
        state="S",
        groups=groups,
        timeout_ms=TIMEOUT_MS,
    )
    return replace(made, **fields)


def node(rank: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[rank]


def sights(*workers: WorkerSight) -> list[Sighting]:
    """Each worker on a node of its own: rank 0 on a, rank 1 on b."""
    return [
        Sighting(
            generation=1,
            node_id=node(w.rank),
            incarnation="i",
            number=1,
            alarm=w.quiet_ms >= TIMEOUT_MS,
            timeout_ms=TIMEOUT_MS,
            workers=(w,),
        )
        for w in workers
    ]
