"""An agent or its host dies, leaves, or is frozen."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.e2e.cluster import cluster, store_pid_of, wait_until


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_node_is_replaced_and_comes_back_as_standby(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "100"}) as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        killed = b.kill_node()
        plan = a.wait_event("plan_committed", generation=2)
        assert (plan["action"], plan["active"]) == ("replace", {"0": "a", "1": "c"})
        assert plan["failure_class"] == "node_lost"
        # Long before heartbeat.timeout_s (5): two others have seen its connections close, and it missed a heartbeat.
        assert plan["time"] - killed < 2.5
        assert "connections to it closed (seen by a, c)" in plan["reason"]
        s.wait_event("training_resumed", generation=2, rank=1)
        assert 0.5 <= s.wait_event("recovery_completed", generation=2)["detect_s"] < 5.0
        back = c.start("b")
        back.wait_event("agent_parked")
        # The newcomer is a standby: it did not disturb the run.
        assert len(a.events("plan_committed")) == 2
        os.kill(s.worker_pids(2)[0], signal.SIGKILL)
        s.wait_event("training_resumed", generation=3)
        assert [n.wait_exit() for n in (a, s, back)] == [0, 0, 0]
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_without_standby_the_run_waits_and_a_late_agent_fills_the_slot(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "30"}, policy="heartbeat: {interval_s: 0.3, timeout_s: 2.0}\n") as c:
        a, b = c.form("a", "b")
        a.wait_step(3)
        worker = b.worker_pids(1)[0]
        b.kill()  # the agent alone: its workers go with it
        wait_until("the orphaned worker is gone", lambda: gone(worker), 5)
        a.wait_event("fault_detected", failure_class="node_lost")
        assert len(a.events("plan_committed")) == 1
        late = c.start("late")
        plan = a.wait_event("plan_committed", generation=2)
        assert (plan["action"], plan["active"]) == ("replace", {"0": "a", "1": "late"})
        assert [a.wait_exit(), late.wait_exit()] == [0, 0]


def test_a_killed_agent_alone_is_found_and_its_workers_go_too(tmp_path: Path) -> None:
    """A long lease shows that nobody waits for it."""
    with cluster(tmp_path, env={"STEPS": "40"}, policy="heartbeat: {interval_s: 0.5, timeout_s: 60}\n") as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        worker = b.worker_pids(1)[0]
        b.kill()
        plan = a.wait_event("plan_committed", 20, generation=2)
        assert (plan["failure_class"], plan["active"]) == ("node_lost", {"0": "a", "1": "c"})
        wait_until("the orphaned worker is gone", lambda: gone(worker), 5)
        assert [a.wait_exit(), s.wait_exit()] == [0, 0]
        wait_until("nothing left", lambda: not c.leftovers(), 15)


def test_of_two_agents_one_is_killed(tmp_path: Path) -> None:
    """Only one is left to tell: two heartbeats are missed, and its word does."""
    with cluster(tmp_path, env={"STEPS": "30"}, policy="heartbeat: {interval_s: 0.3, timeout_s: 60}\n") as c:
        a, b = c.form("a", "b")
        a.wait_step(3)
        b.kill_node()
        fault = a.wait_event("fault_detected", 20, failure_class="node_lost")
        assert "connections to it closed (seen by a)" in fault["detail"]
        late = c.start("late")
        assert [a.wait_exit(), late.wait_exit()] == [0, 0]


def test_without_standby_and_policy_fail_the_run_ends(tmp_path: Path) -> None:
    policy = "heartbeat: {interval_s: 0.3, timeout_s: 2.0}\nrecovery: {on_no_standby: fail}\n"
    with cluster(tmp_path, env={"STEPS": "300"}, policy=policy) as c:
        a, b = c.form("a", "b")
        a.wait_step(3)
        b.kill_node()
        assert a.wait_exit() == 1
        assert a.events("run_finished")[0]["outcome"] == "failed"
        assert "on_no_standby" in a.log


def test_sigterm_is_a_notice(tmp_path: Path) -> None:
    """A long lease shows that nobody waits for it."""
    with cluster(tmp_path, env={"STEPS": "40"}, policy="heartbeat: {interval_s: 0.5, timeout_s: 60}\n") as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        b.signal(signal.SIGTERM)
        plan = a.wait_event("plan_committed", 10, generation=2)
        assert (plan["action"], plan["failure_class"]) == ("replace", "drain")
        assert plan["active"] == {"0": "a", "1": "c"}
        assert b.wait_exit(30) == 1  # torch's own end after a signal
        assert b.events("agent_left")[0]["reason"] == "SIGTERM received"
        assert not [e for n in (a, s) for e in n.events("fault_detected", failure_class="node_lost")]
        assert [a.wait_exit(), s.wait_exit()] == [0, 0]
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_standbys_die_and_leave_without_a_trace(tmp_path: Path) -> None:
    policy = "heartbeat: {interval_s: 0.3, timeout_s: 2.0}\n"
    with cluster(tmp_path, nnodes="2:4", env={"STEPS": "120"}, policy=policy) as c:
        a, b, s, other = c.form("a", "b", "c", "d")
        a.wait_step(3)
        s.kill()
        other.signal(signal.SIGTERM)
        other.wait_exit(30)
        again = c.start("c")
        again.wait_event("agent_parked")
        assert [n.wait_exit() for n in (a, b, again)] == [0, 0, 0]
        assert len(a.events("plan_committed")) == 1
        assert not a.events("fault_detected")
        assert len(a.starts()) == 1
        finished = a.events("run_finished")[0]["time"]
        assert again.events("agent_left")[0]["time"] - finished < 5.0


def test_the_store_outlives_the_agent_that_started_it(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "30"}, policy="heartbeat: {interval_s: 0.3, timeout_s: 2.0}\n") as c:
        a, b, s = c.form("a", "b", "c")
        assert store_pid_of(a) is not None
        a.wait_step(3)
        a.kill_node()
        plan = b.wait_event("plan_committed", generation=2)
        assert plan["active"] == {"0": "c", "1": "b"}
        assert [b.wait_exit(), s.wait_exit()] == [0, 0]
        wait_until("nothing left", lambda: not c.leftovers(), 15)


def test_a_frozen_agent_is_replaced_and_wakes_as_standby(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "150"}, policy="heartbeat: {interval_s: 0.3, timeout_s: 2.0}\n") as c:
        a, b, s = c.form("a", "b", "c")
        a.wait_step(3)
        worker = b.worker_pids(1)[0]
        b.signal(signal.SIGSTOP)
        plan = a.wait_event("plan_committed", generation=2)
        # Its connections stand, so it is the lease that is over.
        assert "no heartbeat for 2." in plan["reason"] and "connections" not in plan["reason"]
        assert plan["active"] == {"0": "a", "1": "c"}
        # Its workers do not go on while it is frozen.
        wait_until("the frozen agent's worker is gone", lambda: gone(worker), 5)
        s.wait_event("training_resumed", generation=2)
        b.signal(signal.SIGCONT)
        parked = b.wait_event("agent_parked")
        assert parked["generation"] == 2
        assert len(b.starts()) == 1
        assert [n.wait_exit() for n in (a, b, s)] == [0, 0, 0]
        assert len(a.events("plan_committed")) == 2
