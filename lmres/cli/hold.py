"""``lmres drain`` and ``lmres readmit``: the operator's word on one node.

The word is a Hold record; the agents act on it by their own rules. What is printed is what ``decide`` says to the
records with the Hold in them, so it is a forecast: another failure may come first.
"""

from __future__ import annotations

import argparse
import getpass
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lmres.cli.command import Command, Output
from lmres.cli.observer import NoSuchRun, Observer, Snapshot
from lmres.cli.run_selection import add_run_options, select_run
from lmres.cli.run_view import Role, all_members, is_over, next_decision, node_role, recovery_policy, run_state
from lmres.cli.text import clean, columns, names, wrap
from lmres.errors import ConfigError
from lmres.fields import nearest_name, shown
from lmres.ports import Compare, Put
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit
from lmres.rendezvous.state import Hold, Member, View

Kind = Literal["drain", "readmit"]
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What came of it. ``replaced_by``: who is about to take the node's slot."""

    node_id: str
    kind: Kind
    changed: bool
    role_before: str
    role: str
    generation: int
    message: str
    replaced_by: str | None = None

    def value(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def operator() -> str:
    """Who is typing, for the record."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def checked_reason(text: str | None, default: str) -> str:
    """Raises ConfigError for one that does not fit on a line."""
    if text is None:
        return default
    if not text.strip() or not text.isprintable() or len(text) > MAX_REASON_CHARS:
        raise ConfigError(
            f"--reason: found {shown(text)}; allowed: one printable line, 1 to {MAX_REASON_CHARS} characters"
        )
    return text.strip()


def hold_node(observer: Observer, node_id: str, kind: Kind, reason: str) -> Held:
    """Writes the Hold, unless it is not needed. Raises ConfigError (no such node) or NoSuchRun (over)."""
    before: list[Role] = []
    keys = observer.keys

    def change(snapshot: Snapshot) -> tuple[Put, tuple[Compare, ...]] | None:
        view = snapshot.view
        member = _member(view, node_id)
        if is_over(view):
            raise NoSuchRun(f"the run {shown(observer.selection.run_id)} is over: {clean(run_state(view).reason)}")
        before.append(node_role(view, member))
        if _is_so(view, node_id, kind):
            return None
        head = view.head()
        generation = head.generation if head is not None else 0
        hold = Hold(node_id=node_id, kind=kind, generation=generation, reason=reason)
        # The newest plan must still be the newest: a readmission does not count for a later quarantine.
        fenced = (keys.hold(node_id), keys.finished, keys.plan(generation + 1))
        compares = tuple(Compare(key=key, mod_revision=view.mod_revision(key)) for key in fenced)
        return Put(key=keys.hold(node_id), value=encode(hold)), compares

    snapshot, changed = observer.update(change)
    return (_drained if kind == "drain" else _readmitted)(snapshot.view, node_id, before[0], changed)


def _member(view: View, node_id: str) -> Member:
    member = view.member(node_id)
    if member is None:
        known = [m.node_id for m in all_members(view)]
        near = nearest_name(node_id, [clean(k, 128) for k in known])
        there = "" if near.startswith("valid here") else f" valid here: {names(known)}"
        raise ConfigError(f"no node {shown(node_id)} in this run; {near}{there}")
    return member


def _is_so(view: View, node_id: str, kind: Kind) -> bool:
    hold = view.hold(node_id)
    drained = hold is not None and hold.kind == "drain"
    return drained if kind == "drain" else not drained and view.quarantine_reason(node_id) is None


def _drained(view: View, node_id: str, before: Role, changed: bool) -> Held:
    """Tells what happens to the slot, if the node holds one."""
    member = _member(view, node_id)
    role, decision, head = node_role(view, member), next_decision(view), view.head()
    successor = None
    if role.name == "active" and isinstance(decision, Commit):
        plan = decision.plan
        holder = plan.active[role.slot].node_id if role.slot is not None and role.slot < len(plan.active) else node_id
        successor = holder if holder != node_id else None
    parked = f"{node_id} counts as quarantined until it is readmitted (lmres readmit {node_id})"
    if recovery_policy(view.config).quarantined == "exit":
        parked = f"the agent of {node_id} then ends with exit code 69 (recovery.quarantined is exit)"
    if role.name == "active" and successor is not None:
        message = f"standby {successor} takes slot {role.slot} from {node_id} at once; {parked}"
    elif role.name == "active":
        message = (
            f"no standby is free: training goes on with {node_id} in slot {role.slot} until one joins; then {parked}"
        )
    elif role.name == "gone":
        message = f"{node_id} is gone; if it comes back, {parked}"
    else:
        message = f"{node_id} is given no slot from now on; {parked}"
    generation = head.generation if head is not None else 0
    return Held(
        node_id=node_id,
        kind="drain",
        changed=changed,
        role_before=before.name,
        role=role.name,
        generation=generation,
        message=message if changed else f"{node_id} is being drained already: {message}",
        replaced_by=successor,
    )


def _readmitted(view: View, node_id: str, before: Role, changed: bool) -> Held:
    role, head = node_role(view, _member(view, node_id)), view.head()
    if not changed:
        message = f"{node_id} is not held back: it is {_as_text(role)}"
    elif role.name == "active":
        message = f"{node_id} keeps slot {role.slot}: it is not drained any more"
    elif role.name == "gone":
        message = f"{node_id} is gone; when its agent is started again it may join"
    elif role.name == "dismissed":
        message = f"{node_id} is not held back any more, but its agent ends: {role.reason}"
    else:
        message = f"{node_id} is {_as_text(role)} again"
    crowded = _too_many(view) if changed else []
    if crowded:
        assert view.config is not None
        message += f"; the run takes {view.config.max_nodes} agents, so these end with exit code 64: {names(crowded)}"
    return Held(
        node_id=node_id,
        kind="readmit",
        changed=changed,
        role_before=before.name,
        role=role.name,
        generation=head.generation if head is not None else 0,
        message=message,
    )


def _as_text(role: Role) -> str:
    return {"active": f"active in slot {role.slot}", "joined": "waiting for the run to start"}.get(
        role.name, f"a {role.name}" if role.name == "standby" else role.name
    )


def _too_many(view: View) -> list[str]:
    """Standbys beyond MAX: each counts the agents that registered before it (``Joining.leave_if_too_many``)."""
    config = view.config
    counted = [m for m in view.live_members() if view.quarantine_reason(m.node_id) is None]
    late = counted[config.max_nodes :] if config is not None and config.max_nodes > 0 else []
    return [m.node_id for m in late if node_role(view, m).name != "active"]


# -- the commands -----------------------------------------------------------------------------------------------------


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="node id, as lmres status shows it")
    parser.add_argument("--reason", metavar="TEXT", help="kept with the record and shown to everybody")
    add_run_options(parser)


def _runner(kind: Kind) -> Callable[[argparse.Namespace, Output], int]:
    def run(arguments: argparse.Namespace, output: Output) -> int:
        selection = select_run(arguments)
        reason = checked_reason(arguments.reason, f"lmres {kind} by {operator()}")
        with Observer(selection) as observer:
            held = hold_node(observer, arguments.node, kind, reason)
        output.emit(held.value(), "\n".join(wrap(clean(held.message, 2000), width=columns())))
        return 0

    return run


DRAIN = Command(
    name="drain",
    help="take a node out of use: a standby replaces it, and it stays aside until it is readmitted",
    configure=_configure,
    run=_runner("drain"),
)
READMIT = Command(
    name="readmit",
    help="let a drained or quarantined node be used again",
    configure=_configure,
    run=_runner("readmit"),
)
