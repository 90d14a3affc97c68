"""What the workers of a group are doing, asked for when somebody raises an alarm: the rendezvous side of localization.

An agent sees its own workers only. One whose worker makes no progress says so (an alarm); then every active agent tells
what its workers are doing, once, after that alarm; what follows is ``lmres.scout.localize``, a function of these
records. An alarm that ends before the plan is committed is withdrawn, and counts no more. The same is asked when
workers failed as if a peer had gone, because ranks that do not agree about a collective end like that.

The wait is bounded (``LOOK_MS``): whoever does not tell is left out, and is then a rank that nobody has heard of.
"""

from __future__ import annotations

from lmres.rendezvous.blame import Witness
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.state import Evidence, View
from lmres.scout.localize import Localized, localize
from lmres.scout.sighting import Sighting, WorkerSight

LOOK_MS = 2_000


def alarmed(view: View, head: Plan) -> int | None:
    """The revision of the first alarm that stands in this generation; None if none does."""
    revisions = [
        view.mod_revision(view.keys.sighting(head.generation, node_id))
        for node_id, sighting in _of_active(view, head).items()
        if sighting.alarm
    ]
    return min(revisions, default=None)


def is_wanted(view: View, head: Plan) -> bool:
    """Whether an alarm stands or something has failed."""
    return _since(view, head) > 0


def sighted(view: View, head: Plan) -> dict[str, Sighting]:
    """By node id, what has been told since the first alarm, or the first failure.

    What was seen on an earlier occasion does not count: the ranks have moved since.
    """
    since, key = _since(view, head), view.keys.sighting
    return {n: s for n, s in _of_active(view, head).items() if view.mod_revision(key(head.generation, n)) >= since}


def unseen(view: View, head: Plan, done: frozenset[str]) -> tuple[str, ...]:
    """Active nodes that live, still train, and have not told."""
    told = sighted(view, head)
    return tuple(
        n.node_id
        for n in head.active
        if n.node_id not in done and view.is_live(n.node_id, n.incarnation) and n.node_id not in told
    )


def localized(view: View, head: Plan) -> Localized:
    """From what has been told so far."""
    told, done = sighted(view, head), view.done(head.generation)
    config = view.config
    size = config.local_world_size if config is not None else 1
    unheard = {
        n.node_id: tuple(range(n.slot * size, (n.slot + 1) * size))
        for n in head.active
        if n.node_id not in told and n.node_id not in done
    }
    return localize(told.values(), unheard=unheard)


def witness(view: View, head: Plan, found: Localized) -> Witness:
    """The verdict as a witness among others."""
    sights = {w.rank: (s, w) for s in sighted(view, head).values() for w in s.workers}
    alone = found.suspects[0] if found.verdict == "attributed" and len(found.suspects) == 1 else None
    place = sights.get(alone.rank) if alone is not None else None
    node_id = alone.node_id if alone is not None else _common_node(found)
    member = view.member(node_id) if node_id else None
    node = next((n for n in head.active if n.node_id == node_id), None)
    cause = Cause(
        failure_class=found.failure_class,
        node_id=node_id,
        incarnation=node.incarnation if node is not None else "",
        host=member.host if member is not None else "",
        detail=found.detail,
        rank=alone.rank if alone is not None else None,
        local_rank=place[1].local_rank if place is not None else None,
        pid=place[1].pid if place is not None else None,
        step=_step(sights),
        detect_ms=max((w.quiet_ms for _, w in sights.values()), default=None),
        suspects=found.suspects,
    )
    return Witness(
        weight="primary",
        revision=alarmed(view, head) or view.revision,
        cause=cause,
        attributed=found.verdict == "attributed",
    )


def _common_node(found: Localized) -> str:
    nodes = {s.node_id for s in found.suspects}
    return nodes.pop() if len(nodes) == 1 and found.verdict == "attributed" else ""


def _step(sights: dict[int, tuple[Sighting, WorkerSight]]) -> int | None:
    return max((w.step for _, w in sights.values()), default=None)


def _of_active(view: View, head: Plan) -> dict[str, Sighting]:
    """Those whose workers have ended well no longer say anything."""
    told, done = view.sightings(head.generation), view.done(head.generation)
    return {
        n.node_id: told[n.node_id]
        for n in head.active
        if n.node_id in told and told[n.node_id].incarnation == n.incarnation and n.node_id not in done
    }


def _since(view: View, head: Plan) -> int:
    """The revision of the first alarm that stands; without one, that of the first failure."""
    alarm = alarmed(view, head)
    if alarm is not None:
        return alarm
    prefix = f"{view.keys.reg}evidence/{head.generation:08d}/"
    return min((stored.created for stored, e in view.under(prefix, Evidence) if e.reaction == "recover"), default=0)
