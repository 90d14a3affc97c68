"""What a run's records mean to people: its state, and what each node is in it. Pure.

Where a reason is asked for, it is the protocol's own: ``decide`` is given the same records that the agents have.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from lmres.fields import FieldError
from lmres.policy import Recovery
from lmres.rendezvous.decide import Commit, Decision, Finish, Observed, Wait, decide
from lmres.rendezvous.joining import run_is_over
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.state import Gone, Member, Recovered, RunConfig, View

State = Literal["forming", "running", "recovering", "waiting_for_standby", "succeeded", "failed"]
RoleName = Literal["active", "standby", "quarantined", "drained", "dismissed", "joined", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    name: State
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """``slot`` is set for the nodes of the newest plan. ``reason``: why it is set aside, is to go, or has gone."""

    name: RoleName
    slot: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"active slot {self.slot}" if self.name == "active" else self.name


def recovery_policy(config: RunConfig | None) -> Recovery:
    """The policy's part for decisions; the default one where the run has none, or one of another version."""
    try:
        body = json.loads(config.policy)["recovery"] if config is not None and config.policy is not None else {}
        known = {f.name for f in dataclasses.fields(Recovery)}
        return Recovery(**{name: value for name, value in body.items() if name in known})
    except (FieldError, ValueError, TypeError, KeyError, AttributeError):
        return Recovery()


def checkpointing(config: RunConfig | None) -> Checkpointing:
    """Whether the run keeps its state in memory; as ``recovery_policy`` where that can not be read."""
    try:
        body = json.loads(config.policy) if config is not None and config.policy is not None else {}
        wanted = bool(body["checkpoint"]["enabled"]) and body["workers"]["resume"] != "none"
        return Checkpointing(enabled=wanted, replicas=int(body["checkpoint"]["replicas"]))
    except (ValueError, TypeError, KeyError):
        return Checkpointing()


def is_watched(config: RunConfig | None) -> bool:
    """Whether the agents look for failures that leave no crash; as ``recovery_policy`` where that can not be read."""
    try:
        body = json.loads(config.policy) if config is not None and config.policy is not None else {}
        return bool(body["detection"]["enabled"])
    except (ValueError, TypeError, KeyError):
        return False


def next_decision(view: View) -> Decision:
    """What the agents would decide now, but for what only their clocks and their vaults can tell."""
    return decide(view, recovery_policy(view.config), Observed(), watched=is_watched(view.config))


def run_state(view: View) -> RunState:
    finished, head = view.finished, view.head()
    if finished is not None:
        return RunState(name=finished.outcome, reason=finished.reason)
    if head is not None and head.action == "stop":
        return RunState(name="succeeded" if head.exit_code == 0 else "failed", reason=head.reason)
    decision = next_decision(view)
    match decision:
        case Finish():
            return RunState(name=decision.record.outcome, reason=decision.record.reason)
        case Commit():
            return RunState(name="forming" if head is None else "recovering", reason=decision.plan.reason)
        case Wait():
            return _waiting(view, head, decision)


def _waiting(view: View, head: Plan | None, wait: Wait) -> RunState:
    if head is None:
        return RunState(name="forming", reason=wait.reason)
    if wait.for_standby:
        return RunState(name="waiting_for_standby", reason=wait.reason)
    if view.formed(head.generation) is None:
        ready = view.ready(head.generation)
        missing = [n.node_id for n in head.active if n.node_id not in ready]
        what = f"not ready yet: {', '.join(missing)}" if missing else "all nodes are ready, the group forms"
        return RunState(name="recovering" if head.generation > 1 else "forming", reason=what)
    if head.generation > 1 and not _has_stepped(view, head):
        return RunState(name="running", reason=f"generation {head.generation} has started; no step of it is done yet")
    return RunState(name="running", reason=wait.reason)


def _has_stepped(view: View, head: Plan) -> bool:
    """True also where it can not be told: without a policy nothing in the workers counts steps."""
    if view.config is None or view.config.policy is None:
        return True
    return bool(recoveries(view, head.generation))


def recoveries(view: View, generation: int) -> tuple[Recovered, ...]:
    """The nodes' reports on the recovery into this generation, by node id."""
    found = [
        r
        for stored, r in view.under(f"{view.keys.reg}recovered/{generation:08d}/", Recovered)
        if view.stored.get(view.keys.recovered(generation, r.node_id)) is stored and r.generation == generation
    ]
    return tuple(sorted(found, key=lambda r: r.node_id))


def node_role(view: View, member: Member) -> Role:
    head = view.head()
    gone = view.get(view.keys.gone(member.node_id), Gone)
    slot = head.slot_of(member.node_id, member.incarnation) if head is not None else None
    if gone is not None and gone.incarnation == member.incarnation:
        return Role(name="gone", slot=slot, reason=f"{gone.how}: {gone.reason}")
    held, hold = view.quarantine_reason(member.node_id), view.hold(member.node_id)
    drained = hold is not None and hold.kind == "drain"
    unfit = view.unfit_reason(member.node_id)
    if slot is not None:
        why = held if drained else f"unhealthy: {unfit}" if unfit is not None else None
        reason = f"to be replaced when a standby is there ({why})" if why is not None else ""
        return Role(name="active", slot=slot, reason=reason)
    if held is not None:
        return Role(name="drained" if drained else "quarantined", reason=held)
    if head is not None and member.node_id in head.dismissed and member not in view.standbys():
        return Role(name="dismissed", reason=head.dismissed[member.node_id])
    reason = f"not used while it is unhealthy: {unfit}" if unfit is not None else ""
    return Role(name="standby" if head is not None else "joined", reason=reason)


def all_members(view: View) -> tuple[Member, ...]:
    """Everybody who ever registered, by node id, the gone ones too."""
    return tuple(m for _, m in view.under(f"{view.keys.reg}member/", Member))


def is_over(view: View) -> bool:
    return run_is_over(view)
