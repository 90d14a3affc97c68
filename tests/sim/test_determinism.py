"""A seed is the whole truth: the log of a run depends on nothing else, least of all on the order of hashes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.sim.doubts import Doubts
from tests.sim.looks import Looks
from tests.sim.run import run_seed
from tests.sim.world import World

ROOT = Path(__file__).parents[2]
PROGRAM = "from tests.sim.run import run_seed\nfor seed in (3, 19, 27, 40): print(run_seed(seed).digest())"


def digests(hash_seed: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


def test_same_log_under_two_hash_seeds() -> None:
    first = digests("1")
    assert len(set(first)) == 4
    assert first == digests("2")


@pytest.mark.parametrize("part", [Looks, Doubts])
def test_a_part_that_is_off_changes_nothing(part: type) -> None:
    """Each has a source of chance of its own, so that a seed without it means what it meant before there was one."""
    seed = next(s for s in range(50) if not _drawn(part, World(s)).on)
    before = run_seed(seed).digest()
    absent = dataclasses.replace(_drawn(part, World(seed)), chance=None)
    with mock.patch.object(part, "of", lambda world: dataclasses.replace(absent, world=world)):
        assert run_seed(seed).digest() == before


def _drawn(part: type, world: World) -> Any:
    return getattr(world, part.__name__.lower())
