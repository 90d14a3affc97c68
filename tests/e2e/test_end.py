"""How a run ends well."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cluster import cluster, wait_until


def test_last_ranks_ten_seconds_apart(tmp_path: Path) -> None:
    with cluster(tmp_path, nnodes="3:4", env={"STEPS": "5", "LAST_S": "5"}) as c:
        nodes = c.form("a", "b", "c", "d")
        assert [n.wait_exit() for n in nodes] == [0, 0, 0, 0]
        assert len(nodes[0].events("plan_committed")) == 1
        for node in nodes:
            assert node.events("run_finished")[0]["outcome"] == "succeeded"
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_functions_as_entry_points_end_too(tmp_path: Path) -> None:
    """``--run-path`` starts workers as functions, not through the command that is held."""
    with cluster(tmp_path, nnodes="2:2", env={"STEPS": "5"}) as c:
        c.program = ["--run-path", *c.program]
        a, b = (c.start(n) for n in ("a", "b"))
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]
