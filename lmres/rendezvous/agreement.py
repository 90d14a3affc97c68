"""What all agents of a run must agree on, and how they differ where they do not."""

from __future__ import annotations

import json

from lmres.policy import diff_policies
from lmres.rendezvous.state import RunConfig


def config_difference(mine: RunConfig, theirs: RunConfig | None) -> str:
    """Names each field that differs, with both sides; empty when the agents agree."""
    if theirs is None:
        return ""
    names = {
        "min_nodes": "--nnodes (MIN)",
        "max_nodes": "--nnodes (MAX)",
        "local_world_size": "--nproc-per-node",
        "role": "--role",
        "heartbeat_interval_ms": "heartbeat.interval_s (ms)",
        "heartbeat_timeout_ms": "heartbeat.timeout_s (ms)",
    }
    found = [
        f"{label}: {getattr(mine, name)!r} here, {getattr(theirs, name)!r} there"
        for name, label in names.items()
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if mine.policy != theirs.policy:
        found += _policy_difference(mine.policy, theirs.policy)
    if not found:
        return ""
    return f"this agent and node {theirs.written_by!r}, which came first, do not agree: " + "; ".join(found)


def _policy_difference(mine: str | None, theirs: str | None) -> list[str]:
    """The policy's fields that differ, both given as JSON text."""
    if mine is None or theirs is None:
        return [f"policy: {'none' if mine is None else 'given'} here, {'none' if theirs is None else 'given'} there"]
    return [f"policy {line}" for line in diff_policies(json.loads(mine), json.loads(theirs))] or ["policy text differs"]
