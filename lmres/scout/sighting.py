"""What was seen of a node's workers at one moment, after somebody's alarm: the records that localization is made from.

Each agent looks at its own workers only, from outside (their progress pages, ``/proc``, stacks written by a signal
handler in C), and tells all of it at once. Nothing here is sent while training goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["start", "user", "forward", "backward", "optimizer", "collective", "loader", "checkpoint_io", "end"]
PHASES: tuple[Phase, ...] = (
    "start",
    "user",
    "forward",
    "backward",
    "optimizer",
    "collective",
    "loader",
    "checkpoint_io",
    "end",
)

MAX_RECENT = 16
MAX_STACK_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMark:
    """One collective as a rank entered it. ``number`` counts the operations of its group from 1; a send or receive has
    0. ``shape`` is text like ``float32[1024, 16]``, empty where there is no tensor; ``step``: completed steps at that
    moment."""

    number: int
    op: str
    shape: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSight:
    """A process group as one rank has used it. ``name`` is equal on all its members; ``ranks``: global ranks, empty
    where not known. ``entered`` and ``left``: operations begun, and known to be over. ``recent``: oldest first."""

    name: str
    ranks: tuple[int, ...]
    entered: int
    left: int
    recent: tuple[OpMark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSight:
    """``quiet_ms``: since anything was last noted of it; ``phase_ms``: since its phase began. ``state``: as in
    ``/proc/PID/stat`` (R, S, D, T, t, Z; empty: not known). ``stack``: its main thread, outermost frame first.
    ``blind``: why its page says nothing; then only ``state`` and ``stack`` count. ``timeout_ms``: how long it may be
    quiet in its phase; 0 where not known. ``phase``: one of ``PHASES``, or one that only a newer version knows."""

    rank: int
    local_rank: int
    pid: int
    step: int
    phase: str
    phase_ms: int
    quiet_ms: int
    state: str = ""
    groups: tuple[GroupSight, ...] = ()
    stack: tuple[str, ...] = ()
    blind: str = ""
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Of one node. ``alarm``: a worker here has been quiet for longer than ``timeout_ms``, else this is an answer to
    another's alarm. ``number`` rises with each one of a generation; the newest counts. ``auto``: nobody has set how
    long a worker may be quiet."""

    generation: int
    node_id: str
    incarnation: str
    number: int
    alarm: bool
    timeout_ms: int
    workers: tuple[WorkerSight, ...] = ()
    auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a rank has spent since its generation began, microseconds, and in how many steps. Waiting for others is in
    ``waiting_us``, not in ``busy_us`` (all that is neither waiting nor input nor files)."""

    rank: int
    steps: int
    busy_us: int
    input_us: int
    waiting_us: int
