"""From what the vaults have found to differ (``lmres.gemini.certify``) to evidence: who, and what is to be done. Pure.

======= ============================================================ =================================================
check   what was found                                               what follows
======= ============================================================ =================================================
state   parameters or optimizer state differ between equals          back to the newest state whose equals agree
replay  a part of the model, computed twice, differs between equals  back to the newest state that replay certifies
once    it did not come out the same twice, and then did             told; nobody is accused
again   the same steps were made again, and now all agree: those who that node is replaced if a standby is there
        had something else the first time were wrong
======= ============================================================ =================================================

With a majority the node is replaced too; without, nobody is struck or put aside. But wrong computing does not go away
when the steps are made again, so where two differ in a replay a standby takes the higher slot of the two, as a third
opinion: if they differ again the one that stayed is wrong, and if the part passes twice (``cleared``) the other was.
Where the policy says ``report``, all of it is only told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmres.rendezvous.plan import ActiveNode, Cause, Plan
from lmres.rendezvous.state import Member
from lmres.scout.consensus import Opinion, judge, ranks
from lmres.scout.localize import Suspect


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One piece of evidence."""

    cause: Cause
    reaction: Literal["recover", "replace", "report"]
    evict: bool = False
    attributed: bool = False
    trusted: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swap:
    """A plan has given one slot to another node, because two differed. ``was``: the node that held it."""

    slot: int
    was: ActiveNode


