"""Warm workers under torchrun itself: streams, modules, exit codes, and nothing left behind."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.contract.workers_kit import gone
from tests.e2e import cluster as e2e

pytestmark = pytest.mark.e2e

PROGRAM = """
import sys
print("WARM" if "torch._dynamo" in sys.modules else "COLD", sys.argv[1:], __name__, flush=True)
import os, time
import torch
def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    generation, rank = os.environ["LMRES_GENERATION"], os.environ["RANK"]
    print(f"generation {generation} rank {rank}", file=sys.stderr, flush=True)
    if generation == "1":
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        if rank == "1":
            os._exit(7)
        time.sleep(600)
    if rank == "0" and "fail" in sys.argv:
        raise ValueError("planted in generation 2")
if __name__ == "__main__":
    main()
"""


def agent(folder: Path, args: dict[str, str], program: list[str]) -> e2e.Cluster:
    program_folder = folder / "program"
    program_folder.mkdir()
    (program_folder / "prog.py").write_text(PROGRAM)
    env = {"GO": str(folder / "go"), "PYTHONPATH": str(program_folder)}
    made = e2e.Cluster(
        folder=folder / "run", nnodes="1:1", nproc=2, env=env, program=program, policy="observe: {log_level: debug}\n"
    )
    made.start("a", args=args)
    return made


def named(log: str, what: str) -> set[str]:
    """The pids of the warm workers of which this is said; one may be replaced before it was ever ready."""
    return set(re.findall(rf"warm worker (\d+) {what}", log))


def restart_warm(made: e2e.Cluster, folder: Path) -> None:
    node = made.nodes["a"]
    node.wait_event("generation_started", generation=1)
    e2e.wait_until("both are warm", lambda: len(named(node.log, "is ready") - named(node.log, "is replaced")) >= 2)
    (folder / "go").touch()


@pytest.mark.parametrize("how", ["redirects", "tee", "module", "one rank"])
def test_streams_and_programs(tmp_path: Path, how: str) -> None:
    logs = tmp_path / "logs"
    args = {
        "redirects": {"--redirects": "3", "--log-dir": str(logs)},
        "tee": {"--tee": "3", "--log-dir": str(logs)},
        "one rank": {"--local-ranks-filter": "0"},
    }.get(how, {})
    program = ["-m", "prog", "x"] if how == "module" else [str(tmp_path / "program" / "prog.py"), "x"]
    made = agent(tmp_path, args, program)
    try:
        restart_warm(made, tmp_path)
        node = made.nodes["a"]
        assert node.wait_exit() == 0, node.log
        text = node.log
        out = "WARM ['x'] __main__\n"
        if how in ("redirects", "tee"):
            files = sorted(logs.glob("*/attempt_1/*/stdout.log"))
            assert [file.read_text() for file in files] == [out, out]
            errors = sorted(logs.glob("*/attempt_1/*/stderr.log"))
            assert [file.read_text() for file in errors] == [f"generation 2 rank {rank}\n" for rank in (0, 1)]
        if how == "tee":
            assert all(f"[default{rank}]:{out}" in text for rank in (0, 1))
        elif how == "redirects":
            assert "WARM" not in text
        else:
            assert text.count(out) == (1 if how == "one rank" else 2)
            assert "generation 2 rank 0" in text
        assert made.leftovers() == []
    finally:
        made.close()


def test_a_warm_worker_fails_as_a_cold_one(tmp_path: Path) -> None:
    made = agent(tmp_path, {"--max-restarts": "1"}, [str(tmp_path / "program" / "prog.py"), "fail"])
    try:
        restart_warm(made, tmp_path)
        node = made.nodes["a"]
        assert node.wait_exit() == 1
        assert "WARM" in node.log
        assert "ValueError: planted in generation 2" in node.log
        assert made.leftovers() == []
    finally:
        made.close()


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_the_pool_is_gone_with_its_agent(tmp_path: Path, number: int) -> None:
    made = agent(tmp_path, {}, [str(tmp_path / "program" / "prog.py")])
    try:
        restart_warm(made, tmp_path)
        node = made.nodes["a"]
        node.wait_event("generation_started", generation=2)
        children = [child.pid for child in psutil.Process(node.process.pid).children(recursive=True)]
        store = e2e.store_pid_of(node)
        node.signal(number)
        node.wait_exit()
        left = [pid for pid in children if pid != store]
        end = time.monotonic() + 30
        while not all(map(gone, left)) and time.monotonic() < end:
            time.sleep(0.02)
        assert all(map(gone, left))
    finally:
        made.close()


STANDBYS_PROGRAM = """
import sys
print("WARM" if {"torch._dynamo", "sqlite3"} <= sys.modules.keys() else "COLD", flush=True)
import os, sqlite3, time
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1200):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def test_a_standby_that_takes_over_has_what_the_program_imports(tmp_path: Path) -> None:
    """It has run nothing itself: the agents that train tell it."""
    program = tmp_path / "prog.py"
    program.write_text(STANDBYS_PROGRAM)
    made = e2e.Cluster(
        folder=tmp_path / "run", nnodes="1:2", program=[str(program)], policy="observe: {log_level: debug}\n"
    )
    try:
        made.form("a", "s")
        standby = made.nodes["s"]

        def is_warm() -> bool:
            return "is ready" in standby.log.partition("the running program imports")[2]

        e2e.wait_until("the standby has learned", is_warm, 120)
        made.nodes["a"].kill_node()
        assert standby.wait_exit() == 0, standby.log
        assert "WARM" in standby.log and "COLD" not in standby.log, standby.log
        assert made.leftovers() == []
    finally:
        made.close()
