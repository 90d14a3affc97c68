"""What an agent says of itself when it registers, and whether another's process on this host is certainly dead."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from lmres import __version__
from lmres.ids import Keys
from lmres.policy import Policy, policy_to_dict
from lmres.rendezvous.edge.host import HostIdentity
from lmres.rendezvous.edge.workers.proctree import read_process
from lmres.rendezvous.options import Options
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import Settings
from lmres.rendezvous.state import Member, RunConfig

FORM_TIMEOUT_S = 60.0


def boot_name(identity: HostIdentity) -> str:
    """Names this boot and process namespace: only within one can a pid be judged."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{identity.boot_id}/{namespace}"


def make_settings(
    options: Options,
    policy: Policy,
    *,
    with_policy: bool,
    me: Member,
    local_world_size: int,
    role: str,
) -> Settings:
    """``with_policy``: the user gave one, so all agents must have the same."""
    beat = policy.heartbeat
    config = RunConfig(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        local_world_size=local_world_size,
        role=role,
        heartbeat_interval_ms=round(beat.interval_s * 1000),
        heartbeat_timeout_ms=round(beat.timeout_s * 1000),
        policy=json.dumps(policy_to_dict(policy), sort_keys=True) if with_policy else None,
        written_by=me.node_id,
        version=__version__,
        token=uuid.uuid4().hex[:16],
    )
    return Settings(
        keys=Keys(run=options.run_key),
        me=me,
        config=config,
        recovery=policy.recovery,
        checkpointing=Checkpointing.of(policy if with_policy else None),
        watched=with_policy and policy.detection.enabled,
        join_timeout_ms=round(options.join_timeout_s * 1000),
        form_timeout_ms=round((FORM_TIMEOUT_S + policy.workers.stop_grace_s) * 1000),
    )


def make_member(
    *,
    node_id: str,
    incarnation: str,
    address: str,
    host: str,
    boot: str,
    failure_domain: str,
    state_dir: Path,
    pulse_port: int,
) -> Member:
    """This process's registration."""
    process = read_process(os.getpid())
    return Member(
        node_id=node_id,
        incarnation=incarnation,
        address=address,
        host=host,
        boot_id=boot,
        pid=os.getpid(),
        pid_start=process.started if process is not None else 0,
        failure_domain=failure_domain,
        state_dir=str(state_dir),
        pulse_port=pulse_port,
    )


def process_is_dead(member: Member, boot: str) -> bool:
    """True only where it is certain: same boot, same process namespace, and no such process."""
    if member.boot_id != boot or not boot:
        return False
    process = read_process(member.pid)
    return process is None or process.started != member.pid_start or process.state == "Z"
