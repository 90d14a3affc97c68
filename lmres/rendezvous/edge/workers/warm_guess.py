"""What torch would launch on an agent that has not launched anything yet: for the warm processes of a standby.

Read from torch's own agent before its first rendezvous ends. A wrong guess does no harm: the first launch is compared
with it, is cold if they differ, and is the pattern from then on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lmres.adapters.bootstrap import bootstrap_env
from lmres.rendezvous.edge.workers.warm_fit import FILE, NULL, Launch, kinds_of


def guess_launches(agent: Any) -> dict[int, Launch]:
    """By local rank; empty where torch's agent (an ``ElasticAgent``) is not as expected or starts no command."""
    try:
        spec = agent._worker_group.spec
        if not isinstance(spec.entrypoint, str) or getattr(spec, "numa_options", None) is not None:
            return {}
        return {rank: _guess(agent, spec, rank) for rank in range(int(spec.local_world_size))}
    except (AttributeError, TypeError, ValueError, LookupError):
        return {}


def _guess(agent: Any, spec: Any, local_rank: int) -> Launch:
    from torch.distributed.elastic.utils import macros

    args = macros.substitute([str(word) for word in spec.args], str(local_rank))
    env = {**os.environ, "ROLE_NAME": spec.role, "LOCAL_WORLD_SIZE": str(spec.local_world_size)}
    env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env["LOCAL_RANK"] = str(local_rank)
    return Launch(args=(spec.entrypoint, *args), env=bootstrap_env(env), kinds=_kinds(agent._logs_specs, local_rank))


def _kinds(logs: Any, local_rank: int) -> tuple[Any, Any]:
    """As torch's ``DefaultLogsSpecs`` decides; another class of the user's may decide otherwise."""
    from torch.distributed.elastic.multiprocessing import Std

    redirected = _of(logs._redirects, local_rank, Std.NONE) | _of(logs._tee, local_rank, Std.NONE)
    chosen = not logs._local_ranks_filter or local_rank in logs._local_ranks_filter
    inherited = kinds_of((1, 2))
    out, err = (
        FILE if redirected & std == std else inherited[index] if chosen else NULL
        for index, std in enumerate((Std.OUT, Std.ERR))
    )
    return out, err


def _of(setting: Any, local_rank: int, default: Any) -> Any:
    return setting.get(local_rank, default) if isinstance(setting, Mapping) else setting
