"""The command line against a real run: looking, holding a node back, letting it in again, ending the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, cluster, wait_until

pytestmark = pytest.mark.e2e


def lmres(c: Cluster, *argv: str, code: int = 0) -> str:
    """Output of the command. The run is named by the variables that torchrun reads."""
    env = {
        **os.environ,
        "PET_RDZV_ENDPOINT": c.endpoint,
        "PET_RDZV_ID": c.run_id,
        "PET_RDZV_CONF": f"store_type={c.store_type}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "lmres.cli.main", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, f"{argv}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def value_of(c: Cluster, *argv: str, code: int = 0) -> dict[str, Any]:
    found = json.loads(lmres(c, *argv, "--json", code=code))
    assert isinstance(found, dict)
    return found


def roles(c: Cluster) -> dict[str, str]:
    return {n["node_id"]: n["role"] for n in value_of(c, "status")["nodes"]}


def look(c: Cluster) -> None:
    """Status of a run with two active nodes and a standby, in both forms."""
    value = value_of(c, "status")
    assert (value["state"], value["generation"], value["world_size"], value["standbys"]) == ("running", 1, 2, 1)
    assert [(n["node_id"], n["role"], n["slot"], n["ranks"]) for n in value["nodes"]] == [
        ("a", "active", 0, [0]),
        ("b", "active", 1, [1]),
        ("c", "standby", None, []),
    ]
    for node in value["nodes"]:
        assert node["pid"] == c.nodes[node["node_id"]].process.pid
        assert node["heartbeat_moved"] and node["heartbeat_age_s"] < 5
    assert value["step"] >= 3 and value["unreadable"] == []
    text = lmres(c, "status")
    assert f"run {c.run_id} at {c.endpoint}: running" in text and "active slot 1" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "no incidents" in lmres(c, "incidents")


def kill_a_worker(c: Cluster) -> None:
    """The recovery is told of by the store, and by the events of the agents."""
    a, b = c.nodes["a"], c.nodes["b"]
    os.kill(b.worker_pids(1)[0], signal.SIGKILL)
    for node in (a, b):
        node.wait_event("recovery_completed", generation=2)

    def reported() -> Any:
        found = value_of(c, "incidents", "2")["incidents"][0]
        return found if len(found["phases"]) == 2 else None

    stored = wait_until("phases of both nodes", reported)
    told = value_of(c, "incidents", "last", "--events", *(str(n.folder / "state") for n in c.nodes.values()))
    for found in (stored, told["incidents"][0]):
        assert (found["id"], found["action"], found["failure_class"]) == (2, "restart", "process_crash")
        assert "rank 1 on b" in found["cause"] and "SIGKILL" in found["cause"]
        first = next(w for w in found["evidence"] if w["first"])
        assert (first["reporter"], first["rank"], first["exit_status"]) == ("b", 1, -9)
        assert [p["node_id"] for p in found["phases"]] == ["a", "b"] and found["total_s"] > 0
    assert stored["charged"] == ["b"] and stored["plan_id"] == told["incidents"][0]["plan_id"]
    text = lmres(c, "incidents")
    assert "<- first cause" in text and "phases in seconds" in text and max(map(len, text.splitlines())) <= 100
    assert "valid here: 2" in lmres(c, "incidents", "9", code=64)


def drain_and_readmit(c: Cluster) -> None:
    b, s = c.nodes["b"], c.nodes["c"]
    assert "did you mean" in lmres(c, "drain", "b2", code=64) or "valid here" in lmres(c, "drain", "b2", code=64)
    held = value_of(c, "drain", "b", "--reason", "new memory")
    assert (held["changed"], held["replaced_by"]) == (True, "c")
    s.wait_event("training_resumed", generation=3, rank=1)
    b.wait_event("agent_parked")
    value = value_of(c, "status")
    assert {n["node_id"]: (n["role"], n["slot"]) for n in value["nodes"]} == {
        "a": ("active", 0),
        "b": ("drained", None),
        "c": ("active", 1),
    }
    assert "new memory" in value["plan"]["reason"] and value["standbys"] == 0
    assert not value_of(c, "drain", "b")["changed"]
    assert value_of(c, "readmit", "b")["role"] == "standby"
    assert not value_of(c, "readmit", "b")["changed"]
    assert roles(c) == {"a": "active", "b": "standby", "c": "active"}
    wait_until("b knows", lambda: [e for e in b.events("agent_parked") if e["reason"] == "standby"])
    # And it is of use again: it takes over from the next one that is drained.
    assert value_of(c, "drain", "c")["replaced_by"] == "b"
    b.wait_event("training_resumed", generation=4, rank=1)


def test_the_command_line_of_a_run(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "100000"}) as c:
        nodes = c.form("a", "b", "c")
        nodes[0].wait_step(3)
        look(c)
        kill_a_worker(c)
        drain_and_readmit(c)
        stopped = value_of(c, "stop", "--reason", "enough", "--wait", "60")
        assert stopped["changed"] and stopped["ended"]
        assert [n.wait_exit() for n in nodes] == [1, 1, 1]
        for command in (["status"], ["incidents"], ["drain", "a"], ["stop"]):
            text = lmres(c, *command, code=69)
            assert "no store" in text and text.count("\n") == 1
        text = lmres(c, "incidents", "--events", *(str(n.folder / "state") for n in nodes))
        assert "stopped by the operator: enough" in text
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_a_run_with_a_store_file(tmp_path: Path) -> None:
    """Whoever looks on does not keep the last agent from removing the file."""
    with cluster(tmp_path, env={"STEPS": "100000"}, store_type="file", nnodes="1:2") as c:
        nodes = c.form("a", "b")
        assert roles(c) == {"a": "active", "b": "standby"}
        assert value_of(c, "stop", "--wait", "60")["ended"]
        assert [n.wait_exit() for n in nodes] == [1, 1]
        assert "no store" in lmres(c, "status", code=69)
        wait_until("nothing left", lambda: not c.leftovers(), 10)
        assert not list(tmp_path.glob("store*"))
