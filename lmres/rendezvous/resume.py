"""Which state a new generation goes on from, as the records say: the rendezvous side of ``lmres.gemini.restore``.

A plan that starts workers names the step, so whoever makes it must know what every live vault holds *after* the
failure. Therefore each agent freezes its vault as soon as it sees that a plan is coming, and writes what it holds
(``Holdings``); a decision waits for these. What counts is a record of this generation and this incarnation; if the
group has formed, one that was written after that, because before it workers had not yet captured anything.

The wait is bounded: a member that is silent runs into its lease; one that beats and does not tell is left out after
``TELL_MS``. A standby that is merely silent is waited for only if the plan would use it, or else the state were lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lmres.gemini.inventory import Doubt, Holdings, topology_text
from lmres.gemini.restore import Choice, Nothing, Stock, choose
from lmres.policy import Policy
from lmres.rendezvous.plan import ActiveNode, Plan
from lmres.rendezvous.state import Member, RunConfig, View

TELL_MS = 10_000
"""How long a member that beats may take to say what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Whether states are kept in memory. ``replicas`` as in the policy."""

    enabled: bool = False
    replicas: int = 2

    @staticmethod
    def of(policy: Policy | None) -> Checkpointing:
        """Without a policy nothing is attached inside the workers, so there is no state either."""
        if policy is None:
            return Checkpointing()
        wanted = policy.checkpoint.enabled and policy.workers.resume != "none"
        return Checkpointing(enabled=wanted, replicas=policy.checkpoint.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How a plan goes on. ``words`` end its reason. ``origin``: of the images that the new generation will capture.

    ``lost``: it can not go on, ``words`` say why. ``refused``: because what is held is of another kind of group.
    """

    step: int
    from_origin: int
    source: dict[str, str]
    trust: str
    origin: int
    words: str
    lost: bool = False
    refused: bool = False
    doubts: tuple[Doubt, ...] = ()


def told(view: View, generation: int) -> tuple[Holdings, ...]:
    """What the live vaults hold now, by node id."""
    formed = view.mod_revision(view.keys.formed(generation)) if generation else 0
    found = view.holdings()
    return tuple(
        found[m.node_id][1]
        for m in sorted(view.live_members(), key=lambda m: m.node_id)
        if m.node_id in found and _is_fresh(m, *found[m.node_id], generation=generation, formed=formed)
    )


def _is_fresh(member: Member, revision: int, holdings: Holdings, *, generation: int, formed: int) -> bool:
    same = holdings.incarnation == member.incarnation and holdings.generation == generation
    return same and revision > formed


def untold(view: View, head: Plan | None, but: frozenset[str]) -> tuple[str, ...]:
    """The live members, ``but`` these, that have not yet said what they hold."""
    heard = {h.node_id for h in told(view, head.generation if head is not None else 0)} | but
    return tuple(sorted(m.node_id for m in view.live_members() if m.node_id not in heard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What has been told so far, counted up once for all that is asked of it."""

    held: tuple[Holdings, ...]
    stock: Stock

    @staticmethod
    def of(view: View, head: Plan | None) -> Known:
        held = told(view, head.generation if head is not None else 0)
        return Known(held=held, stock=Stock.of(held))


def newest_trusted(view: View, head: Plan) -> tuple[int, int] | None:
    """No state newer than this may be restored, as evidence of this generation says; None: any may."""
    told = [e.trusted for e in view.evidence(head.generation) if e.reaction == "recover" and e.trusted is not None]
    return min(told, default=None)


def doubts_of(head: Plan | None, trusted: tuple[int, int] | None) -> tuple[Doubt, ...]:
    """Those of the newest plan, and what is doubted now: files of such states outlive the plan that passes them over.

    ``trusted``: the newest state of this generation that may be restored.
    """
    if head is None or trusted is None:
        return head.doubts if head is not None else ()
    mine = Doubt(step=trusted[0], origin=trusted[1], until=head.origin)
    return (*(d for d in head.doubts if (d.step, d.origin) < trusted), mine)


def resume(
    view: View,
    config: RunConfig,
    head: Plan | None,
    active: Iterable[ActiveNode],
    known: Known,
    *,
    trusted: tuple[int, int] | None = None,
) -> Resume:
    """From what has been told so far. ``trusted``: the newest state that may be restored, None for any; (0, 0): none
    may, and the run begins again."""
    slots = {n.slot: n.node_id for n in active}
    held, doubts = known.held, doubts_of(head, trusted)
    newest = max((key.origin for key in known.stock.copies), default=0)
    origin = 1 + max(newest, head.origin if head is not None else 0)
    found = choose(
        known.stock,
        slots=slots,
        local_world_size=config.local_world_size,
        topology=topology_text(nodes=len(slots), local_world_size=config.local_world_size),
        banned=frozenset((b.step, b.origin) for b in view.banned()),
        trusted=trusted,
        doubts=doubts,
    )
    silence = _without(view, held)
    match found:
        case Choice():
            return Resume(
                step=found.step,
                from_origin=found.origin,
                source={str(s): name for s, name in found.source.items()},
                trust=found.trust,
                origin=origin,
                words=f"; resumes at {found.reason}{silence}",
                doubts=doubts,
            )
        case Nothing():
            began_again = head is not None and not head.recovery_step and bool(known.stock.copies)
            none_left = began_again and all(any(d.covers(key) for d in doubts) for key in known.stock.copies)
            from_zero = trusted == (0, 0) or none_left
            return replace(_from_nothing(found, head, slots, origin, silence, from_zero=from_zero), doubts=doubts)


def _from_nothing(
    found: Nothing, head: Plan | None, slots: dict[int, str], origin: int, silence: str, *, from_zero: bool
) -> Resume:
    """A new run may begin again over what is left of an earlier one; a run that goes on may not, unless no state is
    trusted (``from_zero``)."""
    was_there = head is not None and not from_zero and (found.lost or head.recovery_step > 0)
    lost = was_there or found.refused
    reason = found.reason if found.lost or not was_there else f"no live vault holds any state ({found.reason})"
    words = f"; begins at step 0: {reason}{silence}"
    if found.refused:
        words = f"{reason}{silence}; start with the old shape, or with another --rdzv-id or durable.directory"
    elif lost:
        words = (
            f"{reason}{silence}; ways out: durable.directory (checkpoint.durable) keeps states on disk, "
            f"and the job can be queued again to start from the program's own checkpoint"
        )
    return Resume(
        step=0,
        from_origin=0,
        source={str(s): "none" for s in slots},
        trust="none",
        origin=origin,
        words=words,
        lost=lost,
        refused=found.refused,
    )


def _without(view: View, held: tuple[Holdings, ...]) -> str:
    missing = sorted({m.node_id for m in view.live_members()} - {h.node_id for h in held})
    return f"; without word from {', '.join(missing)}" if missing else ""
