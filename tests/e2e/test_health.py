"""Sick hosts: told by the site's own command, replaced between two steps without losing one, or not chosen at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Node, wait_until
from tests.e2e.running import Run, running

pytestmark = pytest.mark.e2e

COMMAND = "test ! -e {folder}/$LMRES_NODE_ID || {{ cat {folder}/$LMRES_NODE_ID; exit 1; }}"


class Clinic:
    """Makes hosts sick and well, for the health command to see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def policy(self, command: str = COMMAND, more: str = "") -> str:
        command = command.format(folder=self.folder)
        return f"detection: {{health: {{interval_s: 0.2, command: '{command}'}}}}\n{more}"

    def falls_sick(self, name: str, reason: str = "fan 3 stands still") -> None:
        (self.folder / name).write_text(f"{reason}\n")

    def gets_well(self, name: str) -> None:
        (self.folder / name).unlink()


@contextmanager
def ward(
    tmp_path: Path, *program: str, command: str = COMMAND, more: str = "", **settings: Any
) -> Iterator[tuple[Run, Clinic]]:
    clinic = Clinic(tmp_path / "clinic")
    with running(tmp_path, *program, policy=clinic.policy(command, more), **settings) as run:
        yield run, clinic


def printed(node: Node) -> list[int]:
    """The steps that the node's workers have said to be done, in order."""
    return [int(m[1]) for m in re.finditer(r"^rank \d+ step (\d+)$", node.log, re.MULTILINE)]


def is_unfit(node: Node) -> bool:
    return "this host is unfit" in node.log


@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize("program", ["cycle.py", "epochs.py"])
def test_an_active_node_is_replaced_between_two_steps(tmp_path: Path, program: str, interval: int) -> None:
    with ward(tmp_path, program, more=f"checkpoint: {{interval_steps: {interval}}}\n") as (run, clinic):
        a, b, s = run.cluster.form("a", "b", "s")
        run.wait_steps(6)
        clinic.falls_sick("b")
        fault = a.wait_event("fault_detected", failure_class="node_unhealthy")
        assert fault["suspects"] == [{"node_id": "b", "rank": None}] and "fan 3 stands still" in fault["detail"]
        plan = a.wait_event("plan_committed", to_generation=2)
        assert (plan["action"], plan["failure_class"]) == ("replace", "node_unhealthy")
        assert plan["active"] == {"0": "a", "1": "s"} and plan["quarantined"] == ["b"]
        run.wait_generation(2)
        run.assert_bitwise()
        last = printed(b)[-1]
        assert plan["recovery_step"] == last, "the last step that was completed"
        assert printed(s)[0] == last + 1, "and the next one follows it"
        assert printed(a) == sorted(set(printed(a))), "none was made twice"
        assert run.cluster.leftovers() == []


def test_a_drained_node_is_replaced_without_loss_too(tmp_path: Path) -> None:
    from lmres.cli.main import main

    with running(tmp_path, "epochs.py", "--epochs", "6", nproc=2) as run:
        a, b, s = run.cluster.form("a", "b", "s")
        run.wait_steps(5)
        run_options = ["--rdzv-endpoint", run.cluster.endpoint, "--rdzv-id", run.cluster.run_id]
        assert main(["drain", "a", *run_options]) == 0
        plan = b.wait_event("plan_committed", to_generation=2)
        run.wait_generation(2)
        run.assert_bitwise()
        assert plan["recovery_step"] == max(printed(a))
        steps = printed(b)
        assert len(steps) == len(set(steps)) * 2, "each step once by each of its two ranks"
        assert min(printed(s)) == plan["recovery_step"] + 1


def test_an_unfit_standby_is_not_chosen_until_it_is_fit_again(tmp_path: Path) -> None:
    with ward(tmp_path, "cycle.py", nnodes="2:4", env={"STEP_S": "0.3"}) as (run, clinic):
        a, b, s, t = run.cluster.form("a", "b", "s", "t")
        run.wait_steps(3)
        clinic.falls_sick("s")
        wait_until("s is unfit", lambda: is_unfit(s))
        run.wait_steps(2)
        b.kill_node()
        plan = a.wait_event("plan_committed", to_generation=2)
        assert plan["active"] == {"0": "a", "1": "t"}
        run.wait_generation(2)
        clinic.gets_well("s")
        wait_until("s is fit", lambda: "fit for training again" in s.log)
        run.wait_steps(2)
        t.kill_node()
        assert a.wait_event("plan_committed", to_generation=3)["active"] == {"0": "a", "1": "s"}
        run.assert_bitwise()


def test_unfit_before_it_joins_is_not_among_the_first(tmp_path: Path) -> None:
    with ward(tmp_path, "cycle.py") as (run, clinic):
        clinic.falls_sick("a", "link 2 is down")
        nodes = [run.cluster.start("a")]
        nodes[0].wait_event("agent_joined")
        nodes += [run.cluster.start("b"), run.cluster.start("c")]
        plan = nodes[1].wait_event("plan_committed", to_generation=1)
        assert set(plan["active"].values()) == {"b", "c"}
        run.assert_bitwise()


def test_a_command_that_hangs_is_said_and_nothing_happens(tmp_path: Path) -> None:
    with ward(tmp_path, "cycle.py", command="exec sleep 600", nnodes="2:2", env={"STEP_S": "1.6"}) as (run, _clinic):
        a, _ = run.cluster.form("a", "b")
        armed = a.wait_event("protection_armed", adapter="health")
        assert "memory" in armed["parts"] and "command" not in armed["parts"]
        off = a.wait_event("protection_off", adapter="health", parts=["command"])
        assert "did not end within 30 s" in off["reason"]
        assert run.cluster.all_events("fault_detected") == []
        run.assert_bitwise()
        assert len(a.events("protection_off", adapter="health")) == 1
        assert run.cluster.leftovers() == []
