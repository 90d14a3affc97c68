"""The demonstration of the README, with fewer steps: both failures are recovered from and told, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import wait_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--steps=40", "--timeout-s=90"]


def processes_of(folder: Path) -> list[str]:
    """Those that name the folder in their command line or environment, but for the demonstration itself."""
    found = []
    for process in psutil.process_iter():
        try:
            marks = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if any(str(folder) in mark for mark in marks) and COMMAND[1] not in process.cmdline():
            found.append(f"{process.pid}: {' '.join(process.cmdline())[:150]}")
    return found


def test_recovers_from_both_failures_and_tells_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        [*COMMAND, f"--folder={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "\033" not in done.stdout, "no colours where nobody looks"

    acts, timeline = done.stdout.split("What the agents recorded")
    assert len(re.findall(r"training again \d+\.\d s after the kill", acts)) == 2, acts
    assert "step 40, loss" in acts
    assert re.search(r"^  process_crash( +(\d+\.\d\d|-))+$", timeline, re.MULTILINE), timeline
    assert re.search(r"^  node_lost( +(\d+\.\d\d|-))+$", timeline, re.MULTILINE), timeline
    assert re.search(r"process_crash +restart: .*SIGKILL", timeline), timeline
    assert re.search(r"node_lost +replace: .*bravo.*charlie", timeline), timeline

    assert processes_of(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}{end}" for name in ("alpha", "bravo", "charlie") for end in ("", ".log")
    )


def test_ends_what_it_started_when_it_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (tmp_path / "output.txt").open("w") as output:
        demo = subprocess.Popen([*COMMAND, f"--folder={folder}"], cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until("workers that train", lambda: "step" in log_of(folder / "alpha.log"))
        assert processes_of(folder)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 128 + signal.SIGTERM
    finally:
        demo.kill()
        demo.wait(10)
    assert processes_of(folder) == []


def log_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_says_what_failed(tmp_path: Path) -> None:
    """Agents that do not start: the message names one, the end of its log is shown, and the exit status tells."""
    broken = tmp_path / "modules" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('planted')")
    done = subprocess.run(
        [*COMMAND, f"--folder={tmp_path / 'run'}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(broken.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "quickstart failed: alpha ended with 1" in done.stderr
    assert "ImportError: planted" in done.stderr
