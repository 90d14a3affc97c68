"""From records to the next plan: pure, the same on every agent, with its reason.

``decide`` is asked after every change. It answers with one of

- ``Wait``: nothing to do, or something is still missing (the reason says what);
- ``Commit``: this plan should be written; ``settle`` says how long to listen for more evidence first;
- ``Finish``: every slot has ended well.

The order of thought: is the run over; has every slot ended well; who is missing from the group (vacancies); who was the
first cause; what state is left (``resume.py``); does the same failure keep coming back; who fills the vacancies. Blame
needs a primary witness, or an ambiguous one after every other active node has been heard from again; a broken
connection alone blames nobody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lmres.errors import ExitCode
from lmres.policy import Recovery
from lmres.rendezvous import blame, looking, pausing
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
from lmres.rendezvous.resume import Checkpointing, Known, Resume, newest_trusted, resume, untold
from lmres.rendezvous.state import Finished, Member, RunConfig, View
from lmres.rendezvous.vacancies import Vacancy, candidates, merged, missing, pick, struck, to_be_replaced

Settle = Literal["now", "brief", "window"]
_OFF = Checkpointing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What only a local clock can tell, as facts.

    ``unconfirmed``: active nodes not heard from since the evidence came. ``silent``: nodes whose lease is quiet but
    not over. ``late``: active nodes that did not become ready in time. ``generation_ms``: how long the newest
    generation has lasted. ``wait_over``: the wait for a standby has lasted longer than allowed. ``overdue``: members
    that have had long enough to tell what state they hold, and have not. ``unlooked``: nodes that have had long enough
    to tell what their workers are doing, and have not. ``unpaused``: the time for workers to stand still is over.
    ``step``: the newest that active nodes tell with their leases. ``vain``: the replacement, which nothing forces,
    that was given up a moment ago.
    """

    unconfirmed: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    generation_ms: int = 0
    wait_over: bool = False
    overdue: frozenset[str] = frozenset()
    unlooked: frozenset[str] = frozenset()
    unpaused: bool = False
    step: int = 0
    vain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``freeze``: a plan is coming, so vaults must say what they hold. ``untold``: those that have not done so.

    ``unseen``: those that have not yet said what their workers are doing. ``pause``: workers must stand still at
    ``pausing.target``. ``vain``: for this replacement, which nothing forces, too much would be lost; all were asked.
    """

    reason: str
    for_standby: bool = False
    freeze: bool = False
    untold: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    pause: bool = False
    vain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """``pause``: until it is written, workers stand still."""

    plan: Plan
    settle: Settle
    pause: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    record: Finished


Decision: TypeAlias = Wait | Commit | Finish


def decide(
    view: View,
    policy: Recovery,
    observed: Observed,
    checkpointing: Checkpointing = _OFF,
    *,
    watched: bool = False,
) -> Decision:
    """The next step for these records. Raises nothing; unreadable records count as absent.

    ``watched``: agents can tell what their workers are doing.
    """
    config, head = view.config, view.head()
    if config is None:
        return Wait(reason="the run has no configuration yet")
    if view.finished is not None:
        return Wait(reason="the run is over")
    stop = view.stop_request()
    if head is None and stop is not None:
        reason = f"stopped by the operator before it started: {stop.reason}"
        return _never_started(reason, ExitCode.TRAINING_FAILED)
    rules = _Rules(
        view=view,
        config=config,
        policy=policy,
        observed=observed,
        checkpointing=checkpointing,
        watched=watched,
    )
    if head is None:
        return _start(rules)
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
    return _recover(rules, head, frozenset(done))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What a decision is made from."""

    view: View
    config: RunConfig
    policy: Recovery
    observed: Observed
    checkpointing: Checkpointing
    watched: bool
    _known: list[Known] = field(default_factory=list)

    def wait_for_holdings(self, head: Plan | None, silent: frozenset[str] = frozenset()) -> Wait | None:
        """Set while somebody, but ``silent``, has not yet said what state it holds."""
        but = self.observed.overdue | silent
        names = untold(self.view, head, but) if self.checkpointing.enabled else ()
        if not names:
            return None
        return Wait(reason=f"not yet told what state they hold: {', '.join(names)}", freeze=True, untold=names)

    def resume(self, head: Plan | None, active: tuple[ActiveNode, ...]) -> Resume | None:
        """None where states are not kept."""
        if not self.checkpointing.enabled:
            return None
        if not self._known:
            self._known.append(Known.of(self.view, head))
        trusted = newest_trusted(self.view, head) if head is not None else None
        return resume(self.view, self.config, head, active, self._known[0], trusted=trusted)


