"""Every seed is a run with its own faults; the seed is the test's name. ``LMRES_SIM_SEEDS`` runs more of them."""

import os

import pytest

from tests.sim.run import run_large, run_seed

SEEDS = int(os.environ.get("LMRES_SIM_SEEDS", "300"))


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed{seed}")
def test_seed(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"large{seed}")
def test_large_run_survives_the_loss_of_all_observers(seed: int) -> None:
    world = run_large(seed)
    assert any(f.outcome == "succeeded" for f in world.oracle.finished)
    refused = [p for p in world.processes if p.exit_code == 64]
    assert len(refused) >= 3, "54 agents came, 50 is the limit"
