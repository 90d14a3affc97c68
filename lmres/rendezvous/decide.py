"""From records to the next plan: pure, the same on every agent, with its reason.

``decide`` is asked after every change. It answers with one of

- ``Wait``: nothing to do, or something is still missing (the reason says what);
- ``Commit``: this plan should be written; ``settle`` says how long to listen for more evidence first;
- ``Finish``: every slot has ended well.

The order of thought: is the run over; has every slot ended well; who is missing from the group (vacancies); who was the
first cause; does the same failure keep coming back; who fills the vacancies. Blame needs a primary witness, or an
ambiguous one after every other active node has been heard from again; a broken connection alone blames nobody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lmres.errors import ExitCode
from lmres.policy import Recovery
from lmres.rendezvous import blame
from lmres.rendezvous.codec import encode
from lmres.rendezvous.plan import (
    Action,
    ActiveNode,
    Cause,
    Plan,
    Quarantined,
    Streak,
    Strike,
)
from lmres.rendezvous.state import Finished, Member, View

Settle = Literal["now", "brief", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What only a local clock can tell, as facts.

    ``unconfirmed``: active nodes not heard from since the evidence came. ``silent``: nodes whose lease is quiet but
    not over. ``late``: active nodes that did not become ready in time. ``generation_ms``: how long the newest
    generation has lasted. ``wait_over``: the wait for a standby has lasted longer than allowed.
    """

    unconfirmed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    generation_ms: int = 0
    wait_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    reason: str
    for_standby: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    plan: Plan
    settle: Settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    record: Finished


Decision: TypeAlias = Wait | Commit | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vacancy:
    """A slot that its node can not (hard), or should not (soft), keep."""

    node: ActiveNode
    reason: str
    hard: bool
    quarantine: bool = False
    dismissed: bool = False
    since_revision: int = 0


def decide(view: View, policy: Recovery, observed: Observed) -> Decision:
    """The next step for these records. Raises nothing; unreadable records count as absent."""
    config, head = view.config, view.head()
    if config is None:
        return Wait(reason="the run has no configuration yet")
    if view.finished is not None:
        return Wait(reason="the run is over")
    stop = view.stop_request()
    if head is None and stop is not None:
        reason = f"stopped by the operator before it started: {stop.reason}"
        code = int(ExitCode.TRAINING_FAILED)
        return Finish(record=Finished(outcome="failed", exit_code=code, reason=reason, generation=0))
    if head is None:
        return _start(view, config.min_nodes)
    if head.action == "stop":
        return Wait(reason=f"the run was stopped: {head.reason}")
    if stop is not None:
        return Commit(
            plan=_stop_plan(
                head, f"stopped by the operator: {stop.reason}", ExitCode.TRAINING_FAILED, None, head.streak
            ),
            settle="now",
        )
    done = view.done(head.generation)
    if all(n.node_id in done and done[n.node_id].incarnation == n.incarnation for n in head.active):
        reason = f"all {len(head.active)} nodes of generation {head.generation} ended with exit code 0"
        return Finish(record=Finished(outcome="succeeded", exit_code=0, reason=reason, generation=head.generation))
    return _recover(view, head, policy, observed, frozenset(done))


def _start(view: View, min_nodes: int) -> Decision:
    ready = [m for m in view.live_members() if view.quarantine_reason(m.node_id) is None]
    if len(ready) < min_nodes:
        names = ", ".join(m.node_id for m in ready) or "none"
        return Wait(reason=f"{len(ready)} of {min_nodes} nodes have joined ({names})")
    chosen = ready[:min_nodes]
    plan = Plan(
        plan_id="",
        generation=1,
        from_generation=0,
        action="start",
        failure_class="none",
        active=_slots(chosen),
        standby=tuple(m.node_id for m in ready[min_nodes:]),
        quarantined=(),
        reason=f"{len(ready)} nodes have joined, {min_nodes} are needed",
        recovery_source={str(i): "none" for i in range(min_nodes)},
        dismissed={},
    )
    return Commit(plan=_named(plan), settle="now")


