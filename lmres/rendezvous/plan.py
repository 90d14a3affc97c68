"""The recovery plan: the one record that says who does what in a generation.

A generation has exactly one plan, written once with a compare-and-set; generations rise by one. Slots are the group
ranks: they are stable, and a replacement inherits the slot of the node it replaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lmres.gemini.inventory import Doubt
from lmres.scout.localize import Suspect

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Action = Literal["start", "restart", "replace", "shrink", "stop"]


def plain_text(text: str) -> str:
    """Without control characters: a program's words must not steer the terminal or the log of who reads them."""
    return _CONTROL.sub(" ", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionInfo:
    type_name: str
    message: str
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first cause of a failure.

    ``exit_status`` as in ``Popen.returncode``: negative for a signal. ``step`` is the number of optimizer steps
    completed by that rank, None when unknown. ``rank`` is None when a whole node is meant. ``detect_ms``: from the
    failure to its witness's notice, as far as the witness can tell. ``suspects``: the ranks that ``detail`` names,
    where all ranks were compared. ``node_id`` is empty where no node is named.
    """

    failure_class: str
    node_id: str
    incarnation: str
    host: str
    detail: str
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    exit_status: int | None = None
    exception: ExceptionInfo | None = None
    step: int | None = None
    detect_ms: int | None = None
    suspects: tuple[Suspect, ...] = ()

    def headline(self) -> str:
        """One line: who, where, what."""
        if not self.node_id or self.suspects:  # the detail names them
            return plain_text(self.detail)
        who = f"rank {self.rank} on {self.node_id}" if self.rank is not None else f"node {self.node_id}"
        step = f" after step {self.step}" if self.step is not None else ""
        return plain_text(f"{who} (host {self.host}): {self.detail}{step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveNode:
    slot: int
    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """``generation`` is the plan that put the node aside."""

    node_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A process fault charged to a node. ``at_run_ms`` is the run's own clock: time spent in generations so far."""

    node_id: str
    at_run_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Streak:
    """How often the same failure at the same step has come back, generation after generation.

    A run that has come further in between starts anew: the plan resumes at a later step than the one before.
    """

    signature: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every agent does in ``generation``.

    ``charged``: nodes whose agents spend one of torch's restarts, because a worker of theirs was at fault.
    ``dismissed``: node id to reason; these agents end with exit code 1.
    ``exit_code`` and ``cause`` are set for ``stop``; ``cause`` also for the recoveries.

    All ranks restore the image of ``recovery_step`` and ``recovery_origin`` (0, 0: none), each slot from its
    ``recovery_source``. Images captured now bear ``origin``. It rises with the generation, and is higher than that
    where images of an earlier run with this id were found, so that the two can never be taken for each other.
    ``doubts``: which states must not be restored by this plan or a later one; files of them may still be there.
    """

    plan_id: str
    generation: int
    from_generation: int
    action: Action
    failure_class: str
    active: tuple[ActiveNode, ...]
    standby: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    reason: str
    recovery_step: int = 0
    recovery_origin: int = 0
    recovery_source: dict[str, str]
    trust: str = "none"
    verdict: Literal["attributed", "inconclusive"] = "attributed"
    cause: Cause | None = None
    charged: tuple[str, ...] = ()
    dismissed: dict[str, str]
    strikes: tuple[Strike, ...] = ()
    streak: Streak = Streak()
    run_ms: int = 0
    origin: int = 0
    exit_code: int | None = None
    doubts: tuple[Doubt, ...] = ()

    def __post_init__(self) -> None:
        slots = [s.slot for s in self.active]
        if not slots:
            raise ValueError(f"plan {self.generation}: has no active node")
        if slots != list(range(len(slots))):
            raise ValueError(f"plan {self.generation}: slots must be 0 to {len(slots) - 1} in order, found {slots}")
        if len({s.node_id for s in self.active}) != len(slots):
            raise ValueError(f"plan {self.generation}: a node holds two slots")
        if self.generation != self.from_generation + 1:
            raise ValueError(f"plan {self.generation}: must follow generation {self.generation - 1}")

    def slot_of(self, node_id: str, incarnation: str) -> int | None:
        for node in self.active:
            if node.node_id == node_id and node.incarnation == incarnation:
                return node.slot
        return None

    def active_map(self) -> dict[str, str]:
        return {str(n.slot): n.node_id for n in self.active}
