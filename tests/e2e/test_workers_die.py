"""A worker dies: who is blamed, what it costs, when the run ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.cluster import cluster, wait_until


def test_sigkill_of_one_worker_restarts_in_place_and_twice_replaces(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "60"}) as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        killed = b.worker_pids(1)[0]
        os.kill(killed, signal.SIGKILL)
        first = a.wait_event("plan_committed", generation=2)
        assert first["action"] == "restart"
        assert first["failure_class"] == "process_crash"
        assert first["active"] == {"0": "a", "1": "b"}
        fault = b.events("fault_detected")[0]
        assert fault["suspects"] == [{"node_id": "b", "rank": 1}]
        assert first["time"] - fault["time"] < 5.0  # 0.1 s, and room for a busy machine
        for node in (a, b):
            node.wait_event("training_resumed", generation=2)
            done = node.wait_event("recovery_completed", generation=2)
            assert done["total_s"] > 0
        # Only the victim's agent has spent one of torch's restarts.
        assert ("2", "0", "0") in a.starts()
        assert ("2", "1", "1") in b.starts()
        ports = [line.split()[4] for line in a.log.splitlines() if line.startswith("start ")]
        assert len(ports) == len(set(ports)) == 2, "each generation has a master port of its own"

        os.kill(b.worker_pids(2)[0], signal.SIGKILL)
        second = a.wait_event("plan_committed", generation=3)
        assert second["action"] == "replace"
        assert second["active"] == {"0": "a", "1": "c"}
        assert second["quarantined"] == ["b"]
        s.wait_event("training_resumed", generation=3, rank=1)
        b.wait_event("agent_parked")
        assert [n.wait_exit() for n in (a, b, s)] == [0, 0, 0]
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_the_first_cause_is_named_not_the_broken_connection(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"PLANT_RAISE": "1:5:9"}) as c:
        a, b = c.form("a", "b")
        assert [a.wait_exit(), b.wait_exit()] == [76, 76]
        plans = a.events("plan_committed")
        assert [p["action"] for p in plans] == ["start", "restart", "restart", "stop"]
        assert {p["failure_class"] for p in plans[1:]} == {"user_exception"}
        assert all("rank 1 on b" in p["reason"] and "planted at step 5" in p["reason"] for p in plans[1:])
        for node in (a, b):
            assert "ValueError: planted at step 5" in node.log.split("Root Cause")[1]
            assert node.events("run_finished")[0]["outcome"] == "failed"
        # Rank 1 was held: rank 0 never saw a broken connection, so nothing else was reported.
        assert {f["failure_class"] for f in a.events("fault_detected")} == {"user_exception"}


def test_without_restarts_the_node_is_replaced_and_without_standby_the_run_fails(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"PLANT_EXIT": "1:5:2", "STEPS": "20"}, max_restarts=0) as c:
        a, b, s = c.form("a", "b", "c")
        assert b.wait_exit() == 1
        plan = a.wait_event("plan_committed", generation=2)
        assert (plan["action"], plan["active"]) == ("replace", {"0": "a", "1": "c"})
        # Now c has the same fault, and nobody is left to take over.
        assert [a.wait_exit(), s.wait_exit()] == [1, 1]
        stop = a.wait_event("plan_committed", generation=3)
        assert stop["action"] == "stop"
        assert "exit code 7" in a.log.split("Root Cause")[1]


def test_without_policy_nothing_is_attached_and_a_crash_costs_only_the_victim(tmp_path: Path) -> None:
    with cluster(tmp_path, policy=None, env={"STEPS": "30"}) as c:
        a, b, _ = c.form("a", "b", "c")
        a.wait_step(3)
        os.kill(b.worker_pids(1)[0], signal.SIGKILL)
        plan = a.wait_event("plan_committed", generation=2)
        assert (plan["action"], plan["active"]) == ("restart", {"0": "a", "1": "b"})
        assert [n.wait_exit() for n in c.nodes.values()] == [0, 0, 0]
        assert ("2", "0", "0") in a.starts()
        assert ("2", "1", "1") in b.starts()
        assert not c.all_events("protection_armed")


def test_a_crash_near_the_end_is_no_success(tmp_path: Path) -> None:
    """Rank 0 ends well; rank 1 crashes seconds later: both run again."""
    with cluster(tmp_path, env={"STEPS": "5", "LAST_S": "2", "PLANT_LATE": "1:5"}) as c:
        a, b = c.form("a", "b")
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]
        assert [p["action"] for p in a.events("plan_committed")] == ["start", "restart"]
        assert a.log.count("rank 0 done") == 2


def test_several_workers_on_a_node_and_their_grandchildren(tmp_path: Path) -> None:
    program = tmp_path / "family.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "mark = os.environ['MARK']\n"
        "code = f'import time; time.sleep(300); {mark!r}'\n"
        "subprocess.Popen([sys.executable, '-S', '-c', code], start_new_session=True)\n"
        "time.sleep(2 if os.environ['LMRES_GENERATION'] != '1' else 300)\n"
        "dist.destroy_process_group()\n"
    )
    with cluster(tmp_path / "c", nnodes="2:2", nproc=2, program=[str(program)]) as c:
        c.env["MARK"] = c.run_id
        a, b = c.form("a", "b")
        pids = b.worker_pids(1)
        assert a.worker_pids(1) and len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        started = a.wait_event("generation_started", generation=2)
        assert (started["ranks"], started["world_size"]) == ([0, 1], 4)
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]
        wait_until("grandchildren gone", lambda: not c.leftovers(), 10)


def test_a_node_put_aside_may_end_with_69(tmp_path: Path) -> None:
    policy = "recovery: {node_strikes: 1, quarantined: exit}\n"
    with cluster(tmp_path, policy=policy, env={"STEPS": "20", "PLANT_EXIT": "1:5"}) as c:
        a, b, s = c.form("a", "b", "c")
        assert b.wait_exit() == 69
        assert [a.wait_exit(), s.wait_exit()] == [0, 0]
        assert a.events("plan_committed")[1]["quarantined"] == ["b"]
