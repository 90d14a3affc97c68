"""Runs without any failure, on a noisy machine, with everything looked for: no verdict, no second generation."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import running

pytestmark = pytest.mark.e2e

RUNS = int(os.environ.get("LMRES_CLEAN_RUNS", "5"))
POLICY = """
detection:
  hang_timeout_s: 20
  straggler: {slowdown: 1.5, windows: 3}
  corruption: {interval_steps: 3, replay: true}
  health: {interval_s: 0.5}
"""
PROGRAMS = (
    ("epochs.py", "--epochs", "6"),
    ("averages.py",),
    ("sharded.py", "hsdp", "--steps", "60"),
    ("scout/slow.py", "--steps", "80", "--uneven", "1.0"),
    ("cycle.py",),
)


@contextlib.contextmanager
def noise(processes: int) -> Iterator[None]:
    """Others that want the processors too, in bursts."""
    code = (
        "import time\nwhile True:\n    end = time.time() + 0.3\n    while time.time() < end: pass\n    time.sleep(0.2)"
    )
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("number", range(RUNS))
def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path, number: int) -> None:
    program = PROGRAMS[number % len(PROGRAMS)]
    nnodes, nproc = ("2:3", 2) if "hsdp" in program else ("3:4", 1)
    with noise(2), running(tmp_path, *program, nnodes=nnodes, nproc=nproc, policy=POLICY) as run:
        run.cluster.form(*("a", "b", "s") if nproc == 2 else ("a", "b", "c", "s"))
        run.assert_bitwise()
        found = run.cluster.all_events("fault_detected")
        assert not found, found
        assert {e["to_generation"] for e in run.cluster.all_events("plan_committed")} == {1}
        off = [e for e in run.cluster.all_events("protection_off") if e["adapter"] not in ("health", "replay")]
        assert not off, off
