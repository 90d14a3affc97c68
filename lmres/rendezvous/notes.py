"""Events that the protocol tells of, from its records."""

from __future__ import annotations

from collections.abc import Iterable

from lmres.rendezvous.codec import to_plain
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.rounds import Note
from lmres.rendezvous.state import Gone, Member
from lmres.scout.localize import Localized
from lmres.scout.sighting import Sighting


def fault_note(cause: Cause, weight: str, reporter: str, generation: int, *, attributed: bool = True) -> Note:
    """A ``fault_detected`` event. A broken connection alone names no suspect."""
    nobody = weight == "secondary" or not attributed or not cause.node_id
    suspects = [] if nobody else [{"node_id": cause.node_id, "rank": cause.rank}]
    if cause.suspects:
        suspects = [{"node_id": s.node_id, "rank": s.rank} for s in cause.suspects]
    evidence = {
        "reporter": reporter,
        "weight": weight,
        "host": cause.host,
        "pid": cause.pid,
        "exit_status": cause.exit_status,
        "step": cause.step,
        "exception": None
        if cause.exception is None
        else {
            "type": cause.exception.type_name,
            "message": cause.exception.message,
            "last_lines": list(cause.exception.last_lines),
        },
    }
    return Note(
        event="fault_detected",
        fields={
            "generation": generation,
            "failure_class": cause.failure_class,
            "suspects": suspects,
            "verdict": "inconclusive" if weight == "secondary" or not attributed else "attributed",
            "evidence": [evidence],
            "detail": cause.headline(),
        },
    )


def look_note(found: Localized, sightings: Iterable[Sighting], generation: int, headline: str) -> Note:
    """A ``fault_detected`` event from what was seen of all workers, with their stacks."""
    return Note(
        event="fault_detected",
        fields={
            "generation": generation,
            "failure_class": found.failure_class,
            "suspects": [{"node_id": s.node_id, "rank": s.rank} for s in found.suspects],
            "verdict": found.verdict,
            "evidence": [{"reporter": s.node_id, **to_plain(w)} for s in sightings for w in s.workers],
            "detail": headline,
        },
    )


def unfit_note(member: Member, reason: str, generation: int) -> Note:
    """A ``fault_detected`` event of an active node whose host is unfit."""
    return Note(
        event="fault_detected",
        fields={
            "generation": generation,
            "failure_class": "node_unhealthy",
            "suspects": [{"node_id": member.node_id, "rank": None}],
            "verdict": "attributed",
            "evidence": [{"reporter": member.node_id, "weight": "primary", "host": member.host}],
            "detail": f"node {member.node_id} (host {member.host}): {reason}",
        },
    )


def plan_note(plan: Plan) -> Note:
    """A ``plan_committed`` event."""
    return Note(
        event="plan_committed",
        fields={
            "generation": plan.generation,
            "plan_id": plan.plan_id,
            "from_generation": plan.from_generation,
            "to_generation": plan.generation,
            "failure_class": plan.failure_class,
            "action": plan.action,
            "active": plan.active_map(),
            "quarantined": [q.node_id for q in plan.quarantined],
            "standby": list(plan.standby),
            "recovery_step": plan.recovery_step,
            "recovery_origin": plan.recovery_origin,
            "recovery_source": plan.recovery_source,
            "trust": plan.trust,
            "charged": list(plan.charged),
            "dismissed": plan.dismissed,
            "exit_code": plan.exit_code,
            "verdict": plan.verdict,
            "reason": plan.reason,
        },
    )


def gone_cause(gone: Gone, member: Member | None) -> Cause:
    """A node's absence as a cause."""
    return Cause(
        failure_class="drain" if gone.planned else "node_lost",
        node_id=gone.node_id,
        incarnation=gone.incarnation,
        host=member.host if member is not None else "unknown",
        detail=gone.reason,
        step=gone.step,
        detect_ms=gone.quiet_ms,
    )
