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
import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lmres.errors import ExitCode
from lmres.policy import Recovery
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
from lmres.rendezvous.state import Evidence, Finished, Member, View
from lmres.scout.evidence import WEIGHT_ORDER

Settle = Literal["now", "brief", "window"]
SOON_MS = 120_000
_STRIKING = frozenset({"process_crash", "out_of_memory"})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")


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
class _Witness:
    weight: str
    revision: int
    cause: Cause
    boot_id: str = ""
    at_ms: int = 0
    fit: bool = True
    slot: int | None = None


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
    witnesses = _witnesses(view, head, done) + _late_witnesses(view, head, observed)
    vacancies = _missing(view, head, witnesses)
    needed = [v for v in vacancies if v.node.node_id not in done]
    if not witnesses and not needed:
        return Wait(reason=f"generation {head.generation} is running")
    first = _first_cause(witnesses)
    vague = first is not None and first.weight != "primary"
    unheard = observed.unconfirmed - {v.node.node_id for v in vacancies if v.hard}
    if vague and unheard:
        names = ", ".join(sorted(unheard))
        return Wait(reason=f"a worker failed as if a peer had gone; not yet heard from: {names}")
    run_ms = head.run_ms + observed.generation_ms
    clear = _blame_is_clear(first, witnesses)
    streak = _streak(head.streak, first, clear, observed.generation_ms)
    if streak.count >= policy.no_progress_limit and first is not None:
        reason = f"the same failure {streak.count} times in a row without a new step: {first.cause.headline()}"
        return Commit(plan=_stop_plan(head, reason, ExitCode.NO_PROGRESS, first.cause, streak), settle="brief")
    charged = _charged(first, head, vacancies)
    strikes = _strikes(head, first, charged if clear else None, run_ms, policy)
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
    first: _Witness | None
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
        return Wait(reason=f"{unfilled[0].reason}; training goes on until a standby joins", for_standby=False)
    if hard:
        return _no_standby(head, policy, observed, case, hard)
    plan = _plan(view, head, case, chosen, filled, unfilled)
    return Commit(plan=plan, settle=_settle(view, case, filled, chosen))


def _no_standby(head: Plan, policy: Recovery, observed: Observed, case: _Case, hard: list[_Vacancy]) -> Decision:
    what = "; ".join(v.reason for v in hard)
    cause = case.first.cause if case.first is not None else None
    if any(v.dismissed for v in hard):
        reason = f"{what}, and no standby is there to take over"
        return Commit(plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak), settle="brief")
    if policy.on_no_standby == "fail":
        reason = f"{what}; no standby is there and recovery.on_no_standby is fail"
        return Commit(plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak), settle="window")
    if observed.wait_over:
        reason = f"{what}; no standby came within join_timeout"
        return Commit(plan=_stop_plan(head, reason, ExitCode.INFRASTRUCTURE_LOST, cause, case.streak), settle="now")
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
    first, action = case.first, _action(filled)
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


def _action(filled: list[_Vacancy]) -> Action:
    return "replace" if filled else "restart"


def _reason(first: _Witness | None, filled: list[_Vacancy], kept: list[_Vacancy], chosen: dict[int, Member]) -> str:
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


# -- witnesses and causes ---------------------------------------------------------------------------------------------


def _witnesses(view: View, head: Plan, done: frozenset[str]) -> list[_Witness]:
    """Evidence of this generation, and the nodes that have gone, in the order of arrival."""
    found = []
    prefix = f"{view.keys.reg}evidence/{head.generation:08d}/"
    for stored, e in view.under(prefix, Evidence):
        if e.generation == head.generation:
            found.append(
                _Witness(
                    weight=e.weight,
                    revision=stored.created,
                    cause=e.cause,
                    boot_id=e.boot_id,
                    at_ms=e.at_ms,
                    fit=e.fit,
                )
            )
    for node in head.active:
        if node.node_id not in done:
            lost = _gone_witness(view, node)
            if lost is not None:
                found.append(lost)
    return sorted(found, key=lambda w: w.revision)


def _gone_witness(view: View, node: ActiveNode) -> _Witness | None:
    if view.is_live(node.node_id, node.incarnation):
        return None
    member, gone = view.member(node.node_id), view.gone(node.node_id)
    host = member.host if member is not None else "unknown"
    if gone is not None and gone.incarnation == node.incarnation:
        revision = view.mod_revision(view.keys.gone(node.node_id))
        failure_class = "drain" if gone.how == "left" and gone.planned else "node_lost"
        detail, step, quiet_ms = gone.reason, gone.step, gone.quiet_ms
    else:
        revision = view.mod_revision(view.keys.member(node.node_id))
        failure_class, detail, step, quiet_ms = "node_lost", "its agent was started anew", None, None
    cause = Cause(
        failure_class=failure_class,
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=host,
        detail=detail,
        step=step,
        detect_ms=quiet_ms,
    )
    return _Witness(weight="primary", revision=revision, cause=cause, slot=node.slot)


