"""Workers stand still together, at one step whose state is whole everywhere, before a plan that nothing forces.

When a node is to be replaced though nothing has failed (an operator drains it, its host is unfit), a group that is
simply stopped loses the step that it is in, or more where states are captured seldom. So first all workers are asked to
stop at the same boundary, in two moves, and nobody leads:

1. Each agent asks its workers to stand still at their next boundary, *then* reads how many steps they have completed:
   none of them can come further than one step beyond that without seeing the request. It tells that (``reach``).
2. When all have told, the largest of these is a step that every worker can still stop at: those that stand before it go
   on, and all capture there, whatever their interval, seal, and stand still until the plan stops them.

The wait is bounded, and ends at once where a worker can not take part: then the plan comes as it would have anyway. A
wish that is withdrawn lets the workers go on.
"""

from __future__ import annotations

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Paused, View

NEXT_BOUNDARY = 1
PAUSE_MS = 5_000
"""A group of quick steps is given so long; one of slow steps ``PAUSE_STEPS`` of them, but no longer than the last."""
PAUSE_STEPS = 3
MAX_PAUSE_MS = 120_000


def allowed_ms(generation_ms: int, steps: int) -> int:
    """How long to wait for the workers to stand still. ``steps``: made in the ``generation_ms`` of this generation."""
    step_ms = generation_ms // steps if steps > 0 else 0
    return min(max(PAUSE_MS, PAUSE_STEPS * step_ms), MAX_PAUSE_MS)


def target(view: View, head: Plan) -> int:
    """The step at whose boundary all are to stand still; the next one until all have told how far they may come."""
    told = [_told(view, head, n) for n in _training(view, head)]
    reaches = [p.reach for p in told if p is not None]
    return max(reaches) if reaches and len(reaches) == len(told) else NEXT_BOUNDARY


def is_possible(view: View, head: Plan) -> bool:
    """Whether there are workers, and none of which it is said that they can not stand still."""
    told = (_told(view, head, n) for n in _training(view, head))
    return view.formed(head.generation) is not None and not any(p is not None and p.problem for p in told)


def moving(view: View, head: Plan) -> tuple[str, ...]:
    """Active nodes whose workers do not all stand at the target yet."""
    step = target(view, head)
    names = []
    for node_id in _training(view, head):
        told = _told(view, head, node_id)
        if told is None or told.step != step:
            names.append(node_id)
    return tuple(names)


def _training(view: View, head: Plan) -> tuple[str, ...]:
    """Those that still have workers."""
    done = view.done(head.generation)
    return tuple(
        n.node_id
        for n in head.active
        if view.is_live(n.node_id, n.incarnation)
        and not (n.node_id in done and done[n.node_id].incarnation == n.incarnation)
    )


def _told(view: View, head: Plan, node_id: str) -> Paused | None:
    told = view.paused(head.generation).get(node_id)
    member = view.member(node_id)
    return told if told is not None and member is not None and told.incarnation == member.incarnation else None
