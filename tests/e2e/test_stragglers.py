"""Ranks that are slower than their peers: told with rank and cause, and nothing is told while all are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import wait_until
from tests.e2e.running import Run, running

pytestmark = pytest.mark.e2e

ENV = {"STEP_S": "0"}


def slow(tmp_path: Path, *arguments: str, nnodes: str = "3:3", **settings: Any) -> Any:
    return running(tmp_path, "scout/slow.py", *arguments, nnodes=nnodes, env=ENV, **settings)


def verdicts(run: Run) -> list[dict[str, Any]]:
    """Each once, however many agents have told it."""
    found = {(str(e["suspects"]), e["detail"]): e for e in run.cluster.all_events("fault_detected")}
    return sorted(found.values(), key=lambda e: e["time"])


def node_of(run: Run, rank: int) -> str:
    (name,) = {e["node_id"] for e in run.cluster.all_events("generation_started", generation=1) if rank in e["ranks"]}
    return name


@pytest.mark.parametrize(("kind", "words"), [("--compute", "computing"), ("--load", "waiting for its data")])
def test_a_slow_rank_is_told_with_its_cause_and_training_goes_on(tmp_path: Path, kind: str, words: str) -> None:
    with slow(tmp_path, kind, "1") as run:
        run.cluster.form("a", "b", "c")
        run.assert_bitwise()
        (found,) = verdicts(run)
        assert (found["failure_class"], found["verdict"]) == ("straggler", "attributed")
        assert found["suspects"] == [{"node_id": node_of(run, 1), "rank": 1}]
        assert words in found["detail"] and "3 windows" in found["detail"], found["detail"]
        assert run.generation() == 1
        began = min(e["time"] for e in run.cluster.all_events("training_resumed"))
        print(f"\n{kind}: told {found['time'] - began:.1f} s after the first step")


@pytest.mark.parametrize(
    "arguments",
    [("--compute", "0,1,2", "--since", "30"), ("--load", "0,1,2"), ("--uneven", "0.4")],
    ids=["all compute slowly", "all load slowly", "uneven"],
)
def test_while_all_are_alike_nothing_is_told(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with slow(tmp_path, *arguments) as run:
        run.cluster.form("a", "b", "c")
        run.assert_bitwise()
        assert verdicts(run) == []


def test_a_slow_rank_is_replaced_where_the_policy_says_so(tmp_path: Path) -> None:
    policy = "detection: {straggler: {action: replace}}\n"
    with slow(tmp_path, "--compute", "2", "--steps", "160", nnodes="3:4", policy=policy) as run:
        run.cluster.form("a", "b", "c", "s")
        plan = wait_until("a plan", lambda: run.cluster.all_events("plan_committed", to_generation=2))[0]
        assert (plan["action"], plan["failure_class"]) == ("replace", "straggler"), plan["reason"]
        assert plan["active"] == {"0": "a", "1": "b", "2": "s"}
        run.assert_bitwise()


def test_all_ranks_of_a_slow_host_are_the_host(tmp_path: Path) -> None:
    with slow(tmp_path, "--compute", "2,3", "--steps", "160", nnodes="2:2", nproc=2) as run:
        run.cluster.form("a", "b")
        run.assert_bitwise()
        (found,) = verdicts(run)
        assert [s["node_id"] for s in found["suspects"]] == ["b"], found
        assert "each of the 2 ranks of node b" in found["detail"]
