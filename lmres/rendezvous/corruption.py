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

With a majority the node is replaced too; without, nobody is struck or put aside. Where the policy says ``report``, all
of it is only told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.state import Member
from lmres.scout.consensus import judge, ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One piece of evidence."""

    cause: Cause
    reaction: Literal["recover", "replace", "report"]
    evict: bool = False
    attributed: bool = False
    trusted: tuple[int, int] | None = None


def charges(
    found: Mapping[str, Any],
    *,
    plan: Plan,
    then: Plan | None,
    member: Callable[[str], Member | None],
    me: Member,
    local_world_size: int,
    replace: bool,
) -> tuple[Charge, ...]:
    """``found``: the fields of the vault's event. ``plan``: of the generation that it is about; ``then``: of the one in
    which it was first seen (``again``). ``replace``: the policy's action."""
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
    opinion = judge(found["groups"])
    doubt = _doubt(found, trusted)
    if not opinion.attributed:
        sides = " against ".join(ranks(group) for group in found["groups"])
        detail = f"{sides} in {what}, after step {step}: nobody can tell who is wrong{doubt}"
        return (Charge(cause=_nobody(me, detail, step), reaction="recover" if replace else "report", trusted=trusted),)
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


def _trusted(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """(0, 0): the run begins again, since nothing that was captured can be trusted. None: nothing is known to be good,
    and too much would be lost by beginning again."""
    said = found.get("trusted")
    if said is not None:
        return int(said[0]), int(said[1])
    return (0, 0) if found.get("from_start") else None


def _what(found: Mapping[str, Any]) -> str:
    if found["check"] in ("state", "again"):
        return "parameters or optimizer state"
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


def _nobody(me: Member, detail: str, step: int) -> Cause:
    return Cause(
        failure_class="silent_corruption",
        node_id="",
        incarnation="",
        host=me.host,
        detail=detail,
        step=step,
    )
