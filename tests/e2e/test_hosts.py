"""Agents on hosts of their own: addresses, a pulled cable, the store's host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.cluster import cluster, wait_until
from tests.e2e.hosts import hosts

GLOO = {"GLOO_SOCKET_IFNAME": "eth0"}  # all hosts here have one name, so gloo can not choose by it
LMRES = [sys.executable, "-m", "lmres.cli.main"]
POLICY = "heartbeat: {interval_s: 0.3, timeout_s: 2.0}\n"


def test_a_cut_off_host_is_replaced_and_ends_with_75(tmp_path: Path) -> None:
    with (
        hosts("h1", "h2", "h3") as net,
        cluster(tmp_path, endpoint=f"{net.address('h1')}:29411", policy=POLICY, env={"STEPS": "60", **GLOO}) as c,
    ):
        conf = {"read_timeout": "6"}
        nodes = []
        for name in ("h1", "h2"):
            nodes.append(c.start(name, prefix=net.prefix(name), conf=conf))
            nodes[-1].wait_event("agent_joined")
        for node in nodes:
            node.wait_event("generation_started", generation=1)
        nodes.append(c.start("h3", prefix=net.prefix("h3"), conf=conf))
        nodes[2].wait_event("agent_parked")
        a, b, s = nodes
        assert b.events("agent_joined")[0]["address"] == net.address("h2")
        a.wait_step(3)
        net.cut("h2")
        plan = a.wait_event("plan_committed", generation=2)
        assert (plan["failure_class"], plan["active"]) == ("node_lost", {"0": "h1", "1": "h3"})
        # Nothing is closed by that: connections hang, and the lease runs out.
        assert "no heartbeat for 2." in plan["reason"] and "connections" not in plan["reason"]
        worker = b.worker_pids(1)[0]
        assert b.wait_exit(60) == 75
        assert not psutil.pid_exists(worker)
        assert [a.wait_exit(), s.wait_exit()] == [0, 0]


def test_a_node_killed_on_another_host_is_found_by_its_neighbours(tmp_path: Path) -> None:
    with (
        hosts("h1", "h2", "h3") as net,
        cluster(
            tmp_path,
            endpoint=f"{net.address('h1')}:29411",
            policy="heartbeat: {interval_s: 0.5, timeout_s: 60}\n",
            env={"STEPS": "60", **GLOO},
        ) as c,
    ):
        nodes = []
        for name in ("h1", "h2", "h3"):
            nodes.append(c.start(name, prefix=net.prefix(name)))
            nodes[-1].wait_event("agent_joined")
        a, b, s = nodes
        a.wait_step(3)
        b.kill_node()
        plan = a.wait_event("plan_committed", 20, generation=2)
        assert plan["active"] == {"0": "h1", "1": "h3"}
        assert "connections to it closed (seen by h1, h3)" in plan["reason"]
        assert [a.wait_exit(), s.wait_exit()] == [0, 0]


def test_a_short_cut_of_the_cable_is_forgiven(tmp_path: Path) -> None:
    with (
        hosts("h1", "h2") as net,
        cluster(tmp_path, endpoint=f"{net.address('h1')}:29411", nnodes="2:2", env={"STEPS": "80", **GLOO}) as c,
    ):
        a = c.start("h1", prefix=net.prefix("h1"))
        a.wait_event("agent_joined")
        b = c.start("h2", prefix=net.prefix("h2"))
        a.wait_step(3)
        net.cut("h2")
        wait_until("the agent notices", lambda: "does not answer" in b.log, 20)
        net.mend("h2")
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]


def test_the_stores_host_is_lost(tmp_path: Path) -> None:
    with (
        hosts("h1", "h2", "h3") as net,
        cluster(tmp_path, endpoint=f"{net.address('h3')}:29411", policy=POLICY, env={"STEPS": "3000", **GLOO}) as c,
    ):
        conf = {"read_timeout": "6"}
        # h3 only carries the store: its agent comes first, but not into the group, since it is drained at once.
        s = c.start("h3", prefix=net.prefix("h3"), conf=conf, args={"--nnodes": "2:3"})
        s.wait_event("agent_joined")
        done = subprocess.run(
            [*net.prefix("h1"), *LMRES, "drain", "h3", f"--rdzv-endpoint={c.endpoint}", f"--rdzv-id={c.run_id}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        a = c.start("h1", prefix=net.prefix("h1"), conf=conf)
        a.wait_event("agent_joined")
        b = c.start("h2", prefix=net.prefix("h2"), conf=conf)
        assert a.wait_event("plan_committed")["active"] == {"0": "h1", "1": "h2"}
        a.wait_step(3)
        net.cut("h3")
        assert [a.wait_exit(60), b.wait_exit(60)] == [75, 75]
