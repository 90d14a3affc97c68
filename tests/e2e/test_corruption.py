"""Wrong bits: in a parameter, in an optimizer's moment, in what a layer computes. Found, attributed, undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import Run, running

pytestmark = pytest.mark.e2e

PROGRAM = "scout/corrupt.py"
POLICY = """
workers: {warm: false}
heartbeat: {interval_s: 0.2, timeout_s: 20.0}
detection: {hang_timeout_s: 60, corruption: {interval_steps: 4}}
"""
STATE, REPLAY = "the state is", "replayed parts of the model are"


def found(run: Run) -> list[dict[str, Any]]:
    """Each finding once: all agents tell it."""
    events = run.cluster.all_events("fault_detected", failure_class="silent_corruption")
    return list({e["detail"]: e for e in events}.values())


def plan_of(run: Run, generation: int) -> dict[str, Any]:
    return run.cluster.all_events("plan_committed", to_generation=generation)[0]


def clean_of(run: Run) -> None:
    """What the run ends with, if the fault is not planted."""
    run.program = (PROGRAM, "--steps", run.program[run.program.index("--steps") + 1])


@pytest.mark.parametrize("what", ["parameter", "exponent", "moment"])
def test_a_bit_flipped_in_one_replica_is_attributed_and_undone(tmp_path: Path, what: str) -> None:
    program = (PROGRAM, "--steps", "30", "--flip", what, "--at", "12", "--rank", "1", "--marks", "FOLDER")
    with running(tmp_path, *program, nnodes="3:4", policy=POLICY) as run:
        run.cluster.form("a", "b", "c", "s")
        clean_of(run)
        run.assert_bitwise()
        (fault,) = found(run)
        assert fault["verdict"] == "attributed" and fault["suspects"] == [{"node_id": "b", "rank": 1}]
        plan = plan_of(run, 2)
        assert plan["failure_class"] == "silent_corruption" and plan["action"] == "replace", plan
        assert plan["recovery_step"] <= 11 and plan["trust"] == "verified", plan
        assert list(plan["active"].values()) == ["a", "s", "c"] and plan["quarantined"] == ["b"], plan


def test_two_replicas_can_not_tell_until_the_same_steps_are_made_again(tmp_path: Path) -> None:
    program = (PROGRAM, "--steps", "30", "--flip", "parameter", "--at", "12", "--rank", "1", "--marks", "FOLDER")
    with running(tmp_path, *program, nnodes="2:2", policy=POLICY) as run:
        run.cluster.form("a", "b")
        clean_of(run)
        run.assert_bitwise()
        first, then = found(run)
        assert first["verdict"] == "inconclusive" and first["suspects"] == [], first
        plan = plan_of(run, 2)
        assert plan["action"] == "restart" and plan["recovery_step"] <= 11 and plan["quarantined"] == [], plan
        assert then["verdict"] == "attributed" and then["suspects"] == [{"node_id": "b", "rank": 1}], then
        assert not run.cluster.all_events("plan_committed", to_generation=3)


def test_with_a_standby_the_one_that_was_wrong_is_replaced(tmp_path: Path) -> None:
    program = (PROGRAM, "--steps", "60", "--flip", "moment", "--at", "12", "--rank", "0", "--marks", "FOLDER")
    with running(tmp_path, *program, nnodes="2:3", policy=POLICY) as run:
        run.cluster.form("a", "b", "s")
        clean_of(run)
        run.assert_bitwise()
        assert [f["verdict"] for f in found(run)] == ["inconclusive", "attributed"], found(run)
        assert plan_of(run, 2)["action"] == "restart"
        plan = plan_of(run, 3)
        assert plan["action"] == "replace" and list(plan["active"].values()) == ["s", "b"], plan
        assert plan["quarantined"] == ["a"], plan


def test_what_is_not_finite_is_not_certified(tmp_path: Path) -> None:
    """Not even where only a moment of the optimizer is not, and parameters still are."""
    program = (PROGRAM, "--steps", "20", "--nan", "12")
    with running(tmp_path, *program, nnodes="2:2", policy=POLICY) as run:
        run.cluster.form("a", "b")
        for node in run.cluster.nodes.values():
            node.wait_exit()
        steps = {e["step"] for e in run.cluster.all_events("checkpoint_verified")}
        assert steps and max(steps) < 12, steps


def test_a_layer_that_computes_wrongly_is_found_by_replay(tmp_path: Path) -> None:
    """The wrong gradients have reached everybody's state: back to what was certified before it began."""
    program = (PROGRAM, "--steps", "64", "--layer", "b", "--at", "30")
    with running(tmp_path, *program, nnodes="3:4", policy=POLICY) as run:
        run.cluster.form("a", "b", "c", "s")
        clean_of(run)
        run.assert_bitwise()
        (fault,) = found(run)
        assert fault["verdict"] == "attributed" and fault["suspects"] == [{"node_id": "b", "rank": 1}], fault
        assert "outer (Linear)" in fault["detail"], fault
        plan = plan_of(run, 2)
        assert plan["action"] == "replace" and plan["quarantined"] == ["b"], plan
        assert 0 < plan["recovery_step"] < 30 and plan["trust"] == "verified", plan


