"""Events that the protocol tells of, from its records."""

from __future__ import annotations

from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.rounds import Note
from lmres.rendezvous.state import Gone, Member


def fault_note(cause: Cause, weight: str, reporter: str, generation: int) -> Note:
    """A ``fault_detected`` event. A broken connection alone names no suspect."""
    suspects = [] if weight == "secondary" else [{"node_id": cause.node_id, "rank": cause.rank}]
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
            "verdict": "inconclusive" if weight == "secondary" else "attributed",
            "evidence": [evidence],
            "detail": cause.headline(),
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
