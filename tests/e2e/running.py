"""A program under a cluster, and what must come of it: the digests of a run without failures.

Every program here knows nothing of lmres; its last words are a digest of all that it holds. The digest of a run without
failures comes from plain torchrun, once for each program.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.e2e.cluster import TORCHRUN, Cluster, Node, cluster, free_port, wait_until

PROGRAMS = Path(__file__).parent / "programs"
STEP_S = "0.08"


@cache
def clean_end(program: tuple[str, ...], ranks: int) -> dict[int, str]:
    """The last words of each rank in a run of plain torchrun without failures."""
    with TemporaryDirectory() as folder:
        command = [*TORCHRUN, f"--nproc-per-node={ranks}", f"--master-port={free_port()}", *command_of(program, folder)]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FINAL_DIR": folder,
            "LMRES_GENERATION": "1",
            "LMRES_RESUME_STEP": "0",
        }
        # gloo's own teardown may abort a process that has said all there is to say.
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        found = ends(Path(folder))
        assert len(found) == ranks, f"plain torchrun: {done.stderr[-3000:]}"
        return found


def command_of(program: tuple[str, ...], folder: str) -> list[str]:
    """A file below ``programs`` (below ``programs/state`` where only a name is given). ``FOLDER`` in the arguments is a
    place to write."""
    name, *arguments = program
    path = PROGRAMS / (name if "/" in name else f"state/{name}")
    return [str(path), *(a.replace("FOLDER", folder) for a in arguments)]


def ends(folder: Path) -> dict[int, str]:
    return {int(f.name.removeprefix("final-")): f.read_text() for f in folder.glob("final-*")}


class Run:
    """One program under a cluster."""

    def __init__(self, made: Cluster, program: tuple[str, ...], folder: Path) -> None:
        self.cluster = made
        self.program = program
        self.folder = folder

    @property
    def ranks(self) -> int:
        return int(self.cluster.nnodes.split(":")[0]) * self.cluster.nproc

    def steps(self) -> int:
        """The highest step that any rank has printed."""
        words = [line.split() for node in self.cluster.nodes.values() for line in node.log.splitlines()]
        return max(
            (int(w[3]) for w in words if len(w) == 4 and w[0] == "rank" and w[2] == "step" and w[3].isdigit()),
            default=0,
        )

    def wait_steps(self, more: int) -> int:
        base = self.steps()

        def came() -> bool:
            ended = [n.process.poll() for n in self.cluster.nodes.values()]
            assert not any(code not in (None, -9) for code in ended), f"an agent ended: {ended}\n{self.logs()}"
            return self.steps() >= base + more

        wait_until(f"{more} more steps than {base}", came)
        return self.steps()

    def generation(self) -> int:
        return max(e["generation"] for e in self.cluster.all_events("generation_started"))

    def active(self) -> list[Node]:
        generation = self.generation()
        return [
            n
            for n in self.cluster.nodes.values()
            if n.process.poll() is None and n.events("generation_started", generation=generation)
        ]

    def kill_worker(self, chance: random.Random, how: signal.Signals = signal.SIGKILL) -> None:
        node = chance.choice(self.active())
        os.kill(chance.choice(node.worker_pids(self.generation())), how)

    def wait_generation(self, generation: int) -> None:
        wait_until(f"generation {generation}", lambda: self.generation() >= generation)

    def assert_bitwise(self) -> None:
        """All agents end well, and the digests are those of the clean run."""
        codes = {name: node.wait_exit() for name, node in self.cluster.nodes.items()}
        assert set(codes.values()) <= {0, -signal.SIGKILL}, f"{codes}\n{self.logs()}"
        assert ends(self.folder) == clean_end(self.program, self.ranks), self.logs()

    def assert_lost_at_most(self, steps: int) -> None:
        """Between what a generation had come to and where the next one goes on."""
        plans = {e["to_generation"]: e for e in self.cluster.all_events("plan_committed")}
        for generation, plan in plans.items():
            captured = [e["step"] for e in self.cluster.all_events("training_resumed", generation=generation)]
            assert all(step == plan["recovery_step"] + 1 for step in captured)
        for generation in sorted(plans)[1:]:
            done = plans[generation]["reason"]
            words = done.split(" after step ")
            if len(words) > 1:
                reached = int(words[1].split()[0].rstrip(";:,"))
                assert reached - plans[generation]["recovery_step"] <= steps, done

    def logs(self) -> str:
        return "\n".join(f"--- {name}:\n{node.log[-2500:]}" for name, node in self.cluster.nodes.items())


@contextlib.contextmanager
def running(folder: Path, *program: str, **settings: Any) -> Iterator[Run]:
    final = folder / "final"
    final.mkdir(parents=True)
    env = {"STEP_S": STEP_S, "FINAL_DIR": str(final), **settings.pop("env", {})}
    with cluster(folder / "run", program=command_of(program, str(folder)), env=env, **settings) as made:
        yield Run(made, program, final)
