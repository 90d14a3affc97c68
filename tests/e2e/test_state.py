"""The state in memory: unchanged programs are killed and end bitwise as if nothing had happened (``running``)."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Node, cluster
from tests.e2e.running import ends, running

pytestmark = pytest.mark.e2e

SEEDS = int(os.environ.get("LMRES_STATE_SEEDS", "2"))
LONG = ("epochs.py", "--epochs", "15")
"""For two standbys: on a busy machine they start longer than the twenty steps of the short run take."""


# -- bitwise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_worker_then_a_node_killed_at_random(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with running(tmp_path, "epochs.py") as run:
        run.cluster.form("a", "b", "s")
        run.wait_steps(chance.randint(3, 6))
        run.kill_worker(chance)
        run.wait_generation(2)
        run.wait_steps(chance.randint(2, 5))
        chance.choice(run.active()).kill_node()
        run.assert_bitwise()
        run.assert_lost_at_most(2)
        restored = run.cluster.all_events("checkpoint_restored")
        assert {e["generation"] for e in restored} == {2, 3}
        assert {e["source"] for e in restored if e["generation"] == 2} == {"local"}
        assert run.cluster.leftovers() == []


@pytest.mark.parametrize(
    ("program", "nproc"),
    [
        (("epochs.py", "--workers", "2"), 1),
        (("cycle.py",), 1),
        (("env_step.py",), 1),
        (("averages.py",), 1),
        (("sharded.py", "fsdp2"), 1),
        (("sharded.py", "hsdp"), 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_other_programs_come_back_too(tmp_path: Path, program: tuple[str, ...], nproc: int) -> None:
    chance = random.Random(str(program))
    with running(tmp_path, *program, nproc=nproc) as run:
        run.cluster.form("a", "b", "s")
        run.wait_steps(chance.randint(4, 7))
        run.kill_worker(chance)
        run.wait_generation(2)
        run.wait_steps(chance.randint(2, 4))
        chance.choice(run.active()).kill_node()
        run.assert_bitwise()
        run.assert_lost_at_most(2)


@pytest.mark.parametrize("after", [6, 14, 19])
def test_a_program_with_checkpoints_of_its_own(tmp_path: Path, after: int) -> None:
    chance = random.Random(after)
    with running(tmp_path, "own_checkpoint.py", "FOLDER", env={"STEP_S": "0.05"}) as run:
        run.cluster.form("a", "b", "s")
        run.wait_steps(after)
        run.kill_worker(chance)
        run.assert_bitwise()
        saves = (tmp_path / "saves.txt").read_text().split()
        assert saves == sorted(set(saves)) == ["10", "20", "30"], (
            "a save is made once, and none of them on the way back"
        )


def test_three_ranks_come_back_bitwise(tmp_path: Path) -> None:
    """Sums of three depend on their order, and DDP's buckets set it."""
    with running(tmp_path, "cycle.py", nnodes="3:3") as run:
        run.cluster.form("a", "b", "c")
        run.wait_steps(5)
        run.kill_worker(random.Random(3))
        run.assert_bitwise()


def test_a_worker_told_to_end_in_mid_step_stops_all_at_one_saved_step(tmp_path: Path) -> None:
    with running(tmp_path, "epochs.py", nnodes="3:3") as run:
        run.cluster.form("a", "b", "c")
        run.wait_steps(5)
        run.kill_worker(random.Random(5), signal.SIGTERM)
        run.assert_bitwise()
        run.assert_lost_at_most(2)
        restored = run.cluster.all_events("checkpoint_restored", generation=2)
        assert len(restored) == 3 and len({e["step"] for e in restored}) == 1


def test_the_state_is_kept_where_numpy_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')\n")
    env = {"PYTHONPATH": str(tmp_path / "hidden"), "STEPS": "60"}
    with cluster(tmp_path / "run", nnodes="2:2", env=env) as made:
        a, b = made.form("a", "b")
        a.wait_step(8)
        os.kill(b.worker_pids(1)[0], signal.SIGKILL)
        plan = a.wait_event("plan_committed", generation=2)
        assert plan["recovery_step"] > 0, plan["reason"]
        assert {node.wait_event("checkpoint_restored")["step"] for node in (a, b)} == {plan["recovery_step"]}
        assert [node.wait_exit() for node in (a, b)] == [0, 0]


