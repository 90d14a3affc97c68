"""What a worker's end says about its cause.

When one rank dies the others fail a moment later of a broken connection, so each piece of evidence carries a weight:

- ``primary``: says by itself what happened here (a kill signal, an exception of the program);
- ``ambiguous``: an exit that is as likely a consequence as a cause (exit code 1 with no report, SIGABRT of a
  communication watchdog);
- ``secondary``: an error that names a broken connection: some other rank was first.

Only this order, and within it the order of arrival, decides who is named as the first cause.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

FailureClass = Literal[
    "process_crash",
    "user_exception",
    "out_of_memory",
    "hang",
    "collective_desync",
    "straggler",
    "silent_corruption",
    "node_lost",
    "node_unhealthy",
    "drain",
    "store_lost",
    "unknown",
]
Weight = Literal["primary", "ambiguous", "secondary"]

WEIGHT_ORDER: dict[str, int] = {"primary": 0, "ambiguous": 1, "secondary": 2}

_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|timed out)|broken pipe|socket (is )?closed|remote process exited"
    r"|connection closed by peer|no route to host|network is unreachable|nccl remote error|ncclRemoteError"
    r"|read error \[|write error \[|recv(Bytes|Value)? failed|failed to recv|sendBytes failed"
    r"|connection was likely closed"
    r"|timed out waiting \d+ms for (recv|send) operation|Communicator was aborted|Connection reset by peer"
    r"|ProcessGroup\w* .*(abort|shutdown)",
    re.IGNORECASE,
)
_CONNECTION_TYPES = frozenset(
    {
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "torch.distributed.DistNetworkError",
        "torch.distributed.DistStoreError",
        "torch.DistNetworkError",
        "torch.DistStoreError",
    }
)
_OUT_OF_MEMORY_TYPES = frozenset({"MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"})
_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+)[\d, ]*\) (?:is killed by signal: Killed|exited unexpectedly)"
)
_STATE_TYPES = frozenset({"lmres.errors.VaultError", "lmres.errors.StateError"})
"""The state could not be had: nothing is wrong with the program or with the node of the worker that says so."""
_DEVICE = re.compile(
    r"CUDA error|HIP error|CUBLAS_STATUS|CUDNN_STATUS|uncorrectable ECC|ncclUnhandledCudaError|ncclSystemError"
    r"|device-side assert|illegal memory access",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The class of a failure, its weight, and one line for people. ``blames``: the worker that it comes from."""

    failure_class: FailureClass
    weight: Weight
    detail: str
    blames: bool = True


def classify_exception(*, type_name: str, message: str, out_of_memory: str = "") -> Finding:
    """``type_name`` is the qualified name without ``builtins.``; ``message`` is ``str(exception)``.
    ``out_of_memory``: how the kernel ended the process that the message is about (``killed_loader``)."""
    line = message.strip().splitlines()[0][:300] if message.strip() else ""
    detail = f"{type_name}: {line}" if line else type_name
    short = type_name.rsplit(".", 1)[-1]
    if out_of_memory:
        detail = f"a worker of the data loader was killed: {out_of_memory}; {detail}"[:400]
        return Finding(failure_class="out_of_memory", weight="primary", detail=detail)
    if type_name in _OUT_OF_MEMORY_TYPES or short == "OutOfMemoryError":
        return Finding(failure_class="out_of_memory", weight="primary", detail=detail)
    if type_name in _CONNECTION_TYPES or short in {"DistNetworkError", "DistStoreError"}:
        return Finding(failure_class="unknown", weight="secondary", detail=detail)
    if type_name in _STATE_TYPES:
        return Finding(failure_class="unknown", weight="primary", detail=detail, blames=False)
    distributed = short in {"DistBackendError", "DistError", "RuntimeError"}
    if distributed and _CONNECTION.search(message):
        return Finding(failure_class="unknown", weight="secondary", detail=detail)
    if _DEVICE.search(message):
        return Finding(failure_class="process_crash", weight="primary", detail=detail)
    return Finding(failure_class="user_exception", weight="primary", detail=detail)


def killed_loader(message: str) -> int | None:
    """The pid of the data loader's worker that was killed, as an exception of torch's says; None if it says no such
    thing."""
    found = _LOADER.search(message)
    return int(found[1]) if found is not None else None


def may_be_out_of_memory(status: int) -> bool:
    """Whether the kernel ends a process like this for want of memory: by SIGKILL, or a shell's word for it."""
    return status in (-signal.SIGKILL, 128 + signal.SIGKILL)


def classify_exit(status: int, *, out_of_memory: str = "") -> Finding:
    """``status`` as in ``Popen.returncode``: an exit code, or a negative signal number. Never 0.
    ``out_of_memory``: how it is known that the kernel ended the process for want of memory."""
    if out_of_memory:
        return Finding(failure_class="out_of_memory", weight="primary", detail=out_of_memory)
    if status < 0:
        name = _signal_name(-status)
        weight: Weight = "ambiguous" if -status in (signal.SIGABRT, signal.SIGPIPE) else "primary"
        return Finding(failure_class="process_crash", weight=weight, detail=f"killed by {name}")
    return Finding(failure_class="process_crash", weight="ambiguous", detail=f"exit code {status}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