def test_no_verdict_without_a_fault(tmp_path: Path) -> None:
    """Batches of other sizes on each rank, running statistics of their own, dropout from generators of their own."""
    with running(tmp_path, PROGRAM, "--steps", "40", "--uneven", nnodes="3:3", policy=POLICY) as run:
        run.cluster.form("a", "b", "c")
        run.assert_bitwise()
        assert not run.cluster.all_events("fault_detected")
        armed = [e["reason"] for e in run.cluster.all_events("protection_armed", adapter="vault")]
        assert armed == [f"{what} compared between ranks 0, 1 and 2" for what in (STATE, REPLAY)]
        (parts,) = {tuple(e["parts"]) for e in run.cluster.all_events("protection_armed") if "replay" in e["parts"][0]}
        assert parts == ("replay: 4 of 4 modules",)
        checks = {tuple(e["checks"]) for e in run.cluster.all_events("checkpoint_verified")}
        assert checks == {("state",), ("state", "replay")}


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_a_standby_is_the_third_opinion_on_wrong_computing(tmp_path: Path, wrong: str) -> None:
    """It takes the place of the second. If that was the right one, it comes back for the first."""
    program = (PROGRAM, "--steps", "64", "--layer", wrong, "--at", "30")
    with running(tmp_path, *program, nnodes="2:3", policy=POLICY) as run:
        run.cluster.form("a", "b", "s")
        clean_of(run)
        run.assert_bitwise()
        first, then = found(run)
        assert first["verdict"] == "inconclusive" and plan_of(run, 2)["quarantined"] == [], first
        assert list(plan_of(run, 2)["active"].values()) == ["a", "s"]
        assert then["verdict"] == "attributed" and then["suspects"][0]["node_id"] == wrong, then
        if wrong == "a":
            plan = plan_of(run, 3)
            assert list(plan["active"].values()) == ["b", "s"] and plan["quarantined"] == ["a"], plan


def test_replicas_of_shards_that_compute_wrongly_are_found_by_replay(tmp_path: Path) -> None:
    """HSDP: each shard has two replicas. A standby in the place of the second tells which node was wrong."""
    program = ("sharded.py", "hsdp", "--steps", "70", "--wrong", "b")
    with running(tmp_path, *program, nnodes="2:3", nproc=2, policy=POLICY) as run:
        run.cluster.form("a", "b", "s")
        run.program = program[:-2]
        run.assert_bitwise()
        first, then = found(run)
        assert first["verdict"] == "inconclusive" and "Linear" in first["detail"], first
        plan = plan_of(run, 2)
        assert list(plan["active"].values()) == ["a", "s"] and 0 < plan["recovery_step"] < 30, plan
        assert then["verdict"] == "attributed" and {s["node_id"] for s in then["suspects"]} == {"b"}, then
        armed = [e["reason"] for e in run.cluster.all_events("protection_armed", adapter="vault")]
        assert {f"{what} compared between ranks 0, 1, 2 and 3" for what in (STATE, REPLAY)} <= set(armed), armed


def test_two_that_compute_differently_without_a_standby(tmp_path: Path) -> None:
    program = (PROGRAM, "--steps", "64", "--layer", "b", "--at", "30", "--once", "--marks", "FOLDER")
    with running(tmp_path, *program, nnodes="2:2", policy=POLICY) as run:
        run.cluster.form("a", "b")
        clean_of(run)
        run.assert_bitwise()
        (fault,) = found(run)
        assert fault["verdict"] == "inconclusive", fault
        plan = plan_of(run, 2)
        assert plan["action"] == "restart" and plan["quarantined"] == [] and 0 < plan["recovery_step"] < 30, plan
