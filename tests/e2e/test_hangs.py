"""Workers that make no progress: noticed from outside, localized, and the run ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Node, wait_until
from tests.e2e.running import Run, running

pytestmark = pytest.mark.e2e

TIMEOUT_S = 3.0
BOUND_S = 12.0
"""From the fault to its notice: the timeout, and room for a busy machine."""
POLICY = "detection: {hang_timeout_s: 3}\n"


@contextlib.contextmanager
def three(tmp_path: Path, *arguments: str, standby: bool = True, env: dict[str, str] | None = None) -> Iterator[Run]:
    """Three nodes of one rank, and a standby."""
    program = ("scout/hangs.py", "FOLDER", *arguments)
    with running(tmp_path, *program, nnodes="3:4", policy=POLICY, env={"STEP_S": "0.05", **(env or {})}) as run:
        (tmp_path / "plant").touch()
        run.cluster.form("a", "b", "c", *(["s"] if standby else []))
        yield run


def first_fault(run: Run, failure_class: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        faults = run.cluster.all_events("fault_detected")
        return faults[0] if faults else None

    try:
        fault = wait_until("a fault", found, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.logs()}") from None
    assert fault["failure_class"] == failure_class, f"{fault}\n{run.logs()}"
    return dict(fault)


def planted_at(tmp_path: Path) -> float:
    path = tmp_path / "when"
    wait_until("the fault is there", lambda: path.exists() and path.read_text(), 60)
    return float(path.read_text())


def node_of_rank(run: Run, rank: int) -> Node:
    (name,) = {e["node_id"] for e in run.cluster.all_events("generation_started", generation=1) if rank in e["ranks"]}
    return run.cluster.nodes[name]


def assert_recovered(run: Run) -> None:
    run.assert_bitwise()
    run.assert_lost_at_most(2)
    assert run.generation() == 2, run.logs()
    resumed = run.cluster.all_events("training_resumed", generation=2)
    assert len(resumed) == run.ranks
    wait_until("nothing left", lambda: not run.cluster.leftovers(), 10)


def figures(name: str, began: float, fault: dict[str, Any], run: Run) -> None:
    """For whoever reads the output (-s): seconds from the fault to its notice, and to the next step."""
    resumed = min(e["time"] for e in run.cluster.all_events("training_resumed", generation=2))
    print(f"\n{name}: noticed after {fault['time'] - began:.2f} s, next step after {resumed - began:.2f} s")


def test_a_stopped_worker(tmp_path: Path) -> None:
    with three(tmp_path) as run:
        run.wait_steps(6)
        victim = node_of_rank(run, 1)
        began = time.time()
        os.kill(victim.worker_pids(1)[0], signal.SIGSTOP)
        fault = first_fault(run, "hang")
        assert fault["verdict"] == "attributed"
        assert fault["suspects"] == [{"node_id": victim.name, "rank": 1}]
        assert "SIGSTOP" in fault["detail"] and "has not entered" in fault["detail"], fault["detail"]
        assert TIMEOUT_S - 0.5 < fault["time"] - began < BOUND_S
        assert_recovered(run)
        figures("SIGSTOP", began, fault, run)


@pytest.mark.parametrize(
    ("kind", "at", "words"),
    [
        ("spin", 12, ("hangs.py:", "spin_in_c", "using the processor")),
        ("sleep", 12, ("in the program's own code", "hangs.py:")),
        ("loader", 12, ("waits for its data loader", "hangs.py:")),
        ("save", 10, ("reads or writes a checkpoint", "hangs.py:")),
    ],
)
def test_a_rank_that_does_not_come(tmp_path: Path, kind: str, at: int, words: tuple[str, ...]) -> None:
    with three(tmp_path, "--fault", kind, "--at", str(at)) as run:
        began = planted_at(tmp_path)
        fault = first_fault(run, "hang")
        victim = node_of_rank(run, 1)
        assert fault["verdict"] == "attributed"
        assert fault["suspects"] == [{"node_id": victim.name, "rank": 1}]
        for word in words:
            assert word in fault["detail"], fault["detail"]
        assert f"after step {at}" in fault["detail"]
        assert TIMEOUT_S - 0.5 < fault["time"] - began < BOUND_S
        assert_recovered(run)
        figures(kind, began, fault, run)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ("float32[5]", "float32[3]")),
        ("size", ("float32[4000]", "float32[3]")),
        ("leave_out", ("float32[3]", "left out allreduce")),
    ],
)
def test_ranks_that_do_not_agree_about_a_collective(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """The backend may hang, or end a rank that is not at fault: the operations themselves tell which is."""
    with three(tmp_path, "--fault", kind, "--at", "12") as run:
        began = planted_at(tmp_path)

        def found() -> list[dict[str, Any]]:
            return run.cluster.all_events("fault_detected", failure_class="collective_desync")

        wait_until("the verdict", found, 60)
        fault = found()[0]
        victim = node_of_rank(run, 1)
        assert fault["verdict"] == "attributed"
        assert fault["suspects"] == [{"node_id": victim.name, "rank": 1}], fault["detail"]
        for word in words:
            assert word in fault["detail"], fault["detail"]
        plan = run.cluster.nodes["a"].wait_event("plan_committed", to_generation=2)
        assert plan["failure_class"] == "collective_desync", plan["reason"]
        assert_recovered(run)
        figures(kind, began, fault, run)


def test_a_stopped_worker_of_a_run_with_one_rank(tmp_path: Path) -> None:
    with running(tmp_path, "scout/hangs.py", "FOLDER", nnodes="1:2", policy=POLICY) as run:
        (node,) = run.cluster.form("a")
        run.wait_steps(6)
        os.kill(node.worker_pids(1)[0], signal.SIGSTOP)
        fault = first_fault(run, "hang")
        assert (fault["verdict"], fault["suspects"]) == ("attributed", [{"node_id": "a", "rank": 0}])
        run.assert_bitwise()


def test_a_worker_that_goes_on_in_time_is_left_alone(tmp_path: Path) -> None:
    with three(tmp_path, standby=False) as run:
        run.wait_steps(6)
        pid = node_of_rank(run, 1).worker_pids(1)[0]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(TIMEOUT_S / 2)
        os.kill(pid, signal.SIGCONT)
        run.assert_bitwise()
        assert run.cluster.all_events("fault_detected") == []
        assert run.generation() == 1


def test_who_waits_for_a_rank_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    """It evaluates for twice the timeout, and moves meanwhile."""
    with three(tmp_path, "--evaluate", str(2 * TIMEOUT_S), standby=False) as run:
        run.assert_bitwise()
        waiting = [n for n in run.cluster.nodes.values() if "asking what all ranks are doing" in n.log]
        assert waiting, run.logs()
        assert run.cluster.all_events("fault_detected") == []
        assert run.generation() == 1


# -- the watch itself fails -------------------------------------------------------------------------------------------


def page_of(node: Node) -> Path:
    """The agent's own descriptor of its worker's page."""
    base = Path(f"/proc/{node.process.pid}/fd")
    found = [fd for fd in base.iterdir() if "lmres-progress" in _target(fd)]
    running_pid = node.worker_pids(1)[0]
    mine = [fd for fd in found if int.from_bytes(_bytes(fd)[16:24], "little") == running_pid]
    assert len(mine) == 1, found
    return mine[0]


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)  # noqa: PTH115
    except OSError:
        return ""


def _bytes(fd: Path) -> bytes:
    with fd.open("rb") as file:
        return file.read(64)


def test_a_broken_page_costs_only_the_watch_over_that_rank(tmp_path: Path) -> None:
    with three(tmp_path, "--epochs", "20") as run:
        run.wait_steps(4)
        victim = node_of_rank(run, 1)
        with page_of(victim).open("r+b") as page:
            page.write(b"\xff" * 16)
        off = victim.wait_event("protection_off", adapter="scout")
        assert off["parts"] == ["hang", "straggler"] and off["rank"] == 1 and "page" in off["reason"]
        run.wait_steps(4)
        assert run.generation() == 1, run.logs()
        # The others stay watched.
        os.kill(node_of_rank(run, 2).worker_pids(1)[0], signal.SIGSTOP)
        fault = first_fault(run, "hang")
        assert {"node_id": node_of_rank(run, 2).name, "rank": 2} in fault["suspects"], fault
        run.wait_generation(2)
        armed = wait_until(
            "armed again",
            lambda: run.cluster.all_events("protection_armed", adapter="scout", generation=2, node_id=victim.name),
        )
        assert armed[0]["parts"] == ["hang", "straggler"]
        run.assert_bitwise()
        assert len(run.cluster.all_events("protection_off", adapter="scout", node_id=victim.name)) == 1


STRIKE = """
import ctypes, os, sys, threading, time

