"""The simulator must find every planted bug."""

import pytest

from tests.sim.mutants import FIRST_SEEDS, MUTANTS, planted
from tests.sim.oracle import Violation
from tests.sim.run import run_seed

PATIENCE = 150
"""Seeds after the one that found it last time, for the day on which the seeds mean something else."""


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    first = FIRST_SEEDS.get(name, 0)
    for seed in range(first, first + PATIENCE):
        try:
            with planted(name):
                run_seed(seed)
        except Violation:
            return
    pytest.fail(f"{name} was not found in {PATIENCE} seeds")
