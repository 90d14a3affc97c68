"""The store is frozen, for a while or for good, or gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.e2e.cluster import cluster, wait_until


def test_a_store_frozen_for_20_seconds_is_forgiven(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "3000"}) as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        store = c.store_pid()
        os.kill(store, signal.SIGSTOP)
        time.sleep(20)  # the length of the outage is the point
        before = a.log.count("step ")
        os.kill(store, signal.SIGCONT)
        assert before > 4, "training went on meanwhile"
        wait_until("the store answers again", lambda: "answers again" in a.log)
        os.kill(b.worker_pids(1)[0], signal.SIGKILL)
        assert a.wait_event("plan_committed", generation=2)["action"] == "restart"
        for node in (a, b):
            node.wait_event("training_resumed", generation=2)
        assert not c.all_events("fault_detected", failure_class="node_lost")
        assert s.process.poll() is None


def test_a_store_frozen_for_good_ends_every_agent_with_75(tmp_path: Path) -> None:
    conf = {"read_timeout": "6"}
    with cluster(tmp_path, env={"STEPS": "3000"}) as c:
        nodes = [c.start(n, conf=conf) for n in ("a", "b")]
        for node in nodes:
            node.wait_event("generation_started")
        nodes.append(c.start("c", conf=conf))
        nodes[2].wait_event("agent_parked")
        workers = [n.worker_pids(1)[0] for n in nodes[:2]]
        os.kill(c.store_pid(), signal.SIGSTOP)
        assert [n.wait_exit(60) for n in nodes] == [75, 75, 75]
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
        for node in nodes:
            ours = [line for line in node.log.splitlines() if line.startswith("[lmres")]
            assert len(ours) < 30
            assert node.events("fault_detected", failure_class="store_lost")


def test_a_killed_store_ends_every_agent_with_75(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "3000"}) as c:
        nodes = c.form("a", "b", "c")
        os.kill(c.store_pid(), signal.SIGKILL)
        assert [n.wait_exit(60) for n in nodes] == [75, 75, 75]
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_a_dead_port_is_given_up_after_timeout(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        began = time.monotonic()
        node = c.start("a", conf={"timeout": "3", "is_host": "false"})
        assert node.wait_exit(40) == 75
        assert 3 <= time.monotonic() - began < 20  # 3 to 5 s, the start of Python and torch, and a busy machine
        assert f"no store answered at --rdzv-endpoint={c.endpoint}" in node.log
        assert "is_host=true" in node.log
        assert node.log.count("waiting for the store at") == 1
