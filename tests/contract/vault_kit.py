"""Vaults and their workers for tests: real processes, images whose every byte tells their step, bounded waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmres.gemini.edge.client import Grant, Restored, WorkerVault
from lmres.gemini.edge.vault import SOCKET_NAME, Vault
from lmres.gemini.inventory import Copy
from lmres.gemini.session import Assignment, Peer, Prepare

BOUND_S = 30.0
RUN = "run-1"
LOG_LINE_BYTES = 16


def until(condition: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> Any:
    end_s = time.monotonic() + bound_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.003)
    raise AssertionError(f"not within {bound_s} s: {what}")


class Node:
    """One vault and its agent's end."""

    def __init__(self, folder: Path, name: str = "n0", **options: Any) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.options = options
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.vault = self.start()

    def start(self) -> Vault:
        return Vault.start(
            state_dir=self.folder,
            run_id=RUN,
            node_id=self.name,
            address="127.0.0.1",
            on_event=lambda kind, fields: self.events.append((kind, fields)),
            **self.options,
        )

    @property
    def path(self) -> Path:
        return self.folder / SOCKET_NAME

    @property
    def peer(self) -> Peer:
        return Peer(node_id=self.name, address=self.vault.address, port=self.vault.port)

    def told(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields for found, fields in list(self.events) if found == kind]

    def assign(self, generation: int, *ranks: int, **fields: Any) -> None:
        base: dict[str, Any] = {"world_size": max(1, len(ranks)), "topology": "t", "members": (self.name,)}
        self.vault.assign(Assignment(generation=generation, ranks=ranks, **(base | fields)))

    def connect(self, rank: int, generation: int) -> WorkerVault:
        return WorkerVault.connect(self.path, rank=rank, generation=generation)

    def status(self) -> dict[str, Any]:
        return self.vault.status()

    def safe_step(self) -> int:
        safe = self.status()["safe"]
        return -1 if safe is None else int(safe[0])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.vault.end()


def shared_bytes(step: int, size: int, rank: int = 0) -> bytes:
    """Every eight bytes tell rank and step."""
    word = (step * 1000 + rank).to_bytes(8, "little")
    return word * (size // 8)


def own_bytes(step: int, rank: int, size: int) -> bytes:
    word = (step * 1000 + 500 + rank).to_bytes(8, "little")
    return word * (size // 8)


def log_bytes(step: int, rank: int) -> bytes:
    """The log after this step: a line per step from 1."""
    return b"".join(f"{rank:4d} {n:10d}\n".encode() for n in range(1, step + 1))


def wait_grant(worker: WorkerVault, step: int | None = None) -> Grant:
    return until(lambda: worker.poll_grant(step), f"a grant for rank {worker.rank}")  # type: ignore[no-any-return]


def capture(
    worker: WorkerVault,
    step: int,
    *,
    size: int = 1 << 20,
    own: int = 4096,
    alike: bool = False,
    grant: Grant | None = None,
) -> None:
    """Writes and seals the image of a step. ``alike``: the shared part is the same for all ranks."""
    grant = grant or wait_grant(worker)
    rank = worker.rank
    grant.shared[:size] = shared_bytes(step, size, 0 if alike else rank)
    grant.own[:own] = own_bytes(step, rank, own)
    log = log_bytes(step, rank)
    worker.log[: len(log)] = log
    worker.seal(grant, step=step, shared_length=size, own_length=own, log_length=len(log), topology="t")


def check_whole(copy: Restored, rank: int, log: memoryview, *, alike: bool = False) -> None:
    step = copy.step
    assert bytes(copy.shared) == shared_bytes(step, len(copy.shared), 0 if alike else rank), f"torn at {step}"
    assert bytes(copy.own) == own_bytes(step, rank, len(copy.own)), f"torn at {step}"
    assert bytes(log[: copy.log_length]) == log_bytes(step, rank)


def restore(
    node: Node, generation: int, copies: tuple[Copy, ...], key: tuple[int, int], ranks: tuple[int, ...], **fields: Any
) -> None:
    """Prepares and assigns, as an agent does after a plan."""
    manifests = tuple(copy for copy in copies if (copy.step, copy.origin) == key and copy.rank in ranks)
    sources = fields.pop("sources", ())
    node.vault.prepare(
        Prepare(generation=generation, step=key[0], origin=key[1], ranks=ranks, sources=sources, manifests=manifests)
    )
    node.assign(generation, *ranks, safe=key, **fields)


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.contract.vault_kit import capture, wait_grant
from lmres.gemini.edge.client import WorkerVault
path, rank, generation, first, size = sys.argv[2], *map(int, sys.argv[3:7])
worker = WorkerVault.connect(path, rank=rank, generation=generation)
worker.reserve(shared_bytes=size, own_bytes=4096)
step = first
print("up", flush=True)
while True:
    capture(worker, step, size=size, grant=wait_grant(worker))
    step += 1
"""


def start_writer(node: Node, *, rank: int, generation: int, first: int, size: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    arguments = [root, str(node.path), *map(str, (rank, generation, first, size))]
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(BOUND_S)
    if process.stdout is not None:
        process.stdout.close()


def open_segments(pid: int, size: int) -> list[int]:
    """Descriptors of a vault's segments of about this size, opened through its process."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:lmres (deleted)" in str(entry.readlink()) and size <= entry.stat().st_size < size + (1 << 16):
                found.append(os.open(entry, os.O_RDWR))
    return found


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def threads_left() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("lmres-vault")}