def _never_started(reason: str, code: ExitCode) -> Finish:
    return Finish(record=Finished(outcome="failed", exit_code=int(code), reason=reason, generation=0))


def _start(rules: _Rules) -> Decision:
    view, min_nodes = rules.view, rules.config.min_nodes
    usable = [m for m in view.live_members() if view.quarantine_reason(m.node_id) is None]
    ready = [m for m in usable if view.unfit_reason(m.node_id) is None]
    if len(ready) < min_nodes:
        names = ", ".join(m.node_id for m in ready) or "none"
        unfit = "".join(
            f"; {m.node_id} is unhealthy ({view.unfit_reason(m.node_id)})" for m in usable if m not in ready
        )
        return Wait(reason=f"{len(ready)} of {min_nodes} nodes have joined ({names}){unfit}", freeze=True)
    waits = rules.wait_for_holdings(None)
    if waits is not None:
        return waits
    active = _slots(ready[:min_nodes])
    state = rules.resume(None, active)
    if state is not None and state.lost:
        return _never_started(f"the run can not start: {state.words}", ExitCode.BAD_CONFIGURATION)
    plan = Plan(
        plan_id="",
        generation=1,
        from_generation=0,
        action="start",
        failure_class="none",
        active=active,
        standby=tuple(m.node_id for m in ready[min_nodes:]),
        quarantined=(),
        reason=f"{len(ready)} nodes have joined, {min_nodes} are needed",
        recovery_source={str(i): "none" for i in range(min_nodes)},
        dismissed={},
        origin=1,
    )
    return Commit(plan=_named(_resumed(plan, state)), settle="now")


def _recover(rules: _Rules, head: Plan, done: frozenset[str]) -> Decision:
    view, policy, observed = rules.view, rules.policy, rules.observed
    found = blame.witnesses(view, head, done) + blame.late_witnesses(view, head, observed.late)
    vacancies = missing(view, head, found)
    needed = [v for v in vacancies if v.node.node_id not in done]
    alarm = looking.alarmed(view, head) if rules.watched else None
    if not found and not needed and alarm is None:
        return Wait(reason=f"generation {head.generation} is running")
    first = blame.first_cause(found)
    if rules.watched and (first is None or first.weight != "primary"):
        seen = _look(rules, head, done, is_vague=first is not None)
        if isinstance(seen, Wait):
            return seen
        found += seen
        first = blame.first_cause(found)
        if not found and not needed:
            return Wait(reason=f"generation {head.generation} is running; a rank is slow, and may be")
    vague = first is not None and first.weight != "primary"
    unheard = observed.unconfirmed - {v.node.node_id for v in vacancies if v.hard}
    if vague and unheard:
        names = ", ".join(sorted(unheard))
        return Wait(reason=f"a worker failed as if a peer had gone; not yet heard from: {names}", freeze=True)
    if first is not None and blame.has_no_way_back(first.cause):
        reason = f"a program can not be brought back to its step: {first.cause.headline()}"
        plan = _stop_plan(head, reason, ExitCode.TRAINING_FAILED, first.cause, head.streak)
        return Commit(plan=plan, settle="brief")
    final = any(w.fit or w.slot is not None for w in found)  # else only late nodes, which may yet be ready
    silent = observed.silent - {n.node_id for n in head.active}
    waits = rules.wait_for_holdings(head, silent) if final else None
    if waits is not None:
        return waits
    state = rules.resume(head, head.active)
    run_ms = head.run_ms + observed.generation_ms
    clear = blame.is_clear(first, found)
    streak = blame.next_streak(head, first, clear, observed.generation_ms, state.step if state is not None else 0)
    if streak.count >= policy.no_progress_limit and first is not None:
        reason = f"the same failure {streak.count} times in a row without a new step: {first.cause.headline()}"
        plan = _stop_plan(head, reason, ExitCode.NO_PROGRESS, first.cause, streak, clear=clear)
        return Commit(plan=plan, settle="brief")
    lost = frozenset(v.node.node_id for v in vacancies if v.hard)
    charged = blame.charged_node(first, head, lost)
    strikes = blame.next_strikes(head, first, charged if clear else None, run_ms, policy)
    vacancies = merged([*vacancies, *struck(view, head, charged, strikes, run_ms, policy)])
    return _fill(
        rules,
        head,
        _Case(
            first=first,
            final=final,
            clear=clear,
            charged=charged,
            strikes=strikes,
            streak=streak,
            run_ms=run_ms,
            vacancies=vacancies,
            state=state,
        ),
    )


