"""A throw-away training run on this host: its agents, ways to hurt them, and what their program told.

Used by ``lmres bench`` and by the benchmarks, which run other products in the same way. What a run starts carries a
token in its environment; ``close`` ends, by pid, whatever still does, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

from lmres.errors import LmresError

PROGRAM = Path(__file__).with_name("trial_program.py")
TORCHRUN = ("-m", "torch.distributed.run")
MARK = "LMRES_TRIAL"
LOOK_S = 0.01
_LAST_LINES = 2000

T = TypeVar("T")


class TrialFailed(LmresError):
    """The throw-away run did not do what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One line of the program. ``kind``: life, group or step; ``number``: the rank, of a step its number."""

    kind: str
    number: int
    pid: int
    at_s: float
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How training went on after a fault, as seen from outside, in seconds after it.

    ``life_s``: the last of the new processes ran its first line; ``group_s``: the last of them had its process group.
    None where the processes are the old ones.
    """

    step_s: float
    life_s: float | None = None
    group_s: float | None = None


def free_port() -> int:
    """A port of the loopback address that nobody listens at now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float) -> T:
    """The condition's first true value. Raises TrialFailed with what was waited for."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(LOOK_S)
    raise TrialFailed(f"waited {timeout_s:.0f} s in vain for: {what}")


@dataclass(slots=True)
class TrialAgent:
    """One launcher process with its workers, and its log."""

    name: str
    log_path: Path
    process: subprocess.Popen[bytes]
    _read: int = 0
    _rest: bytes = b""
    _told: list[Told] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def told(self, kind: str | None = None) -> list[Told]:
        """The program's lines so far, in order."""
        with self.log_path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        self._told += [found for line in lines for found in _told(line.decode("utf-8", "replace"))]
        return [t for t in self._told if kind is None or t.kind == kind]

    def worker_pid(self) -> int:
        """Of the newest worker that is still there."""
        for told in reversed(self.told("life")):
            if psutil.pid_exists(told.pid):
                return told.pid
        raise TrialFailed(f"{self.name} has no worker; the end of its log:\n{self.log[-_LAST_LINES:]}")

    def kill_worker(self) -> float:
        """Returns the time of the fault."""
        return self._signal(self.worker_pid(), signal.SIGKILL)

    def stop_worker(self) -> float:
        """A hang: the worker is stopped. Returns the time of the fault."""
        return self._signal(self.worker_pid(), signal.SIGSTOP)

    def kill_node(self, but: Sequence[int] = ()) -> float:
        """SIGKILL to the launcher and all that it started, ``but`` these: a host that is lost. Returns the time."""
        victims = [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]
        when = time.time()
        for pid in victims:
            if pid not in but:
                self._signal(pid, signal.SIGKILL)
        return when

    def _signal(self, pid: int, number: signal.Signals) -> float:
        when = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return when


def _told(line: str) -> Iterator[Told]:
    words = line.split()
    for start in [i for i, word in enumerate(words) if word in ("life", "group", "step")][:1]:
        kind, *values = words[start:]
        with contextlib.suppress(ValueError, IndexError):
            number, pid, at_s = int(values[0]), int(values[1]), float(values[2])
            yield Told(kind=kind, number=number, pid=pid, at_s=at_s, more=tuple(values[3:]))


def _ended(number: int, _frame: object) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):  # once: another must not interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


@dataclass(slots=True)
class Trial:
    """The agents of one run. A context manager, for the main thread: leaving it ends them all, a signal too."""

    folder: Path
    agents: list[TrialAgent] = field(default_factory=list)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _handlers: dict[signal.Signals, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Trial:
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _ended)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> TrialAgent:
        path = self.folder / f"{name}.log"
        # The caller may itself run under torchrun or with its variables set.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
        full = {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {}), MARK: self.token}
        with path.open("wb") as out:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=full, start_new_session=True
            )
        agent = TrialAgent(name=name, log_path=path, process=process)
        self.agents.append(agent)
        return agent

    def told(self, kind: str) -> list[Told]:
        return [t for agent in self.agents for t in agent.told(kind)]

    def wait_training(self, workers: int, timeout_s: float) -> None:
        """Until so many processes have made a step, and nobody has ended."""

        def training() -> bool:
            ended = [a for a in self.agents if a.process.poll() is not None]
            if ended:
                code, log = ended[0].process.returncode, ended[0].log[-_LAST_LINES:]
                raise TrialFailed(f"{ended[0].name} ended with exit code {code}; the end of its log:\n{log}")
            return len({t.pid for t in self.told("step")}) >= workers

        wait_for(f"the first step of {workers} workers", training, timeout_s)

    def resumed(self, fault_s: float, timeout_s: float) -> Resumed | None:
        """Waits for the first step of a process that had made none before the fault; None if there is none in time.

        The processes of a group make their steps together, so the first of any rank counts.
        """
        before = {t.pid for t in self.told("step") if t.at_s <= fault_s}

        def next_step() -> Told | None:
            new = [t for t in self.told("step") if t.pid not in before and t.at_s > fault_s]
            return min(new, key=lambda t: t.at_s, default=None)

        try:
            step = wait_for("the next step", next_step, timeout_s)
        except TrialFailed:
            return None
        spans = [self._last("life", fault_s, step.at_s), self._last("group", fault_s, step.at_s)]
        return Resumed(step_s=step.at_s - fault_s, life_s=spans[0], group_s=spans[1])

    def _last(self, kind: str, fault_s: float, until_s: float) -> float | None:
        return max((t.at_s - fault_s for t in self.told(kind) if fault_s < t.at_s <= until_s), default=None)

    def alive(self) -> list[psutil.Process]:
        """What carries this run's token and still lives."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends everything that this run started. Bounded."""
        for _ in range(5):
            left = self.alive()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for agent in self.agents:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.process.wait(10)
            if not left:
                return


def lmres_command(
    name: str,
    *,
    folder: Path,
    endpoint: str,
    run_id: str,
    nnodes: str,
    policy: Path | None,
    python: str = sys.executable,
    program: Sequence[str] = (str(PROGRAM),),
    conf: Mapping[str, str] | None = None,
) -> list[str]:
    """The command of one agent of this backend, with one worker. Its state folder is ``folder/name``."""
    options = {"node_id": name, "state_dir": str(folder / name), **(conf or {})}
    if policy is not None:
        options["lm_resiliency_worker_config"] = str(policy)
    return [
        python,
        *TORCHRUN,
        f"--nnodes={nnodes}",
        "--nproc-per-node=1",
        "--max-restarts=10",
        "--rdzv-backend=lm_resiliency",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={','.join(f'{k}={v}' for k, v in options.items())}",
        *program,
    ]


def store_pid(agent: TrialAgent) -> int | None:
    """The store process that this agent of this backend started, from its log."""
    for line in agent.log.splitlines():
        if "hosts the store at" in line:
            return int(line.rsplit("pid ", 1)[1].rstrip(")"))
    return None
