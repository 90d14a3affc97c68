"""torch's view of a node: the RendezvousHandler.

A thin translation. ``next_rendezvous`` blocks until the node is in a formed group; ``num_nodes_waiting`` is positive
exactly when a newer committed plan concerns this node and its old workers are gone; ``shutdown`` says goodbye. Leaving
is by SystemExit with the documented code, or by torch's own ChildFailedError when the training failed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from lmres.errors import ConfigError, ExitCode, LmresError
from lmres.policy import Policy, diff_policies, policy_to_dict
from lmres.rendezvous.edge import torch_agent
from lmres.rendezvous.edge.node import Node
from lmres.rendezvous.edge.plugin import BACKEND
from lmres.rendezvous.edge.policy_file import load_policy
from lmres.rendezvous.edge.workers.warm_guess import guess_launches
from lmres.rendezvous.options import Options, parse_options
from lmres.rendezvous.rounds import End

log = logging.getLogger("lmres")


class LmresHandler(RendezvousHandler):  # type: ignore[misc]
    """Created once per agent; used by torch's main thread only."""

    def __init__(self, options: Options, policy: Policy | None) -> None:
        self._options = options
        self._policy = policy
        self._node: Node | None = None
        self._agent: Any | None = None
        self._pending: Node | None = Node(options, policy)
        torch_agent.install_signal_handlers(self._on_signal)

    @classmethod
    def from_parameters(cls, parameters: RendezvousParameters) -> LmresHandler:
        """Raises ConfigError for anything wrong in the options or the policy."""
        options = parse_options(
            endpoint=parameters.endpoint,
            run_id=parameters.run_id,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            local_addr=parameters.local_addr,
            config=parameters.config,
        )
        policy = None
        if options.policy_path is not None:
            policy = load_policy(Path(options.policy_path))
            refuse_unavailable(policy, options.policy_path)
        setup_logging(policy.observe.log_level if policy is not None else "info")
        if policy is not None:
            warn_of_idle_settings(policy)
        return cls(options, policy)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        # The workers of each generation make a store of their own at a new port: nothing of an old one is met again.
        return False

    def get_run_id(self) -> str:
        return self._options.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: a run ends by its records."""

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            node = self._started()
            group = node.next_group(torch_agent.restarts_left(self._agent))
        except LmresError as error:
            self._leave_with(int(error.exit_code), str(error))
        if isinstance(group, End):
            self._end(group)
        # All nodes run the same number of workers (checked at the door), so ranks follow from the slot alone.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        return RendezvousInfo(
            torch_agent.passed_barrier_store(group.world_size),
            group.slot,
            group.world_size,
            RendezvousStoreInfo(group.master_address, group.master_port),
        )

    def num_nodes_waiting(self) -> int:
        if self._node is None:
            return 0
        torch_agent.install_signal_handlers(self._on_signal)
        verdict = self._node.verdict()
        if isinstance(verdict, End):
            self._end(verdict)
        return int(verdict)

    def shutdown(self) -> bool:
        if self._node is not None:
            self._node.close(torch_agent.group_state(self._agent))
        return True

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def _started(self) -> Node:
        if self._node is None:
            self._agent = torch_agent.calling_agent()
            spec = getattr(getattr(self._agent, "_worker_group", None), "spec", None)
            assert self._pending is not None
            self._node = self._pending
            self._node.start(
                local_world_size=int(getattr(spec, "local_world_size", 1)),
                role=str(getattr(spec, "role", "default_role")),
                event_handler=str(getattr(spec, "event_log_handler", None) or "null"),
                launches=guess_launches(self._agent),
                # torch has just put its own signal handlers over ours.
                on_worker_start=lambda: torch_agent.install_signal_handlers(self._on_signal),
            )
        return self._node

    def _on_signal(self, name: str) -> None:
        if self._node is not None:
            self._node.leave_on_signal(name)

    def _end(self, end: End) -> NoReturn:
        node = self._node
        assert node is not None
        if end.cause is not None and end.exit_code in (ExitCode.TRAINING_FAILED, ExitCode.NO_PROGRESS):
            error = torch_agent.child_failed(self._name(), end.cause, node.state_dir)
            log.error("%s", end.reason)
            if end.exit_code == ExitCode.TRAINING_FAILED:
                raise error
            print(error.format_msg(), file=sys.stderr, flush=True)
            raise SystemExit(end.exit_code)
        self._leave_with(end.exit_code, end.reason)

    def _leave_with(self, code: int, reason: str) -> NoReturn:
        level = logging.INFO if code == 0 else logging.ERROR
        log.log(level, "this agent ends with exit code %d: %s", code, reason)
        raise SystemExit(code)

    def _name(self) -> str:
        spec = getattr(getattr(self._agent, "_worker_group", None), "spec", None)
        return spec.get_entrypoint_name() if spec is not None else "training"


def refuse_unavailable(policy: Policy, source: str) -> None:
    """What the policy format has but this version can not do is refused, never ignored."""
    if policy.mode != "restart":
        raise ConfigError(f"{source}: mode: {policy.mode!r} is not available in this version; allowed: restart")
    if policy.recovery.on_no_standby == "shrink":
        raise ConfigError(
            f"{source}: recovery.on_no_standby: 'shrink' is not available in this version; allowed: wait, fail"
        )


def warn_of_idle_settings(policy: Policy) -> None:
    """Settings that were given and do nothing yet are said aloud."""
    mine, default = policy_to_dict(policy), policy_to_dict(Policy())
    idle = diff_policies({"quorum": mine["quorum"]}, {"quorum": default["quorum"]})
    if policy.observe.prometheus_port:
        idle.append("observe.prometheus_port")
    if policy.workers.resume not in ("auto", "none"):
        idle.append("workers.resume")
    if idle:
        names = ", ".join(line.split(":")[0] for line in idle)
        log.warning("these settings of the policy do nothing in this version: %s", names)


def setup_logging(level: str) -> None:
    """Messages of this package go to standard error, one line each; the site's own handlers win."""
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[lmres %(asctime)s] %(message)s", datefmt="%H:%M:%S"))
        log.addHandler(handler)
        log.propagate = False