def _late_witnesses(view: View, head: Plan, observed: Observed) -> list[_Witness]:
    """Nodes that live but do not become ready: unfit as long as that lasts."""
    found = []
    for node in head.active:
        if node.node_id in observed.late and view.is_live(node.node_id, node.incarnation):
            member = view.member(node.node_id)
            cause = Cause(
                failure_class="node_unhealthy",
                node_id=node.node_id,
                incarnation=node.incarnation,
                host=member.host if member is not None else "unknown",
                detail=f"was not ready for generation {head.generation} in time",
            )
            found.append(_Witness(weight="primary", revision=view.revision, cause=cause, fit=False))
    return found


def _first_cause(witnesses: list[_Witness]) -> _Witness | None:
    """The heaviest weight, then arrival; on one host (one boot) its own clock is finer than arrival."""
    if not witnesses:
        return None
    best = min(witnesses, key=lambda w: (WEIGHT_ORDER[w.weight], w.revision))
    if not best.boot_id:
        return best
    rivals = [w for w in witnesses if w.weight == best.weight and w.boot_id == best.boot_id]
    return min(rivals, key=lambda w: (w.at_ms, w.revision))


def _blame_is_clear(first: _Witness | None, witnesses: list[_Witness]) -> bool:
    """Whether the first cause is more than the first to be heard of.

    A broken connection blames nobody; of ambiguous exits on several nodes all but one are consequences, and nobody can
    say which one is not.
    """
    if first is None or first.weight == "primary":
        return True
    doubtful = {w.cause.node_id for w in witnesses if w.weight == "ambiguous"}
    return first.weight == "ambiguous" and len(doubtful) == 1


def _streak(previous: Streak, first: _Witness | None, clear: bool, generation_ms: int) -> Streak:
    """A failure after an unknown step is "the same" only soon after the start: a week apart it is another one."""
    signature = _signature(first, clear) if first is not None else ""
    if first is None or not signature:
        return Streak()
    tells = bool(first.cause.step) or generation_ms <= SOON_MS
    again = signature == previous.signature and tells
    return Streak(signature=signature, count=previous.count + 1 if again else 1)


def _signature(first: _Witness, clear: bool) -> str:
    """Equal for the same failure at the same step. Empty where "the same" can not be told.

    A signal or a lost node says little by itself: it counts only after a known step. Numbers in a message (ports,
    process ids, addresses) change from time to time, and which of several ranks is heard first is chance.
    """
    cause = first.cause
    if not clear:
        what = "several workers, no clear cause"
    elif cause.exception is not None:
        lines = cause.exception.message.strip().splitlines()
        what = f"{cause.exception.type_name}: {_NUMBER.sub('#', lines[0][:200]) if lines else ''}"
    elif cause.rank is not None and cause.exit_status is not None:
        if cause.exit_status < 0 and not cause.step:
            return ""
        what = f"rank {cause.rank} {cause.detail}"
    elif cause.failure_class == "node_lost" and cause.step:
        what = f"slot {first.slot}"
    else:
        return ""
    failure_class = cause.failure_class if clear else "unknown"
    return f"{failure_class} | {what} | step {cause.step}"


def _charged(first: _Witness | None, head: Plan, vacancies: list[_Vacancy]) -> ActiveNode | None:
    """The node whose worker was at fault, if a worker was."""
    if first is None or first.weight == "secondary" or first.cause.rank is None:
        return None
    missing = {v.node.node_id for v in vacancies if v.hard}
    for node in head.active:
        if node.node_id == first.cause.node_id and node.node_id not in missing:
            return node
    return None


def _strikes(
    head: Plan, first: _Witness | None, charged: ActiveNode | None, run_ms: int, policy: Recovery
) -> tuple[Strike, ...]:
    """``charged`` None: nobody is struck, old strikes are kept as long as they count."""
    window_ms = int(policy.strikes_window_s * 1000)
    kept = [s for s in head.strikes if run_ms - s.at_run_ms <= window_ms]
    if charged is not None and first is not None and first.cause.failure_class in _STRIKING:
        kept.append(Strike(node_id=charged.node_id, at_run_ms=run_ms))
    return tuple(kept)


# -- vacancies --------------------------------------------------------------------------------------------------------


def _missing(view: View, head: Plan, witnesses: list[_Witness]) -> list[_Vacancy]:
    """Slots whose node has gone, is unfit, or is to be drained."""
    unfit = {w.cause.node_id: w.cause for w in witnesses if not w.fit}
    found = []
    for node in head.active:
        hold = view.hold(node.node_id)
        lost = _gone_witness(view, node)
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


def _stop_plan(head: Plan, reason: str, code: ExitCode, cause: Cause | None, streak: Streak) -> Plan:
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
