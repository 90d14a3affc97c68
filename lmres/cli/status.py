"""``lmres status``: what a run is doing now, and what each node is in it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lmres.cli.command import Command, Output
from lmres.cli.heartbeats import Heartbeat, watch_heartbeats
from lmres.cli.observer import Observer, Snapshot
from lmres.cli.run_selection import RunSelection, add_run_options, select_run
from lmres.cli.run_view import (
    all_members,
    checkpointing,
    is_over,
    is_watched,
    node_role,
    recovery_policy,
    run_state,
)
from lmres.cli.text import clean, columns, size_text, table, wrap
from lmres.rendezvous.codec import to_plain
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Member, Ready, RunConfig, View

MAX_INTERVAL_MS = 60_000
MAX_LOCAL_WORLD_SIZE = 4096
MAX_LISTED = 10


def status_value(selection: RunSelection, snapshot: Snapshot, heartbeats: Mapping[str, Heartbeat]) -> dict[str, Any]:
    """The status as JSON values."""
    view = snapshot.view
    config, head, state, stop = view.config, view.head(), run_state(view), view.stop_request()
    size = _local_world_size(config)
    ready = view.ready(head.generation) if head is not None else {}
    nodes = [_node(m, snapshot, heartbeats, ready.get(m.node_id)) for m in all_members(view)]
    nodes.sort(key=lambda n: (n["slot"] is None or n["role"] == "gone", n["role"], n["slot"] or 0, n["node_id"]))
    roles = Counter(n["role"] for n in nodes)
    return {
        "run_id": selection.run_id,
        "endpoint": selection.endpoint,
        "store_type": selection.store_type,
        "state": state.name,
        "reason": state.reason,
        "generation": head.generation if head is not None else 0,
        "plan": _plan(head),
        "world_size": len(head.active) * size if head is not None and size is not None else None,
        "min_nodes": config.min_nodes if config is not None else None,
        "max_nodes": config.max_nodes if config is not None else None,
        "local_world_size": size,
        "step": max((n["step"] for n in nodes if n["role"] == "active" and n["step"] is not None), default=None),
        "standbys": roles["standby"],
        "stop_requested": stop.reason if stop is not None else None,
        "nodes": nodes,
        "findings": _findings(snapshot.view, head),
        "not_covered": not_covered(config, roles["standby"]),
        "unreadable": unreadable(snapshot),
    }


def _local_world_size(config: RunConfig | None) -> int | None:
    """None also where it can not be: what a store holds must not make us count for ever."""
    return (
        config.local_world_size if config is not None and 0 < config.local_world_size <= MAX_LOCAL_WORLD_SIZE else None
    )


def _plan(head: Plan | None) -> dict[str, Any] | None:
    if head is None:
        return None
    return {
        "plan_id": head.plan_id,
        "action": head.action,
        "failure_class": head.failure_class,
        "reason": head.reason,
        "exit_code": head.exit_code,
    }


def _node(
    member: Member, snapshot: Snapshot, heartbeats: Mapping[str, Heartbeat], ready: Ready | None
) -> dict[str, Any]:
    view = snapshot.view
    role, head, size = node_role(view, member), view.head(), _local_world_size(view.config) or 0
    heartbeat, beat = heartbeats.get(member.node_id), snapshot.leases.get(member.node_id)
    lease = beat.lease if beat is not None else None
    mine = lease is not None and lease.incarnation == member.incarnation
    current = role.name == "active" and mine
    return {
        "node_id": member.node_id,
        "role": role.name,
        "slot": role.slot,
        "reason": role.reason,
        "ranks": [] if role.slot is None else list(range(role.slot * size, (role.slot + 1) * size)),
        "host": member.host,
        "address": member.address,
        "pid": member.pid,
        "heartbeat_age_s": heartbeat.age_s if heartbeat is not None else None,
        "heartbeat_moved": heartbeat.moved if heartbeat is not None else None,
        "step": lease.step if lease is not None and current else None,
        "state": to_plain(lease.keeping) if lease is not None and mine and lease.keeping is not None else None,
        "failure_domain": member.failure_domain,
        "strikes": sum(s.node_id == member.node_id for s in head.strikes) if head is not None else 0,
        "restarts_left": ready.restarts_left if ready is not None else None,
        "state_dir": member.state_dir,
    }


def _findings(view: View, head: Plan | None) -> list[dict[str, Any]]:
    """What has been noticed in this generation and calls for no recovery."""
    found = [e for e in view.evidence(head.generation) if e.reaction != "recover"] if head is not None else []
    return [
        {
            "failure_class": e.cause.failure_class,
            "node_id": e.cause.node_id,
            "rank": e.cause.rank,
            "detail": e.cause.headline(),
            "reaction": e.reaction,
        }
        for e in found
    ]


def not_covered(config: RunConfig | None, standbys: int) -> list[str]:
    """What a failure costs all the same, in this version and with these settings."""
    lines = []
    if not is_watched(config):
        lines.append("hangs, stragglers, silent corruption and sick hosts are not looked for (detection is off)")
    elif not checkpointing(config).enabled:
        lines.append("silent corruption is not looked for: the checks are made on the captured state")
    if config is not None and config.policy is None:
        lines.append("no policy was given: nothing is attached inside the workers, exceptions and steps are not seen")
    if not checkpointing(config).enabled:
        lines.append(
            "training state is not kept: after a failure the program starts at its own checkpoint, or at step 0"
        )
    if standbys == 0:
        then = "the run waits for one to join" if recovery_policy(config).on_no_standby == "wait" else "the run ends"
        lines.append(f"there is no standby: when a node is lost {then}")
    return lines


def unreadable(snapshot: Snapshot) -> list[dict[str, str]]:
    """Records that nobody can act on."""
    found = [{"key": key, "problem": problem} for key, problem in sorted(snapshot.view.problems.items())]
    leases = snapshot.view.keys.leases
    found += [
        {"key": f"{leases}{node_id}", "problem": "not a Lease record"}
        for node_id, beat in sorted(snapshot.leases.items())
        if beat.lease is None
    ]
    return found


# -- for people -------------------------------------------------------------------------------------------------------


def render_status(value: Mapping[str, Any], width: int) -> str:
    """The same for people."""
    state = str(value["state"]).replace("_", " ")
    lines = wrap(f"run {clean(value['run_id'])} at {clean(value['endpoint'])}: {state}", width=width)
    lines += wrap(clean(value["reason"], 2000), width=width, indent="  ")
    if value["stop_requested"] is not None and state not in ("succeeded", "failed"):
        lines += wrap(f"to be stopped: {clean(value['stop_requested'])}", width=width, indent="  ")
    lines += ["", *_summary(value, width), ""]
    lines += _node_lines(value, width)
    for title, texts in (
        ("noticed", [f"{f['failure_class']}: {f['detail']}" for f in value["findings"]]),
        ("not covered", value["not_covered"]),
    ):
        lines += ["", title] if texts else []
        for text in texts:
            lines += wrap(clean(text, 500), width=width, indent="- ", hanging="  ")
    return "\n".join(lines + unreadable_lines(value["unreadable"], width))


def _summary(value: Mapping[str, Any], width: int) -> list[str]:
    lines = []
    plan = value["plan"]
    if plan is not None:
        lines.append(f"generation  {value['generation']} ({plan['action']}, plan {clean(plan['plan_id'], 60)})")
        lines += wrap(clean(plan["reason"], 2000), width=width, indent=" " * 12)
    if value["min_nodes"] is not None:
        shape = f"{value['min_nodes']} nodes x {value['local_world_size'] or '?'}"
        limit = f"{value['standbys']} standby, at most {value['max_nodes']} nodes"
        lines.append(f"world size  {value['world_size'] or '-'} ({shape}; {limit})")
    if value["step"] is not None:
        lines.append(f"step        {value['step']}")
    return lines


def _node_lines(value: Mapping[str, Any], width: int) -> list[str]:
    nodes = value["nodes"]
    if not nodes:
        return ["no node has registered"]
    domains = any(n["failure_domain"] != n["node_id"] for n in nodes)
    header = ["NODE", "ROLE", "RANKS", "HOST", "ADDRESS", "PID", "HEARTBEAT", "STEP", "STRIKES"]
    rows = [[*header, "DOMAIN"] if domains else header]
    for n in nodes:
        row = [
            clean(n["node_id"], 128),
            _role_text(n),
            _ranks_text(n["ranks"]),
            clean(n["host"], 128),
            clean(n["address"], 128),
            str(n["pid"]),
            _age_text(n),
            "-" if n["step"] is None else str(n["step"]),
            str(n["strikes"]),
        ]
        rows.append([*row, clean(n["failure_domain"], 128)] if domains else row)
    lines = table(rows, width=width, shrink=(3, 4, 9) if domains else (3, 4))
    lines += _state_lines(nodes, width)
    notes = [(n["node_id"], n["reason"]) for n in nodes if n["reason"]]
    notes += [
        (n["node_id"], "no restarts left (--max-restarts): the next fault of a worker here ends its agent")
        for n in nodes
        if n["restarts_left"] == 0 and n["role"] == "active"
    ]
    for node_id, reason in notes:
        lines += wrap(f"{clean(node_id, 128)}: {clean(reason)}", width=width, indent="  ", hanging="    ")
    return lines


def _state_lines(nodes: list[dict[str, Any]], width: int) -> list[str]:
    kept = [(n["node_id"], n["state"]) for n in nodes if n["state"] is not None]
    if not kept:
        return []
    rows = [["STATE IN MEMORY", "SAFE STEP", "VERIFIED", "COPIES", "USED", "LIMIT", "DURABLE STEP"]]
    rows += [
        [
            clean(node_id, 128),
            _step_text(state["safe_step"]),
            _step_text(state["verified_step"]),
            f"{state['copies']} of {state['copies_wanted']}",
            size_text(state["memory_bytes"]),
            size_text(state["memory_limit_bytes"]),
            _step_text(state["durable_step"]),
        ]
        for node_id, state in kept
    ]
    lines = ["", *table(rows, width=width, shrink=(0,))]
    for node_id, state in kept:
        if state["problem"]:
            lines += wrap(f"{clean(node_id, 128)}: {clean(state['problem'])}", width=width, indent="  ", hanging="    ")
    return lines


def _step_text(step: int | None) -> str:
    return "-" if step is None else str(step)


def _role_text(node: Mapping[str, Any]) -> str:
    slot = node["slot"]
    if node["role"] == "active":
        return f"active slot {slot}"
    return node["role"] if slot is None else f"{node['role']} (slot {slot})"


def _ranks_text(ranks: list[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _age_text(node: Mapping[str, Any]) -> str:
    if node["heartbeat_age_s"] is None:
        return "-"
    return f"{'' if node['heartbeat_moved'] else '> '}{node['heartbeat_age_s']:.1f} s"


def unreadable_lines(found: list[dict[str, str]], width: int) -> list[str]:
    if not found:
        return []
    lines = ["", f"{len(found)} unreadable, ignored by everybody"]
    for item in found[:MAX_LISTED]:
        lines += wrap(
            f"{clean(item['key'], 200)}: {clean(item['problem'], 200)}", width=width, indent="- ", hanging="  "
        )
    if len(found) > MAX_LISTED:
        lines.append(f"- and {len(found) - MAX_LISTED} more (--json has all)")
    return lines


# -- the command ------------------------------------------------------------------------------------------------------


def read_status(observer: Observer) -> tuple[Snapshot, dict[str, Heartbeat]]:
    """Watches the heartbeats of the live nodes, then reads all records."""
    snapshot = observer.read()
    live = [m.node_id for m in snapshot.view.live_members()]
    if is_over(snapshot.view) or not live:
        return snapshot, {}
    config = snapshot.view.config
    interval_ms = config.heartbeat_interval_ms if config is not None else 500
    interval_s = min(MAX_INTERVAL_MS, max(0, interval_ms)) / 1000
    heartbeats = watch_heartbeats(observer.read_leases, snapshot.leases, nodes=live, interval_s=interval_s)
    return observer.read(), heartbeats


def _run(arguments: argparse.Namespace, output: Output) -> int:
    selection = select_run(arguments)
    with Observer(selection) as observer:
        snapshot, heartbeats = read_status(observer)
    value = status_value(selection, snapshot, heartbeats)
    output.emit(value, render_status(value, columns()))
    return 0


COMMAND = Command(
    name="status", help="what a run is doing now, and what each node is in it", configure=add_run_options, run=_run
)