def _look(rules: _Rules, head: Plan, done: frozenset[str], *, is_vague: bool) -> Wait | list[blame.Witness]:
    """What the workers' own marks say, where an alarm stands or ``is_vague``, what has failed says little itself.

    Not frozen meanwhile: an alarm may be withdrawn.
    """
    alarm = looking.alarmed(rules.view, head)
    if alarm is None and not is_vague:
        return []
    names = tuple(n for n in looking.unseen(rules.view, head, done) if n not in rules.observed.unlooked)
    if names:
        what = "workers failed as if a peer had gone" if is_vague else "a worker makes no progress"
        reason = f"{what}; not yet told what their workers are doing: {', '.join(names)}"
        return Wait(reason=reason, freeze=is_vague, unseen=names)
    found = looking.localized(rules.view, head)
    if found.excused or (is_vague and found.failure_class != "collective_desync"):
        return []
    return [looking.witness(rules.view, head, found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """``final``: what has been found calls for a plan, whatever comes. ``state``: what the nodes of the newest plan
    could go on from."""

    first: blame.Witness | None
    final: bool
    clear: bool
    charged: ActiveNode | None
    strikes: tuple[Strike, ...]
    streak: Streak
    run_ms: int
    vacancies: list[Vacancy]
    state: Resume | None


def _fill(rules: _Rules, head: Plan, case: _Case) -> Decision:
    view = rules.view
    pool = candidates(view, rules.observed.silent)
    chosen: dict[int, Member] = {}
    unfilled: list[Vacancy] = []
    filled: list[Vacancy] = []
    for vacancy in sorted(case.vacancies, key=lambda v: (not v.hard, v.node.slot)):
        member = pick(view, pool, vacancy, head)
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
        return _no_standby(head, rules, case, hard)
    forced = case.first is not None or any(v.wanted for v in filled)
    made = max(rules.observed.step, head.recovery_step)
    if not forced and not rules.checkpointing.enabled and made:
        return Wait(reason=f"{filled[0].reason}; training goes on, because {_all_lost(made)}")
    wish = ", ".join(f"{v.failure_class} {v.node.node_id}" for v in filled)
    if case.first is None and rules.observed.vain == wish:
        return Wait(reason=f"{filled[0].reason}; training goes on, because too much would be lost")
    pause = case.first is None and rules.checkpointing.enabled and pausing.is_possible(view, head)
    moving = pausing.moving(view, head) if pause else ()
    if moving and not rules.observed.unpaused:
        reason = f"{filled[0].reason}; workers are to stand still at one step first, not yet those of"
        return Wait(reason=f"{reason} {', '.join(moving)}", pause=True)
    used = {n.node_id for n in head.active} | {m.node_id for m in chosen.values()}
    waits = rules.wait_for_holdings(head, rules.observed.silent - used)
    if waits is not None:
        return replace(waits, pause=pause)
    active = tuple(_slot(n.slot, chosen[n.slot]) if n.slot in chosen else n for n in head.active)
    state = case.state if active == head.active else rules.resume(head, active)
    if state is not None and state.lost:
        waits = rules.wait_for_holdings(head)
        if waits is None and case.first is None:
            return Wait(reason=f"{filled[0].reason}; training goes on, because {state.words}", vain=wish)
        return waits or _state_lost(head, case, state)
    if not forced and made and (state is None or not state.step):
        return Wait(reason=f"{filled[0].reason}; training goes on, because {_all_lost(made)}", vain=wish)
    plan = _plan(view, head, case, active, chosen, filled, unfilled)
    return Commit(plan=_named(_resumed(plan, state)), settle=_settle(view, case, filled, chosen), pause=pause)


def _all_lost(made: int) -> str:
    return f"no state is kept: all {made} steps would be made again"


def _resumed(plan: Plan, state: Resume | None) -> Plan:
    """The plan with what it goes on from."""
    if state is None:
        return plan
    return replace(
        plan,
        recovery_step=state.step,
        recovery_origin=state.from_origin,
        recovery_source=state.source,
        trust=state.trust,
        origin=state.origin,
        doubts=state.doubts,
        reason=plan.reason + state.words,
    )


def _state_lost(head: Plan, case: _Case, state: Resume) -> Commit:
    cause = case.first.cause if case.first is not None else None
    parts = [cause.headline()] if cause is not None else []
    reason = "; ".join([*parts, state.words])
    plan = _stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak, clear=case.clear)
    return Commit(plan=plan, settle="window")


def _no_standby(head: Plan, rules: _Rules, case: _Case, hard: list[Vacancy]) -> Decision:
    what = "; ".join(v.reason for v in hard)
    cause = case.first.cause if case.first is not None else None
    if any(v.dismissed for v in hard):
        reason = f"{what}, and no standby is there to take over"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak, clear=case.clear),
            settle="brief",
        )
    if rules.policy.on_no_standby == "fail":
        reason = f"{what}; no standby is there and recovery.on_no_standby is fail"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.TRAINING_FAILED, cause, case.streak, clear=case.clear),
            settle="window",
        )
    if rules.observed.wait_over:
        reason = f"{what}; no standby came within join_timeout"
        return Commit(
            plan=_stop_plan(head, reason, ExitCode.INFRASTRUCTURE_LOST, cause, case.streak, clear=case.clear),
            settle="now",
        )
    return Wait(reason=f"{what}; waiting for a standby to join", for_standby=True, freeze=case.final)


