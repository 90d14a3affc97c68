"""Real torchrun agents on this host, each with its own node id and state folder, and ways to hurt them.

Everything a cluster starts is ended by ``close``, by pid; what is left over afterwards fails the test that asks
(``leftovers``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRAM = Path(__file__).parent / "programs" / "ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BOUND_S = 90.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float = BOUND_S) -> Any:
    """The condition's first true value. Fails with what was waited for."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s:.0f} s for: {what}")


@dataclass
class Node:
    """One torchrun agent."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def events(self, name: str | None = None, **match: Any) -> list[dict[str, Any]]:
        path = self.folder / "state" / "events.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [
            e for e in lines if (name is None or e["event"] == name) and all(e.get(k) == v for k, v in match.items())
        ]

    def wait_event(self, name: str, timeout_s: float = BOUND_S, **match: Any) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            hits = self.events(name, **match)
            return hits[0] if hits else None

        try:
            return wait_until(f"event {name} {match} of {self.name}", found, timeout_s)
        except AssertionError as error:
            # What it waits for may have been prevented at another node.
            logs = sorted(self.folder.parent.glob("*/log.txt"))
            told = "\n".join(f"--- {p.parent.name}:\n{p.read_text(errors='replace')[-4000:]}" for p in logs)
            raise AssertionError(f"{error}\n{told}") from None

    def worker_pids(self, generation: int) -> list[int]:
        return list(self.wait_event("generation_started", generation=generation)["pids"])

    def starts(self) -> list[tuple[str, str, str]]:
        """(generation, torch's restart count, rank) of each worker start, from the program's own words."""
        return [tuple(line.split()[1:4]) for line in self.log.splitlines() if line.startswith("start ")]  # type: ignore[misc]

    def wait_step(self, step: int, timeout_s: float = BOUND_S) -> None:
        """Until rank 0, if it is here, has printed this step."""
        words = f"step {step}"
        wait_until(
            f"{words} of {self.name}",
            lambda: any(line == words or line.startswith(f"{words} ") for line in self.log.splitlines()),
            timeout_s,
        )

    def wait_exit(self, timeout_s: float = BOUND_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {timeout_s} s\n--- log:\n{self.log[-4000:]}") from None

    def kill(self) -> None:
        """SIGKILL to the agent alone."""
        self.process.kill()

    def kill_node(self) -> float:
        """SIGKILL to the agent and all its descendants at once: a host that loses power. Returns the time."""
        victims = [self.process.pid, *(c.pid for c in psutil.Process(self.process.pid).children(recursive=True))]
        store = store_pid_of(self)
        for pid in victims:
            if pid != store:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return time.time()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def store_pid_of(node: Node) -> int | None:
    """The store process that this agent started, from its log."""
    for line in node.log.splitlines():
        if "hosts the store at" in line:
            return int(line.rsplit("pid ", 1)[1].rstrip(")"))
    return None


@dataclass
class Cluster:
    """Agents of one run. ``policy`` None: no policy file."""

    folder: Path
    nnodes: str = "2:3"
    nproc: int = 1
    max_restarts: int = 3
    endpoint: str = ""
    store_type: str = "tcp"
    policy: str | None = ""
    env: dict[str, str] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    program: list[str] = field(default_factory=lambda: [str(PROGRAM)])
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.endpoint:
            self.endpoint = str(self.folder / "store") if self.store_type == "file" else f"127.0.0.1:{free_port()}"
        if self.policy is not None:
            text = "schema_version: 1\n" + self.policy
            (self.folder / "policy.yaml").write_text(text)

    def start(
        self,
        name: str,
        *,
        conf: dict[str, str] | None = None,
        args: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        policy: str | None = None,
        prefix: list[str] | None = None,
    ) -> Node:
        count = sum(n == name or n.startswith(f"{name}#") for n in self.nodes)
        key = name if count == 0 else f"{name}#{count}"
        folder = self.folder / key
        folder.mkdir()
        options = {"store_type": self.store_type, "node_id": name, "state_dir": str(folder / "state")}
        path = self.folder / "policy.yaml"
        if policy is not None:
            path = folder / "policy.yaml"
            path.write_text("schema_version: 1\n" + policy)
        if self.policy is not None or policy is not None:
            options["lm_resiliency_worker_config"] = str(path)
        options.update(conf or {})
        flags = {
            "--nnodes": self.nnodes,
            "--nproc-per-node": str(self.nproc),
            "--max-restarts": str(self.max_restarts),
            "--rdzv-backend": "lm_resiliency",
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.run_id,
            "--rdzv-conf": ",".join(f"{k}={v}" for k, v in options.items()),
        }
        flags.update(args or {})
        command = [*(prefix or []), *TORCHRUN, *(f"{k}={v}" for k, v in flags.items()), *self.program]
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env, **(env or {})},
                start_new_session=True,
            )
        node = Node(name=name, folder=folder, process=process)
        self.nodes[key] = node
        return node

    def form(self, *names: str) -> list[Node]:
        """Starts these agents, and waits until the first MIN of them run generation 1 and the rest are parked."""
        nodes = []
        for i, name in enumerate(names):
            nodes.append(self.start(name))
            if i == 0:
                nodes[0].wait_event("agent_joined")
            elif i < len(names) - 1 or len(names) > int(self.nnodes.split(":")[0]):
                nodes[i].wait_event("agent_joined")
        active = int(self.nnodes.split(":")[0])
        for node in nodes[:active]:
            node.wait_event("generation_started", generation=1)
        for node in nodes[active:]:
            node.wait_event("agent_parked")
        return nodes

    def all_events(self, name: str, **match: Any) -> list[dict[str, Any]]:
        found = [e for n in self.nodes.values() for e in n.events(name, **match)]
        return sorted(found, key=lambda e: e["time"])

    def store_pid(self) -> int:
        pids = [p for p in map(store_pid_of, self.nodes.values()) if p is not None]
        assert len(pids) == 1, f"exactly one agent hosts the store, found {pids}"
        return pids[0]

    def leftovers(self) -> list[str]:
        """Processes of this run that still live: anything whose command line or environment names it."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            with contextlib.suppress(psutil.Error):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # The store and the guardian carry the run id in their environment, as the workers do.
                marks = " ".join(process.info["cmdline"] or []) + " ".join(process.environ().values())
                if str(self.folder) in marks or self.run_id in marks:
                    found.append(f"{process.pid}: {' '.join(process.info['cmdline'] or [])[:150]}")
        return found

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.process.pid, signal.SIGCONT)
                    os.kill(node.process.pid, signal.SIGKILL)
                node.process.wait(30)
        for node in self.nodes.values():
            pid = store_pid_of(node)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def cluster(folder: Path, **settings: Any) -> Iterator[Cluster]:
    made = Cluster(folder=folder, **settings)
    try:
        yield made
    finally:
        made.close()