def strike(file):
    while not os.path.exists(file):
        time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == "lmres-scout":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError))

words = " ".join(sys.orig_argv)
if "torch.distributed.run" in words:
    name = words.split("node_id=")[1].split(",")[0]
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "strike-" + name)
    threading.Thread(target=strike, args=(file,), daemon=True).start()
"""


def test_a_watch_thread_that_dies_is_said_and_training_goes_on(tmp_path: Path) -> None:
    """An exception strikes the agent's thread from outside, as a lack of memory may."""
    where = tmp_path / "site"
    where.mkdir()
    (where / "sitecustomize.py").write_text(STRIKE)
    path = os.pathsep.join([str(where), *filter(None, [os.environ.get("PYTHONPATH")])])
    with three(tmp_path, "--epochs", "20", env={"PYTHONPATH": path}) as run:
        run.wait_steps(4)
        victim = node_of_rank(run, 1)
        (where / f"strike-{victim.name}").touch()
        off = victim.wait_event("protection_off", adapter="scout")
        assert off["parts"] == ["hang", "straggler"] and "MemoryError" in off["reason"]
        run.wait_steps(4)
        assert run.generation() == 1
        os.kill(victim.worker_pids(1)[0], signal.SIGKILL)
        run.wait_generation(2)
        run.wait_steps(3)
        victim.wait_event("protection_armed", adapter="scout", generation=2)
        os.kill(victim.worker_pids(2)[0], signal.SIGSTOP)
        fault = run.cluster.nodes["a"].wait_event("fault_detected", generation=2)
        assert (fault["failure_class"], fault["suspects"][0]["node_id"]) == ("hang", victim.name), fault["detail"]
        run.assert_bitwise()
        assert len(victim.events("protection_off", adapter="scout")) == 1