def _recover(view: View, head: Plan, policy: Recovery, observed: Observed, done: frozenset[str]) -> Decision:
    found = blame.witnesses(view, head, done) + blame.late_witnesses(view, head, observed.late)
    vacancies = _missing(view, head, found)
    needed = [v for v in vacancies if v.node.node_id not in done]
    if not found and not needed:
        return Wait(reason=f"generation {head.generation} is running")
    first = blame.first_cause(found)
    vague = first is not None and first.weight != "primary"
    unheard = observed.unconfirmed - {v.node.node_id for v in vacancies if v.hard}
    if vague and unheard:
        names = ", ".join(sorted(unheard))
        return Wait(reason=f"a worker failed as if a peer had gone; not yet heard from: {names}")
    run_ms = head.run_ms + observed.generation_ms
    clear = blame.is_clear(first, found)
    streak = blame.next_streak(head.streak, first, clear, observed.generation_ms)
    if streak.count >= policy.no_progress_limit and first is not None:
        reason = f"the same failure {streak.count} times in a row without a new step: {first.cause.headline()}"
        plan = _stop_plan(head, reason, ExitCode.NO_PROGRESS, first.cause, streak, clear=clear)
        return Commit(plan=plan, settle="brief")
    missing = frozenset(v.node.node_id for v in vacancies if v.hard)
    charged = blame.charged_node(first, head, missing)
    strikes = blame.next_strikes(head, first, charged if clear else None, run_ms, policy)
    vacancies += _struck(view, head, charged, strikes, run_ms, policy)
    return _fill(
        view,
        head,
        policy,
        observed,
        _Case(
            first=first,
            clear=clear,
            charged=charged,
            strikes=strikes,
            streak=streak,
            run_ms=run_ms,
            vacancies=vacancies,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    first: blame.Witness | None
    clear: bool
    charged: ActiveNode | None
    strikes: tuple[Strike, ...]
    streak: Streak
    run_ms: int
    vacancies: list[_Vacancy]


def _fill(view: View, head: Plan, policy: Recovery, observed: Observed, case: _Case) -> Decision:
    pool = _candidates(view, observed)
    chosen: dict[int, Member] = {}
    unfilled: list[_Vacancy] = []
    filled: list[_Vacancy] = []
    for vacancy in sorted(case.vacancies, key=lambda v: (not v.hard, v.node.slot)):
        member = _pick(view, pool, vacancy, head)
        if member is None:
            unfilled.append(vacancy)
            continue
        pool.remove(member)
        chosen[vacancy.node.slot] = member
        filled.append(vacancy)
    hard = [v for v in unfilled if v.hard]
    if case.first is None and (hard or not filled):  # nothing has failed, so nothing has to be done at once
        wanted = next((v for v in unfilled if not v.hard), unfilled[0])
        return Wait(reason=f"{wanted.reason}; training goes on until a standby joins", for_standby=False)
    if hard:
        return _no_standby(head, policy, observed, case, hard)
    plan = _plan(view, head, case, chosen, filled, unfilled)
    return Commit(plan=plan, settle=_settle(view, case, filled, chosen))


def _no_standby(head: Plan, policy: Recovery, observed: Observed, case: _Case, hard: list[_Vacancy]) -> Decision:
    what = "; ".join(v.reason for v in hard)
    cause = case.first.cause if case.first is not None else None
    if any(v.dismissed for v in hard):
        reason = f"{what}, and no standby is there to take over"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak, clear=case.clear),
            settle="brief",
        )
    if policy.on_no_standby == "fail":
        reason = f"{what}; no standby is there and recovery.on_no_standby is fail"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak, clear=case.clear),
            settle="window",
        )
    if observed.wait_over:
        reason = f"{what}; no standby came within join_timeout"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.INFRASTRUCTURE_LOST, cause, case.streak, clear=case.clear),
            settle="now",
        )
    return Wait(reason=f"{what}; waiting for a standby to join", for_standby=True)


def _plan(
    view: View,
    head: Plan,
    case: _Case,
    chosen: dict[int, Member],
    filled: list[_Vacancy],
    kept: list[_Vacancy],
) -> Plan:
    generation = head.generation + 1
    active = tuple(
        ActiveNode(slot=n.slot, node_id=chosen[n.slot].node_id, incarnation=chosen[n.slot].incarnation)
        if n.slot in chosen
        else n
        for n in head.active
    )
    quarantined = [q for q in head.quarantined if _still_held(view, q)]
    quarantined += [
        Quarantined(node_id=v.node.node_id, generation=generation, reason=v.reason) for v in filled if v.quarantine
    ]
    aside = {q.node_id for q in quarantined}
    busy = {n.node_id for n in active}
    dismissed = {v.node.node_id: v.reason for v in filled if v.dismissed}
    standby = tuple(
        m.node_id
        for m in view.live_members()
        if m.node_id not in busy
        and m.node_id not in aside
        and m.node_id not in dismissed
        and view.quarantine_reason(m.node_id) is None
    )
    first = case.first
    action: Action = "replace" if filled else "restart"
    return _named(
        Plan(
            plan_id="",
            generation=generation,
            from_generation=head.generation,
            action=action,
            failure_class=first.cause.failure_class if first is not None else "drain",
            active=active,
            standby=standby,
            quarantined=tuple(quarantined),
            reason=_reason(first, filled, kept, chosen),
            recovery_source={str(n.slot): "none" for n in active},
            verdict="attributed" if case.clear else "inconclusive",
            cause=first.cause if first is not None else None,
            charged=(case.charged.node_id,) if case.charged is not None and case.charged.slot not in chosen else (),
            dismissed=dismissed,
            strikes=tuple(s for s in case.strikes if s.node_id not in aside),
            streak=case.streak,
            run_ms=case.run_ms,
        )
    )


