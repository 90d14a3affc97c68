"""Workers that do what they are told, one or two at once, each with the page and the channel that an agent gives."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmres.adapters.bootstrap import bootstrap_env
from lmres.adapters.watch import VARIABLE, variable_text
from lmres.rendezvous.edge.workers.process import FDS_VARIABLE, Link, start_tied
from lmres.rendezvous.edge.workers.progress import PageView
from lmres.rendezvous.edge.workers.reports import ReportReader
from tests.contract.workers_kit import BOUND_S, until

PROGRAM = Path(__file__).parent / "programs" / "watched.py"
START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Worker:
    """One rank. ``watched`` None: without the variable; ``before``: code that runs before the program."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        size: int = 1,
        port: int = 0,
        watched: str | None = "",
        before: str = "",
    ) -> None:
        self.folder = folder
        self.rank = rank
        self._link = Link()
        self._reader = ReportReader()
        self._reports: list[dict[str, Any]] = []
        variables = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            FDS_VARIABLE: ",".join(map(str, self._link.worker_fds)),
        }  # fmt: skip
        if watched is not None:
            variables[VARIABLE] = watched or variable_text()
        self._error = (folder / f"err{rank}").open("w+")
        self._answers, answers = os.pipe()
        commands, self._commands = os.pipe()
        code = (
            f"{before}import os, runpy; os.dup2({commands}, 0); runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
        )
        self.child: subprocess.Popen[bytes] = start_tied(
            [sys.executable, "-c", code],
            bootstrap_env(variables),
            stdout=answers,  # type: ignore[arg-type]
            stderr=self._error,
            pass_fds=(*self._link.worker_fds, commands),
        )
        os.close(answers)
        os.close(commands)
        self._link.handed_over()
        self._heard = b""

    @property
    def pid(self) -> int:
        return self.child.pid

    def tell(self, *words: object) -> None:
        os.write(self._commands, (" ".join(map(str, words)) + "\n").encode())

    def answer(self, bound_s: float = START_S) -> Any:
        end = time.monotonic() + bound_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._answers, 65536) if ready else b""
            assert data, f"no answer of rank {self.rank}: {self.error()}"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        message = json.loads(line)
        assert "said" in message, f"{message} {self.error()}"
        return message["said"]

    def do(self, *words: object) -> Any:
        self.tell(*words)
        return self.answer()

    def error(self) -> str:
        self._error.flush()
        return (self.folder / f"err{self.rank}").read_text()

    def view(self) -> PageView:
        page = self._link.progress
        view = page.look(self.pid)
        assert view is not None, page.blind
        return view

    def page(self) -> bytes:
        return os.pread(self._link.progress.fd, 1 << 16, 0)

    def entered(self, name: str | None = None) -> int:
        return sum(g.entered for g in self.view().groups if name in (None, g.name))

    def reports(self, kind: str) -> list[dict[str, Any]]:
        while select.select([self._link.channel], [], [], 0)[0]:
            data = self._link.channel.recv(65536)
            if not data:
                break
            self._reports += self._reader.feed(data)
        return [r for r in self._reports if r.get("kind") == kind]

    def report(self, kind: str) -> dict[str, Any]:
        until(lambda: self.reports(kind), f"a report {kind}: {self.error()}", START_S)
        return self.reports(kind)[-1]

    def end(self) -> int:
        self.tell("end")
        return self.child.wait(BOUND_S)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(BOUND_S)
        for number in (self._answers, self._commands):
            os.close(number)
        self._link.close()
        self._error.close()


class Two:
    """Two ranks of one group."""

    def __init__(self, folder: Path, **options: Any) -> None:
        port = free_port()
        self.workers = [Worker(folder, rank=rank, size=2, port=port, **options) for rank in range(2)]

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def do(self, *words: object) -> list[Any]:
        for worker in self.workers:
            worker.tell(*words)
        return [worker.answer() for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
