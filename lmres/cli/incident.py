"""One recovery as people ask for it: what failed, who saw it, what was decided, how long it took.

The same shape is filled from a run's records (``incidents_of_run``) and from its agents' events
(``incidents_of_events``); what a source does not tell is None.
"""

from __future__ import annotations

from dataclasses import dataclass

PENDING = "pending"
"""The action of an incident that has no plan yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """``message`` and ``last_lines`` are the program's own output."""

    type: str
    message: str
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A failure as it was seen. ``first``: the plan takes it for the first cause.

    ``exit_status`` is negative for a signal. ``at_s``: seconds after the earliest evidence, by a clock of the
    witness's host; None where clocks can not be compared.
    """

    reporter: str
    weight: str
    failure_class: str
    headline: str
    node_id: str | None
    rank: int | None
    host: str | None
    pid: int | None
    exit_status: int | None
    step: int | None
    exception: Failure | None
    first: bool = False
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    """What a worker was doing when an alarm was raised. ``last``: the collective that it entered last, as text.

    ``state`` as in ``/proc/PID/stat``; ``stack``: its main thread, outermost frame first.
    """

    rank: int
    node_id: str
    step: int | None
    phase: str
    phase_s: float | None
    state: str
    last: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Who holds a slot before and after. ``before`` is None where the earlier plan is not known."""

    slot: int
    before: str | None
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    node_id: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePhases:
    """``phases``: name to seconds, as in ``recovery_completed``."""

    node_id: str
    phases: dict[str, float | None]
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """``id`` is the generation that the plan began, or is to begin. ``total_s``: of the slowest node.

    ``quarantined`` are the nodes that this plan set aside. ``charged`` and ``dismissed`` are None where unknown.
    """

    id: int
    action: str
    failure_class: str
    verdict: str | None
    cause: str
    reason: str
    plan_id: str | None
    plan_at_s: float | None
    total_s: float | None
    evidence: tuple[Witness, ...]
    moves: tuple[Move, ...]
    standby: tuple[str, ...]
    quarantined: tuple[SetAside, ...]
    charged: tuple[str, ...] | None
    dismissed: dict[str, str] | None
    exit_code: int | None
    phases: tuple[NodePhases, ...]
    workers: tuple[SeenWorker, ...] = ()


def slowest(phases: tuple[NodePhases, ...]) -> float | None:
    """Training goes on when the last node does."""
    return max((t for p in phases if (t := p.phases.get("total_s")) is not None), default=None)
