"""The incidents of a run, from its records in the store. Pure."""

from __future__ import annotations

from dataclasses import replace

from lmres.cli.incident import PENDING, Failure, Incident, Move, NodePhases, SeenWorker, SetAside, Witness, slowest
from lmres.cli.run_view import is_over, next_decision, recoveries
from lmres.rendezvous.decide import Commit, Finish, Wait
from lmres.rendezvous.notes import gone_cause
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.state import Evidence, Gone, View
from lmres.scout.sighting import WorkerSight

MAX_MS = 10**12
"""What a store holds may be any number."""


def incidents_of_run(view: View) -> list[Incident]:
    """Oldest first. The last one has no plan while it is still being decided."""
    plans = {p.generation: p for p in view.plans_after(0)}
    found = [_of_plan(view, p, plans.get(p.from_generation)) for p in plans.values() if p.from_generation > 0]
    pending = _pending(view)
    return found if pending is None else [*found, pending]


def _of_plan(view: View, plan: Plan, before: Plan | None) -> Incident:
    phases = tuple(NodePhases(node_id=r.node_id, phases=dict(r.phases)) for r in recoveries(view, plan.generation))
    by_slot = {n.slot: n.node_id for n in before.active} if before is not None else {}
    return Incident(
        id=plan.generation,
        action=plan.action,
        failure_class=plan.failure_class,
        verdict=plan.verdict,
        cause=plan.cause.headline() if plan.cause is not None else plan.reason,
        reason=plan.reason,
        plan_id=plan.plan_id,
        plan_at_s=None,
        total_s=slowest(phases),
        evidence=_evidence(view, before, plan.cause, until=view.mod_revision(view.keys.plan(plan.generation)))
        if before is not None
        else (),
        moves=tuple(Move(slot=n.slot, before=by_slot.get(n.slot), after=n.node_id) for n in plan.active),
        standby=plan.standby,
        quarantined=tuple(
            SetAside(node_id=q.node_id, reason=q.reason) for q in plan.quarantined if q.generation == plan.generation
        ),
        charged=plan.charged,
        dismissed=plan.dismissed,
        exit_code=plan.exit_code,
        phases=phases,
        workers=_workers(view, before.generation) if before is not None else (),
    )


def _pending(view: View) -> Incident | None:
    """What has happened in the newest generation and is not answered yet."""
    head = view.head()
    if head is None or is_over(view):
        return None
    decision = next_decision(view)
    match decision:
        case Finish():
            return None
        case Wait():
            if not decision.for_standby and not view.evidence(head.generation):
                return None
            cause, reason = None, decision.reason
        case Commit():
            cause, reason = decision.plan.cause, f"being decided: {decision.plan.reason}"
    evidence = _evidence(view, head, cause, until=view.revision)
    first = next((w for w in evidence if w.first), evidence[0] if evidence else None)
    return Incident(
        id=head.generation + 1,
        action=PENDING,
        failure_class=first.failure_class if first is not None else "drain",
        verdict=None,
        cause=first.headline if first is not None else reason,
        reason=reason,
        plan_id=None,
        plan_at_s=None,
        total_s=None,
        evidence=evidence,
        moves=(),
        standby=(),
        quarantined=(),
        charged=None,
        dismissed=None,
        exit_code=None,
        phases=(),
        workers=_workers(view, head.generation),
    )


def _workers(view: View, generation: int) -> tuple[SeenWorker, ...]:
    """By rank; empty where nobody has raised an alarm."""
    sights = [(s.node_id, w) for s in view.sightings(generation).values() for w in s.workers]
    return tuple(_seen(node_id, w) for node_id, w in sorted(sights, key=lambda pair: pair[1].rank))


def _seen(node_id: str, sight: WorkerSight) -> SeenWorker:
    newest = max((g for g in sight.groups if g.recent), key=lambda g: g.recent[-1].step, default=None)
    mark = newest.recent[-1] if newest is not None else None
    return SeenWorker(
        rank=sight.rank,
        node_id=node_id,
        step=None if sight.blind else sight.step,
        phase=sight.phase if not sight.blind else "",
        phase_s=None if sight.blind else min(sight.phase_ms, MAX_MS) / 1000,
        state=sight.state,
        last=f"{mark.op} number {mark.number} {mark.shape}".rstrip() if mark is not None else "",
        stack=sight.stack,
    )


def _evidence(view: View, group: Plan, cause: Cause | None, *, until: int) -> tuple[Witness, ...]:
    """Evidence and departures in the generation of ``group``, in order of arrival. ``cause``: the one blamed."""
    found: list[tuple[int, Witness, Evidence | None]] = []
    for stored, e in view.under(f"{view.keys.reg}evidence/{group.generation:08d}/", Evidence):
        if e.generation == group.generation:
            found.append((stored.created, _witness(e.cause, e.reporter, e.weight, first=e.cause == cause), e))
    for node in group.active:
        gone = view.get(view.keys.gone(node.node_id), Gone)
        revision = view.mod_revision(view.keys.gone(node.node_id))
        if gone is None or gone.incarnation != node.incarnation or revision > until:
            continue
        lost = gone_cause(gone, view.member(node.node_id))
        first = cause is not None and cause.rank is None and cause.incarnation == node.incarnation
        found.append((revision, _witness(lost, gone.by, "primary", first=first), None))
    if cause is not None and not any(w.first for _, w, _ in found):
        # Its own record was overwritten since (the node came back and went again); the plan has kept it.
        found.append((until, _witness(cause, "", "primary", first=True), None))
    found.sort(key=lambda item: item[0])
    return _with_times(found)


def _with_times(found: list[tuple[int, Witness, Evidence | None]]) -> tuple[Witness, ...]:
    """Moments of witnesses on the first one's boot: no other clock can be compared with theirs."""
    timed = [e for _, _, e in found if e is not None]
    if not timed:
        return tuple(w for _, w, _ in found)
    boot = timed[0].boot_id
    start = min(e.at_ms for e in timed if e.boot_id == boot)
    return tuple(
        replace(w, at_s=min(e.at_ms - start, MAX_MS) / 1000) if e is not None and boot and e.boot_id == boot else w
        for _, w, e in found
    )


def _witness(cause: Cause, reporter: str, weight: str, *, first: bool) -> Witness:
    e = cause.exception
    return Witness(
        reporter=reporter,
        weight=weight,
        failure_class=cause.failure_class,
        headline=cause.headline(),
        node_id=cause.node_id,
        rank=cause.rank,
        host=cause.host,
        pid=cause.pid,
        exit_status=cause.exit_status,
        step=cause.step,
        exception=None if e is None else Failure(type=e.type_name, message=e.message, last_lines=e.last_lines),
        first=first,
    )
