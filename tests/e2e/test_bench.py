"""``lmres bench`` on this host: both faults are planted, recovered from and told, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e


def test_bench(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema_version: 1\nobserve: {log_level: debug}\n")
    done = subprocess.run(
        [sys.executable, "-m", "lmres.cli.main", "bench", "--json", f"--keep={folder}", f"--policy={policy}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    faults = json.loads(done.stdout)["faults"]
    assert list(faults) == ["worker", "node"]
    for result in faults.values():
        assert result["planted_here"]
        assert result["step_s"] > 0
        assert [a["slot"] for a in result["agents"]] == [0, 1]
        assert all(a["total_s"] > 0 for a in result["agents"])
    left = [p for p in psutil.process_iter() if str(folder) in " ".join(_words(p))]
    assert left == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
