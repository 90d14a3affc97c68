"""Seconds from a fault to the next optimizer step: this backend against torchrun's own ``c10d``, interleaved.

    python -m benchmarks.recovery [--runs 5] [--json FILE]

Agents on one host, gloo, a tiny DDP program (``tests/e2e/programs/ddp.py``), default policy. Each run starts a fresh
cluster, waits until training is under way, plants the fault, and takes the time until rank 0's first completed step of
the restarted group. Printed: median, smallest and largest of each, and the ratio of medians. Faults:

- ``worker``: SIGKILL of one worker, two agents (and for this backend one standby);
- ``node``: SIGKILL of an agent and its workers. ``c10d`` has no standbys: with ``--nnodes=1:2`` it goes on smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.e2e.cluster import PROGRAM, TORCHRUN, Cluster, free_port, wait_until

GIVE_UP_S = 60.0
QUIET_S = 20.0
"""Training time before the fault: long enough for background work after the start to be over."""


def steps(log: Path) -> list[tuple[int, float]]:
    """(step, wall time) of each line that rank 0 printed."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "step":
            found.append((int(words[1]), float(words[2])))
    return found


def first_step_after(logs: list[Path], when: float) -> float | None:
    """Seconds from ``when`` to the first step 1 after it."""

    def seen() -> float | None:
        again = [t for log in logs for s, t in steps(log) if s == 1 and t > when]
        return min(again) - when if again else None

    try:
        return float(wait_until("the next step", seen, GIVE_UP_S))
    except AssertionError:
        return None


def ours(fault: str, folder: Path) -> float | None:
    cluster = Cluster(folder=folder, env={"STEPS": "100000", "STAMP": "1"})
    try:
        a, b, c = cluster.form("a", "b", "c")
        a.wait_step(1)
        time.sleep(QUIET_S)
        if fault == "worker":
            when = time.time()
            os.kill(b.worker_pids(1)[0], signal.SIGKILL)
        else:
            when = b.kill_node()
        return first_step_after([n.folder / "log.txt" for n in (a, b, c)], when)
    finally:
        cluster.close()


def c10d(fault: str, folder: Path) -> float | None:
    port, agents = free_port(), []
    folder.mkdir(parents=True)
    nnodes = "2:2" if fault == "worker" else "1:2"
    logs = [folder / f"{n}.txt" for n in "ab"]
    try:
        for log in logs:
            command = [
                *TORCHRUN, f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", str(PROGRAM),
            ]  # fmt: skip
            env = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": "100000", "STAMP": "1"}
            with log.open("wb") as out:
                agents.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))
            time.sleep(0.5)
        wait_until("both agents train", lambda: all("start " in log.read_text() for log in logs))
        wait_until("the first step", lambda: any(steps(log) for log in logs))
        time.sleep(QUIET_S)
        worker = psutil.Process(agents[1].pid).children()[0].pid
        when = time.time()
        if fault == "node":
            os.kill(agents[1].pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        return first_step_after(logs, when)
    finally:
        for agent in agents:
            for victim in [*psutil.Process(agent.pid).children(recursive=True), agent] if agent.poll() is None else []:
                victim.kill()
            agent.wait(30)


def summary(values: list[float | None]) -> dict[str, Any]:
    good = [v for v in values if v is not None]
    if not good:
        return {"median": None, "runs": len(values), "recovered": 0}
    return {
        "median": round(statistics.median(good), 2),
        "min": round(min(good), 2),
        "max": round(max(good), 2),
        "runs": len(values),
        "recovered": len(good),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", default=["worker", "node"], choices=["worker", "node"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[float | None]]] = {f: {"lm_resiliency": [], "c10d": []} for f in options.faults}
    with tempfile.TemporaryDirectory(prefix="lmres-bench-") as top:
        for run in range(options.runs):
            for fault in options.faults:
                results[fault]["lm_resiliency"].append(ours(fault, Path(top) / f"ours-{fault}-{run}"))
                results[fault]["c10d"].append(c10d(fault, Path(top) / f"c10d-{fault}-{run}"))
    table = {f: {name: summary(values) for name, values in both.items()} for f, both in results.items()}
    print(f"{'fault':8} {'backend':14} {'median s':>9} {'min':>7} {'max':>7} {'recovered':>10} {'ratio':>7}")
    for fault, both in table.items():
        base = both["c10d"]["median"]
        for name, row in both.items():
            ratio = f"{row['median'] / base:.2f}" if row["median"] is not None and base else "-"
            cells = [str(row.get(k, "-")) for k in ("median", "min", "max")]
            share = f"{row['recovered']}/{row['runs']}"
            print(f"{fault:8} {name:14} {cells[0]:>9} {cells[1]:>7} {cells[2]:>7} {share:>10} {ratio:>7}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
