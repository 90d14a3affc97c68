"""The policy: what a run wants done about failures, as one immutable tree.

Every agent of a run must act by the same policy, else two agents decide differently about the same evidence.
So it is read once at start, strictly (a typo that is ignored is a protection that is silently off), published
with its digest, and compared field by field when agents differ. Each field is declared once, below: the
parser, the defaults and the JSON Schema follow from that declaration. Durations are local monotonic time.
"""

# ruff: noqa: RUF009 - the calls in the defaults declare fields: they return dataclass fields.

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import yaml

from lmres.fields import (
    Section,
    as_dict,
    choice,
    choices,
    constant,
    count,
    factor,
    flag,
    fraction,
    json_schema,
    optional_text,
    seconds,
    section,
    shown,
)
from lmres.strict_yaml import StrictDumper, read_section

SCHEMA_VERSION: Final = 1
MIN_HEARTBEATS_PER_TIMEOUT: Final = 3
"""Below three, one lost packet and one late thread together look like a dead node."""

Auto: TypeAlias = Literal["auto"]
AUTO: Final[Auto] = "auto"

Mode: TypeAlias = Literal["restart", "quorum"]
Resume: TypeAlias = Literal["auto", "framework", "env", "fast_forward", "none"]
Reaction: TypeAlias = Literal["report", "replace"]
HealthCheck: TypeAlias = Literal["memory", "disk", "cpu", "gpu", "network"]
OnNoStandby: TypeAlias = Literal["wait", "shrink", "fail"]
Quarantined: TypeAlias = Literal["park", "exit"]
World: TypeAlias = Literal["fixed", "dynamic"]
Algorithm: TypeAlias = Literal["ddp", "local_sgd", "diloco"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Section):
    interval_s: float = seconds(0.5, "Time between two beats of an agent's lease.", minimum=0.01)
    timeout_s: float = seconds(
        5.0, "A lease that has not moved for this long is lost; at least 3 times interval_s.", minimum=0.03
    )

    def cross_check(self) -> Iterator[tuple[str, str]]:
        least = MIN_HEARTBEATS_PER_TIMEOUT * self.interval_s
        # Relative slack: 3 * 0.1 is 0.30000000000000004, and a user who wrote 0.3 is right.
        if self.timeout_s < least * (1 - 1e-9):
            yield (
                "timeout_s",
                f"found {self.timeout_s:g} with interval_s {self.interval_s:g}; allowed: at least "
                f"{MIN_HEARTBEATS_PER_TIMEOUT} * interval_s = {least:g}, so that one late beat is not "
                f"taken for a dead node; raise timeout_s or lower interval_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Section):
    stop_grace_s: float = seconds(5.0, "From SIGTERM to SIGKILL, for the whole process tree of a worker.")
    warm: bool = flag(True, "Keep worker processes with the training stack imported ready on every agent.")
    resume: Resume = choice(Resume, "auto", "How an unchanged program gets back to its step.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable(Section):
    directory: str | None = optional_text("Folder of durable checkpoints, shared by all hosts; null: none.")
    interval_steps: int = count(100, "Optimizer steps between two durable checkpoints.")
    keep: int = count(2, "Durable checkpoints kept.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Section):
    enabled: bool = flag(True, "Keep checkpoints in host memory.")
    interval_steps: int | Auto = count(
        1,
        "Optimizer steps between two captures; auto: the shortest interval within overhead_budget.",
        words=(AUTO,),
    )
    overhead_budget: float = fraction(0.01, "Fraction of the step time that captures may cost.")
    replicas: int = count(2, "Copies in host memory, on different failure domains, the own one included.", maximum=64)
    memory_limit_fraction: float = fraction(0.5, "Fraction of the host's available memory that may be used.")
    durable: Durable = section(Durable, "Checkpoints on disk.")

    def cross_check(self) -> Iterator[tuple[str, str]]:
        every = self.interval_steps
        if self.durable.directory is not None and every != AUTO and self.durable.interval_steps < every:
            yield (
                "durable.interval_steps",
                f"found {self.durable.interval_steps}; allowed: at least checkpoint.interval_steps = "
                f"{every}, because a durable checkpoint is written from a captured one",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(Section):
    slowdown: float = factor(1.5, "A rank this many times slower than its peers straggles.", above=1, maximum=1e6)
    windows: int = count(3, "Windows in a row in which it must be slow.")
    action: Reaction = choice(Reaction, "report", "What is done about it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption(Section):
    interval_steps: int = count(10, "Optimizer steps between two replays; captured states are compared each time.")
    replay: bool = flag(True, "Compute parts of the model anew, and compare what comes of it between equals.")
    action: Reaction = choice(Reaction, "replace", "What is done about it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(Section):
    interval_s: float = seconds(5.0, "Time between two health checks of a host.", minimum=0.1)
    checks: tuple[HealthCheck, ...] = choices(
        HealthCheck, ("memory", "disk", "cpu", "gpu", "network"), "Built-in checks that run."
    )
    command: str | None = optional_text("A command of the site; an exit code other than 0 means unhealthy.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection(Section):
    enabled: bool = flag(True, "Look for hangs, stragglers, corruption and unhealthy hosts.")
    hang_timeout_s: float | Auto = seconds(
        AUTO,
        "Time without a step that counts as a hang; auto: from observed steps.",
        minimum=0.1,
        words=(AUTO,),
    )
    straggler: Straggler = section(Straggler, "Ranks that are slow.")
    corruption: Corruption = section(Corruption, "Silent corruption of data.")
    health: Health = section(Health, "Health of hosts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery(Section):
    evidence_window_s: float = seconds(0.5, "Wait for more evidence before deciding.")
    node_strikes: int = count(2, "Process faults on one node before it is replaced.")
    strikes_window_s: float = seconds(3600.0, "Time after which a strike no longer counts.", minimum=1)
    no_progress_limit: int = count(3, "Generations without a new step before the run is ended.")
    on_no_standby: OnNoStandby = choice(OnNoStandby, "wait", "What to do when a node is lost and no standby is left.")
    quarantined: Quarantined = choice(Quarantined, "park", "What a quarantined node's agent does.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum(Section):
    min_replicas: int = count(1, "Replicas without which no step is committed.")
    replica_nodes: int = count(1, "Nodes in one replica.")
    world: World = choice(World, "fixed", "fixed: standbys fill up to MIN nodes; dynamic: any number of replicas.")
    algorithm: Algorithm = choice(Algorithm, "ddp", "How replicas are kept equal.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe(Section):
    prometheus_port: int = count(0, "Port of the metrics endpoint; 0: none.", minimum=0, maximum=65535)
    log_level: LogLevel = choice(LogLevel, "info", "Least severe message that is logged.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Section):
    """The whole policy. ``Policy()`` is the effective policy of a file that holds only the schema version."""

    schema_version: int = constant(SCHEMA_VERSION, "Version of this format.")
    mode: Mode = choice(Mode, "restart", "restart: the group restarts as one; quorum: replicas come and go.")
    heartbeat: Heartbeat = section(Heartbeat, "Liveness of agents.")
    workers: Workers = section(Workers, "Worker processes.")
    checkpoint: Checkpoint = section(Checkpoint, "Protection of the training state.")
    detection: Detection = section(Detection, "Detection and localization of failures.")
    recovery: Recovery = section(Recovery, "Decisions about failures.")
    quorum: Quorum = section(Quorum, "Settings of mode quorum.")
    observe: Observe = section(Observe, "Logs and metrics.")


def parse_policy(text: str, *, source: str) -> Policy:
    """Reads a policy; ``source`` names it in messages.

    Raises ConfigError that lists every problem (the first 20): line, field, value and what is allowed.
    """
    return read_section(text, Policy, source=source)


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """The effective policy as plain data, in the order of declaration."""
    return as_dict(policy)


def policy_to_yaml(policy: Policy) -> str:
    """The effective policy as text that ``parse_policy`` reads back to an equal one."""
    return yaml.dump(policy_to_dict(policy), Dumper=StrictDumper, sort_keys=False, width=1 << 20)


def policy_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a policy file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "lmres policy"}
    return {**head, **json_schema(Policy)}


def policy_digest(policy: Policy) -> str:
    """SHA-256 of the effective policy: equal on every host and Python exactly when the policies are equal."""
    canonical = json.dumps(policy_to_dict(policy), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff_policies(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What differs between two policies as dicts, sorted: one ``dotted.field: mine X, theirs Y`` each.

    ``theirs`` may come from another version: a field that one side does not have is shown as absent.
    """
    left, right = dict(_flatten(mine, "")), dict(_flatten(theirs, ""))
    lines = []
    for name in sorted(left.keys() | right.keys()):
        ours = shown(left[name]) if name in left else "absent"
        other = shown(right[name]) if name in right else "absent"
        # Compared with their types: 1, 1.0 and True are equal in Python but not in a policy.
        if ours != other or left.get(name) != right.get(name):
            lines.append(f"{name}: mine {ours}, theirs {other}")
    return lines


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