def _plan(
    view: View,
    head: Plan,
    case: _Case,
    active: tuple[ActiveNode, ...],
    chosen: dict[int, Member],
    filled: list[Vacancy],
    kept: list[Vacancy],
) -> Plan:
    generation = head.generation + 1
    quarantined = [q for q in head.quarantined if _still_held(view, q)]
    quarantined += [
        Quarantined(node_id=v.node.node_id, generation=generation, reason=v.reason) for v in filled if v.quarantine
    ]
    held = {q.node_id for q in quarantined} | {n.node_id for n in head.active}
    quarantined += [  # accused after another had taken its slot
        Quarantined(node_id=node_id, generation=generation, reason=f"{node_id} was found wrong ({cause.headline()})")
        for node_id, cause in sorted(to_be_replaced(view, head).items())
        if node_id not in held
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
    return Plan(
        plan_id="",
        generation=generation,
        from_generation=head.generation,
        action=action,
        failure_class=first.cause.failure_class if first is not None else filled[0].failure_class,
        active=active,
        standby=standby,
        quarantined=tuple(quarantined),
        reason=_reason(first, filled, kept, chosen),
        recovery_source={str(n.slot): "none" for n in active},
        verdict="attributed" if case.clear else "inconclusive",
        cause=first.cause if first is not None else filled[0].cause,
        charged=(case.charged.node_id,) if case.charged is not None and case.charged.slot not in chosen else (),
        dismissed=dismissed,
        strikes=tuple(s for s in case.strikes if s.node_id not in aside),
        streak=case.streak,
        run_ms=case.run_ms,
        origin=head.origin + 1,
    )


def _reason(first: blame.Witness | None, filled: list[Vacancy], kept: list[Vacancy], chosen: dict[int, Member]) -> str:
    parts = [first.cause.headline()] if first is not None else []
    parts += [
        f"slot {v.node.slot} goes from {v.node.node_id} to {chosen[v.node.slot].node_id}: {v.reason}" for v in filled
    ]
    parts += [f"{v.node.node_id} keeps slot {v.node.slot} for want of a standby: {v.reason}" for v in kept]
    return "; ".join(dict.fromkeys(parts))


def _settle(view: View, case: _Case, filled: list[Vacancy], chosen: dict[int, Member]) -> Settle:
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


def _still_held(view: View, item: Quarantined) -> bool:
    hold = view.hold(item.node_id)
    return not (hold is not None and hold.kind == "readmit" and hold.generation >= item.generation)


# -- small makers -----------------------------------------------------------------------------------------------------


def _slots(members: list[Member]) -> tuple[ActiveNode, ...]:
    return tuple(_slot(i, m) for i, m in enumerate(members))


def _slot(slot: int, member: Member) -> ActiveNode:
    return ActiveNode(slot=slot, node_id=member.node_id, incarnation=member.incarnation)


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
            origin=head.origin + 1,
            exit_code=int(code),
        )
    )


def _named(plan: Plan) -> Plan:
    digest = hashlib.sha256(encode(plan).encode()).hexdigest()[:10]
    return replace(plan, plan_id=f"g{plan.generation}-{digest}")