def test_a_state_that_the_program_prints_is_printed_once(tmp_path: Path) -> None:
    with running(tmp_path, "epochs.py", nnodes="2:2") as run:
        run.cluster.form("a", "b")
        run.wait_steps(8)
        run.kill_worker(random.Random(1))
        run.assert_bitwise()
        log = run.cluster.nodes["a"].log
        printed = [int(line.split()[3]) for line in log.splitlines() if line.startswith("rank 0 step ")]
        assert len(printed) - len(set(printed)) <= 2, printed
        assert log.count("lmres: going back to step") == 1
        assert "steps passed over in" in log


# -- what is lost -----------------------------------------------------------------------------------------------------


def test_both_nodes_lost_the_files_are_used(tmp_path: Path) -> None:
    policy = f"checkpoint: {{durable: {{directory: {tmp_path / 'files'}, interval_steps: 4, keep: 2}}}}\n"
    with running(tmp_path, *LONG, nnodes="2:4", policy=policy) as run:
        run.cluster.form("a", "b", "s", "t")
        run.wait_steps(9)
        for node in run.active():
            node.kill_node()
        run.assert_bitwise()
        plan = run.cluster.all_events("plan_committed", to_generation=2)[-1]
        # A busy machine makes more steps before the second kill.
        assert plan["recovery_step"] >= 4 and plan["recovery_step"] % 4 == 0, plan["reason"]
        assert set(plan["recovery_source"].values()) == {"durable"}
        steps = sorted(p.name for p in (tmp_path / "files").rglob("step-*"))
        assert len(steps) <= 2, steps


def test_one_active_node_has_its_copy_on_the_standby_that_came_after_it(tmp_path: Path) -> None:
    with running(tmp_path, "cycle.py", nnodes="1:2") as run:
        a, _ = run.cluster.form("a", "b")
        run.wait_steps(5)
        a.kill_node()
        run.assert_bitwise()
        run.assert_lost_at_most(2)
        plan = run.cluster.all_events("plan_committed", to_generation=2)[-1]
        assert plan["recovery_step"] > 0 and plan["active"] == {"0": "b"}


def killed_run(tmp_path: Path, program: str, *, interval_steps: int, steps: int, run_id: str) -> str:
    """A run of two nodes that dies whole after some steps. Its files stay: the policy that names them."""
    where = tmp_path / "files"
    policy = f"checkpoint: {{durable: {{directory: {where}, interval_steps: {interval_steps}, keep: 2}}}}\n"
    with running(tmp_path, program, nnodes="2:2", policy=policy, run_id=run_id) as run:
        run.cluster.form("a", "b")
        run.wait_steps(steps)
        for node in run.active():
            node.kill_node()
    (tmp_path / "second").mkdir()
    return policy


def test_a_new_run_with_the_same_id_goes_on_from_the_files(tmp_path: Path) -> None:
    policy = killed_run(tmp_path, "epochs.py", interval_steps=5, steps=12, run_id="again")
    with running(tmp_path / "second", "epochs.py", nnodes="2:2", policy=policy, run_id="again") as run:
        run.cluster.form("a", "b")
        run.assert_bitwise()
        assert run.cluster.all_events("plan_committed", to_generation=1)[0]["recovery_step"] in (5, 10)


def test_both_nodes_lost_without_files_is_an_honest_end(tmp_path: Path) -> None:
    with running(tmp_path, *LONG, nnodes="2:4", policy="checkpoint: {replicas: 2}\n") as run:
        run.cluster.form("a", "b", "s", "t")
        run.wait_steps(6)
        for node in run.active():
            node.kill_node()
        codes = [run.cluster.nodes[name].wait_exit() for name in ("s", "t")]
        assert codes == [1, 1], run.logs()
        reason = run.cluster.all_events("plan_committed", action="stop")[0]["reason"]
        assert "durable.directory" in reason and "step" in reason
        assert ends(run.folder) == {}