def charges(
    found: Mapping[str, Any],
    *,
    plan: Plan,
    before: Plan | None,
    then: Plan | None,
    member: Callable[[str], Member | None],
    me: Member,
    local_world_size: int,
    replace: bool,
) -> tuple[Charge, ...]:
    """``found``: the fields of the vault's event. ``plan``: of the generation that it is about, ``before``: the one
    before; ``then``: of the one in which it was first seen (``again``). ``replace``: the policy's action."""
    check, step = found["check"], int(found["step"])
    trusted = _trusted(found)
    what = _what(found)
    if check == "again":
        wrong = tuple(found["ranks"])
        detail = (
            f"had other parameters or optimizer state than {_right(found, wrong)}; the same steps were made again, and"
            " all came to what the others had"
        )
        place = then if then is not None else plan
        reaction: Literal["replace", "report"] = "replace" if replace else "report"
        return tuple(
            Charge(
                cause=_cause(rank, place, member, local_world_size, detail, step),
                reaction=reaction,
                attributed=True,
            )
            for rank in _one_per_node(wrong, place, local_world_size)
            if place.active[rank // local_world_size] in plan.active  # who has gone meanwhile can not be replaced
        )
    if check == "once":
        detail = f"{ranks(found['ranks'])} did not come to the same twice in {what}, and then did: nobody is accused"
        return (Charge(cause=_nobody(me, detail, step), reaction="report"),)
    swap = _swap(plan, before)
    if check == "cleared":
        return (_outgoing(swap, member, local_world_size, what, step, replace),) if swap is not None else ()
    opinion = _spoilt(found) or judge(found["groups"])
    if check == "replay" and not opinion.attributed and swap is not None:
        opinion = _third(found["groups"], swap, local_world_size) or opinion
    doubt = _doubt(found, trusted)
    if not opinion.attributed:
        sides = " against ".join(ranks(group) for group in found["groups"])
        detail = f"{sides} in {what}, after step {step}: nobody can tell who is wrong{doubt}"
        two = check == "replay" and replace
        suspects = tuple(
            Suspect(node_id=plan.active[rank // local_world_size].node_id, rank=rank)
            for group in found["groups"]
            for rank in group
            if two and rank // local_world_size < len(plan.active)
        )
        return (
            Charge(
                cause=_nobody(me, detail, step, suspects),
                reaction="recover" if replace else "report",
                evict=two,
                trusted=trusted,
            ),
        )
    detail = f"differs from {ranks(opinion.right)} in {what}{doubt}"
    return tuple(
        Charge(
            cause=_cause(rank, plan, member, local_world_size, detail, step),
            reaction="recover" if replace else "report",
            evict=replace,
            attributed=True,
            trusted=trusted,
        )
        for rank in _one_per_node(opinion.wrong, plan, local_world_size)
    )


def _swap(plan: Plan, before: Plan | None) -> _Swap | None:
    if before is None or plan.failure_class != "silent_corruption" or plan.verdict != "inconclusive":
        return None
    changed = [(old.slot, old) for old, new in zip(before.active, plan.active, strict=False) if old != new]
    return _Swap(slot=changed[0][0], was=changed[0][1]) if len(changed) == 1 else None


def _third(groups: Any, swap: _Swap, local_world_size: int) -> Opinion | None:
    """Two differ again, though one of them is another node now: the one that stayed is wrong."""
    sides = [tuple(group) for group in groups]
    new = [side for side in sides if any(rank // local_world_size == swap.slot for rank in side)]
    stayed = [side for side in sides if side not in new]
    return Opinion(wrong=stayed[0], right=new[0]) if len(new) == 1 and len(stayed) == 1 else None


def _outgoing(
    swap: _Swap, member: Callable[[str], Member | None], local_world_size: int, what: str, step: int, replace: bool
) -> Charge:
    known = member(swap.was.node_id)
    cause = Cause(
        failure_class="silent_corruption",
        node_id=swap.was.node_id,
        incarnation=swap.was.incarnation,
        host=known.host if known is not None else "unknown",
        detail=f"differed in {what}; with another node in slot {swap.slot} there is no difference any more",
        rank=swap.slot * local_world_size,
        local_rank=0,
        step=step,
    )
    return Charge(cause=cause, reaction="replace" if replace else "report", attributed=True)


def _spoilt(found: Mapping[str, Any]) -> Opinion | None:
    """Not finite where its equals are: no majority is needed for that."""
    wrong = tuple(found["ranks"]) if found["check"] == "state" else ()
    right = tuple(sorted(rank for group in found["groups"] for rank in group if rank not in wrong))
    return Opinion(wrong=wrong, right=right) if wrong and right else None


def _trusted(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """(0, 0): the run begins again, since nothing that was captured can be trusted. None: nothing is known to be good,
    and too much would be lost by beginning again."""
    said = found.get("trusted")
    if said is not None:
        return int(said[0]), int(said[1])
    return (0, 0) if found.get("from_start") else None


def _what(found: Mapping[str, Any]) -> str:
    if found["check"] in ("state", "again"):
        return "parameters, which are not finite" if found["ranks"] else "parameters or optimizer state"
    return f"what {found['what'].partition('|')[0]} gives for the same inputs"


def _doubt(found: Mapping[str, Any], trusted: tuple[int, int] | None) -> str:
    if found["check"] != "replay" or trusted is not None:
        return ""
    return "; no state here is certified by replay: the newest is restored, and may hold what was computed wrongly"


def _right(found: Mapping[str, Any], wrong: tuple[int, ...]) -> str:
    return ranks(sorted(rank for group in found["groups"] for rank in group if rank not in wrong))


def _one_per_node(wrong: tuple[int, ...], plan: Plan, local_world_size: int) -> list[int]:
    first: dict[int, int] = {}
    for rank in sorted(wrong):
        slot = rank // local_world_size
        if slot < len(plan.active):
            first.setdefault(slot, rank)
    return list(first.values())


def _cause(
    rank: int, plan: Plan, member: Callable[[str], Member | None], local_world_size: int, detail: str, step: int
) -> Cause:
    node = plan.active[rank // local_world_size]
    known = member(node.node_id)
    return Cause(
        failure_class="silent_corruption",
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=known.host if known is not None else "unknown",
        detail=detail,
        rank=rank,
        local_rank=rank % local_world_size,
        step=step,
    )


def _nobody(me: Member, detail: str, step: int, suspects: tuple[Suspect, ...] = ()) -> Cause:
    """``suspects``: between whom it is, where a third opinion is wanted."""
    return Cause(
        failure_class="silent_corruption",
        node_id="",
        incarnation="",
        host=me.host,
        detail=detail,
        step=step,
        suspects=suspects,
    )
