"""Who is missing from a group, and who takes over: slots that can not, or should not, be kept by their nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from lmres.policy import Recovery
from lmres.rendezvous import blame
from lmres.rendezvous.plan import ActiveNode, Cause, Plan, Strike
from lmres.rendezvous.state import Member, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """A slot that its node can not (hard), or should not (soft), keep."""

    node: ActiveNode
    reason: str
    hard: bool
    quarantine: bool = False
    dismissed: bool = False
    since_revision: int = 0
    failure_class: str = "drain"
    cause: Cause | None = None

    @property
    def wanted(self) -> bool:
        """Somebody asked for it: the operator, or whoever ended the agent as planned."""
        return self.failure_class == "drain"


def merged(found: Iterable[Vacancy]) -> list[Vacancy]:
    """One for each slot, so that one standby takes it: the hard one of several, else the first, with what follows from
    any of them."""
    slots: dict[int, Vacancy] = {}
    for vacancy in found:
        other = slots.get(vacancy.node.slot)
        if other is None:
            slots[vacancy.node.slot] = vacancy
            continue
        first, second = (vacancy, other) if vacancy.hard and not other.hard else (other, vacancy)
        slots[vacancy.node.slot] = replace(
            first,
            quarantine=first.quarantine or second.quarantine,
            dismissed=first.dismissed or second.dismissed,
            since_revision=max(first.since_revision, second.since_revision),
            cause=first.cause if first.cause is not None else second.cause,
        )
    return list(slots.values())


def missing(view: View, head: Plan, witnesses: list[blame.Witness]) -> list[Vacancy]:
    """Slots whose node has gone, is unfit, or is to be drained or replaced."""
    unfit = {w.cause.node_id: w.cause for w in witnesses if not w.fit}
    replaced = to_be_replaced(view, head)
    swapped = to_be_swapped(view, head)
    found = []
    for node in head.active:
        hold = view.hold(node.node_id)
        lost = blame.gone_witness(view, node)
        if lost is not None:
            found.append(
                Vacancy(
                    node=node,
                    reason=f"{node.node_id} is gone ({lost.cause.detail})",
                    hard=True,
                    since_revision=lost.revision,
                )
            )
        elif node.node_id in unfit:
            reason = f"{node.node_id} is unfit ({unfit[node.node_id].detail})"
            found.append(Vacancy(node=node, reason=reason, hard=True, quarantine=True))
        elif hold is not None and hold.kind == "drain":
            reason = f"{node.node_id} is drained by the operator ({hold.reason})"
            found.append(Vacancy(node=node, reason=reason, hard=False, quarantine=True))
        elif (why := view.unfit_reason(node.node_id)) is not None:
            reason = f"{node.node_id} is unhealthy ({why})"
            found.append(Vacancy(node=node, reason=reason, hard=False, quarantine=True, failure_class="node_unhealthy"))
        elif node.node_id in replaced:
            cause = replaced[node.node_id]
            reason = f"{node.node_id} is replaced ({cause.headline()})"
            found.append(
                Vacancy(
                    node=node,
                    reason=reason,
                    hard=False,
                    quarantine=True,
                    failure_class=cause.failure_class,
                    cause=cause,
                )
            )
        elif node.node_id in swapped:
            reason = "a third opinion"
            found.append(Vacancy(node=node, reason=reason, hard=False, failure_class="silent_corruption"))
    return found


def to_be_swapped(view: View, head: Plan) -> dict[str, Cause]:
    """Where nobody can tell which of two is wrong, a standby in place of the one in the higher slot is a third opinion.
    It is not put aside: it may be the one that is right."""
    slots = {n.node_id: n.slot for n in head.active}
    found = {}
    for e in view.evidence(head.generation):
        nodes = {s.node_id for s in e.cause.suspects} & slots.keys()
        if e.evict and not e.attributed and len(nodes) > 1:
            found[max(nodes, key=slots.__getitem__)] = e.cause
    return found


def to_be_replaced(view: View, head: Plan) -> dict[str, Cause]:
    """Nodes that evidence of this generation asks to put aside, with why."""
    return {
        e.cause.node_id: e.cause
        for e in view.evidence(head.generation)
        if e.attributed and (e.reaction == "replace" or e.evict)
    }


def struck(
    view: View,
    head: Plan,
    charged: ActiveNode | None,
    strikes: tuple[Strike, ...],
    run_ms: int,
    policy: Recovery,
) -> list[Vacancy]:
    """The charged node leaves if torch's budget there is spent, or if it has struck too often."""
    if charged is None:
        return []
    ready = view.ready(head.generation).get(charged.node_id)
    if ready is not None and ready.restarts_left == 0:
        reason = f"{charged.node_id} has no restarts left (--max-restarts)"
        return [Vacancy(node=charged, reason=reason, hard=True, dismissed=True)]
    count = sum(s.node_id == charged.node_id for s in strikes)
    if count >= policy.node_strikes:
        reason = f"{charged.node_id} has had {count} process faults (recovery.node_strikes is {policy.node_strikes})"
        return [Vacancy(node=charged, reason=reason, hard=False, quarantine=True)]
    return []


def candidates(view: View, silent: Collection[str]) -> list[Member]:
    """Fit standbys, those heard from lately first, then in the order of registration."""
    head = view.head()
    accused = to_be_replaced(view, head) if head is not None else {}
    fit = (m for m in view.standbys() if view.unfit_reason(m.node_id) is None and m.node_id not in accused)
    return sorted(fit, key=lambda m: m.node_id in silent)


def pick(view: View, pool: list[Member], vacancy: Vacancy, head: Plan) -> Member | None:
    """The returning node itself if it is there, else the first candidate whose name holds no other slot.

    What took the old node along may have hurt its failure domain, so candidates of other domains come first.
    """
    taken = {n.node_id for n in head.active if n.slot != vacancy.node.slot}
    usable = [m for m in pool if m.node_id not in taken]
    for member in usable:
        if member.node_id == vacancy.node.node_id and not vacancy.quarantine:
            return member
    usable = [m for m in usable if not (m.node_id == vacancy.node.node_id and vacancy.quarantine)]
    previous = view.member(vacancy.node.node_id)
    domain = previous.failure_domain if previous is not None else None
    return min(usable, key=lambda m: m.failure_domain == domain, default=None)