def test_files_of_another_topology_are_refused(tmp_path: Path) -> None:
    policy = killed_run(tmp_path, "cycle.py", interval_steps=3, steps=8, run_id="shape")
    with running(tmp_path / "second", "cycle.py", nnodes="1:1", policy=policy, run_id="shape") as run:
        node = run.cluster.start("a")
        assert node.wait_exit() == 64
        assert "2 ranks as 2 nodes of 1" in node.log and "1 ranks as 1 nodes of 1" in node.log


# -- never wrongly ----------------------------------------------------------------------------------------------------


def test_a_program_that_goes_another_way_is_stopped(tmp_path: Path) -> None:
    with running(tmp_path, "other_way.py", nnodes="2:2") as run:
        run.cluster.form("a", "b")
        run.wait_steps(6)
        run.kill_worker(random.Random(0))
        assert {n.wait_exit() for n in run.cluster.nodes.values()} == {1}, run.logs()
        log = run.cluster.nodes["a"].log
        assert "weight was 0.5, is 1.0" in log, log[-3000:]
        assert "LMRES_RESUME_STEP" in log, "the ways out are named"
        assert run.generation() == 2, "it is not tried again"
        assert ends(run.folder) == {}


def test_a_state_that_turns_to_nan_is_not_used_again(tmp_path: Path) -> None:
    policy = f"checkpoint: {{durable: {{directory: {tmp_path / 'files'}, interval_steps: 3, keep: 3}}}}\n"
    with running(tmp_path, "nan_once.py", "FOLDER", nnodes="2:2", policy=policy) as run:
        run.cluster.form("a", "b")
        run.wait_steps(6)
        run.kill_worker(random.Random(0))
        run.assert_bitwise()
        plans = {e["to_generation"]: e for e in run.cluster.all_events("plan_committed")}
        assert 0 < plans[3]["recovery_step"] < plans[2]["recovery_step"], plans[3]["reason"]


# -- protection never harms -------------------------------------------------------------------------------------------


def test_no_memory_for_the_state_is_said_and_training_goes_on(tmp_path: Path) -> None:
    policy = "checkpoint: {memory_limit_fraction: 0.000001}\n"
    with running(tmp_path, "cycle.py", nnodes="2:2", policy=policy) as run:
        run.cluster.form("a", "b")
        run.assert_bitwise()
        told = run.cluster.all_events("protection_off", adapter="vault")
        assert told and any("bytes" in e["reason"] or "MiB" in e["reason"] for e in told), told


def test_a_killed_vault_costs_the_protection_until_the_next_generation(tmp_path: Path) -> None:
    chance = random.Random(5)
    with running(tmp_path, "epochs.py", nnodes="2:2") as run:
        nodes = run.cluster.form("a", "b")
        run.wait_steps(4)
        for vault in vaults_of(nodes[0]):
            vault.kill()
        nodes[0].wait_event("protection_off", adapter="vault")
        before = run.wait_steps(3)
        run.kill_worker(chance)
        run.wait_generation(2)
        run.assert_bitwise()
        plan = run.cluster.all_events("plan_committed", to_generation=2)[-1]
        assert 0 < plan["recovery_step"] <= before, "the other vault has it"
        assert run.cluster.all_events("protection_armed", generation=2, node_id="a")


def test_a_vault_killed_as_the_plan_is_made_costs_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "epochs.py", nnodes="2:2") as run:
        nodes = run.cluster.form("a", "b")
        run.wait_steps(4)
        vaults = vaults_of(nodes[1])
        run.kill_worker(random.Random(7))
        nodes[1].wait_event("plan_committed", to_generation=2)
        for vault in vaults:
            vault.kill()
        run.assert_bitwise()
        assert run.cluster.leftovers() == []
        assert not list((tmp_path / "run").rglob("vault.sock"))


def vaults_of(node: Node) -> list[psutil.Process]:
    """The vault is in a session of its own; its state folder tells whose it is."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "vault_main" in words and str(node.folder) in words:
            found.append(process)
    assert found, f"no vault of {node.name}"
    return found