def _reason(
    first: blame.Witness | None, filled: list[_Vacancy], kept: list[_Vacancy], chosen: dict[int, Member]
) -> str:
    parts = [first.cause.headline()] if first is not None else []
    parts += [
        f"slot {v.node.slot} goes from {v.node.node_id} to {chosen[v.node.slot].node_id}: {v.reason}" for v in filled
    ]
    parts += [f"{v.node.node_id} keeps slot {v.node.slot} for want of a standby: {v.reason}" for v in kept]
    return "; ".join(dict.fromkeys(parts))


def _settle(view: View, case: _Case, filled: list[_Vacancy], chosen: dict[int, Member]) -> Settle:
    """A returning node may be a moment behind an early spare, so a spare that came after the loss waits the window."""
    if case.first is not None and case.first.weight != "primary":
        return "window"
    for vacancy in filled:
        member = chosen[vacancy.node.slot]
        late = view.mod_revision(view.keys.member(member.node_id)) > vacancy.since_revision > 0
        if late and member.node_id != vacancy.node.node_id:
            return "window"
    if case.first is not None and case.first.cause.rank is not None:
        return "brief"
    return "now"


# -- vacancies --------------------------------------------------------------------------------------------------------


def _missing(view: View, head: Plan, witnesses: list[blame.Witness]) -> list[_Vacancy]:
    """Slots whose node has gone, is unfit, or is to be drained."""
    unfit = {w.cause.node_id: w.cause for w in witnesses if not w.fit}
    found = []
    for node in head.active:
        hold = view.hold(node.node_id)
        lost = blame.gone_witness(view, node)
        if lost is not None:
            found.append(
                _Vacancy(
                    node=node,
                    reason=f"{node.node_id} is gone ({lost.cause.detail})",
                    hard=True,
                    since_revision=lost.revision,
                )
            )
        elif node.node_id in unfit:
            reason = f"{node.node_id} is unfit ({unfit[node.node_id].detail})"
            found.append(_Vacancy(node=node, reason=reason, hard=True, quarantine=True))
        elif hold is not None and hold.kind == "drain":
            reason = f"{node.node_id} is drained by the operator ({hold.reason})"
            found.append(_Vacancy(node=node, reason=reason, hard=False, quarantine=True))
    return found


def _struck(
    view: View,
    head: Plan,
    charged: ActiveNode | None,
    strikes: tuple[Strike, ...],
    run_ms: int,
    policy: Recovery,
) -> list[_Vacancy]:
    """The charged node leaves if torch's budget there is spent, or if it has struck too often."""
    if charged is None:
        return []
    ready = view.ready(head.generation).get(charged.node_id)
    if ready is not None and ready.restarts_left == 0:
        reason = f"{charged.node_id} has no restarts left (--max-restarts)"
        return [_Vacancy(node=charged, reason=reason, hard=True, dismissed=True)]
    count = sum(s.node_id == charged.node_id for s in strikes)
    if count >= policy.node_strikes:
        reason = f"{charged.node_id} has had {count} process faults (recovery.node_strikes is {policy.node_strikes})"
        return [_Vacancy(node=charged, reason=reason, hard=False, quarantine=True)]
    return []


def _candidates(view: View, observed: Observed) -> list[Member]:
    """Standbys, those heard from lately first, then in the order of registration."""
    return sorted(view.standbys(), key=lambda m: m.node_id in observed.silent)


def _pick(view: View, pool: list[Member], vacancy: _Vacancy, head: Plan) -> Member | None:
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


def _still_held(view: View, item: Quarantined) -> bool:
    hold = view.hold(item.node_id)
    return not (hold is not None and hold.kind == "readmit" and hold.generation >= item.generation)


# -- small makers -----------------------------------------------------------------------------------------------------


def _slots(members: list[Member]) -> tuple[ActiveNode, ...]:
    return tuple(ActiveNode(slot=i, node_id=m.node_id, incarnation=m.incarnation) for i, m in enumerate(members))


def _stop_plan(
    head: Plan, reason: str, code: ExitCode, cause: Cause | None, streak: Streak, *, clear: bool = True
) -> Plan:
    return _named(
        Plan(
            plan_id="",
            generation=head.generation + 1,
            from_generation=head.generation,
            action="stop",
            failure_class=cause.failure_class if cause is not None else "none",
            active=head.active,
            standby=(),
            quarantined=head.quarantined,
            reason=reason,
            recovery_source={},
            verdict="attributed" if clear else "inconclusive",
            cause=cause,
            dismissed={},
            strikes=head.strikes,
            streak=streak,
            run_ms=head.run_ms,
            exit_code=int(code),
        )
    )


def _named(plan: Plan) -> Plan:
    digest = hashlib.sha256(encode(plan).encode()).hexdigest()[:10]
    return replace(plan, plan_id=f"g{plan.generation}-{digest}")
