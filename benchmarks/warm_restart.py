"""Seconds from SIGKILL of a worker to the first step of the new group: cold workers against warm ones, interleaved.

    python -m benchmarks.warm_restart [--runs 5] [--json FILE]

Three agents on one host (two active, one standby), gloo, the tiny DDP program of the tests. Each run starts a fresh
cluster, trains until the pools are filled, and then kills

- ``worker``: one worker; the group restarts on the same agents;
- ``node``: an agent and its worker; the standby takes over with a worker that never ran.

``start``: from the last worker's start to the first step, ``total``: from the kill to it. ``step``: the median time of
a training step while the pool fills, over the same of a cold run (what the imports cost the training).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.e2e import cluster as e2e

FILL_S = 4.0
POLICY = "heartbeat: {interval_s: 0.2, timeout_s: 1.5}\nobserve: {log_level: debug}\n"
STEP_S = 0.02


def one(folder: Path, fault: str, warm: bool) -> dict[str, float]:
    env = {"STEPS": "100000", "STEP_S": str(STEP_S), "STAMP": "1"}
    with e2e.cluster(folder, env=env, policy=POLICY + f"workers: {{warm: {str(warm).lower()}}}\n") as made:
        nodes = made.form("a", "b", "c")
        for node in nodes[:2]:
            node.wait_event("training_resumed", generation=1)
        time.sleep(FILL_S)
        if warm:
            for node in nodes:
                e2e.wait_until(f"{node.name} is warm", lambda node=node: "is ready, " in node.log)
        steps = [float(line.split()[2]) for line in nodes[0].log.splitlines() if line.startswith("step ")]
        if fault == "worker":
            killed_at = time.time()
            os.kill(nodes[1].worker_pids(1)[0], 9)
            second = nodes[1]
        else:
            killed_at = nodes[1].kill_node()
            second = nodes[2]
        resumed = [node.wait_event("training_resumed", generation=2)["time"] for node in (nodes[0], second)]
        started = [node.wait_event("generation_started", generation=2)["time"] for node in (nodes[0], second)]
        cold = sum("starts cold" in line for node in nodes for line in node.log.split("is ready, ", 1)[-1].splitlines())
        if warm and cold:
            print(*(line for node in nodes for line in node.log.splitlines() if "cold" in line), sep="\n")
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    return {
        "start": max(resumed) - max(started),
        "total": max(resumed) - killed_at,
        "step": statistics.mean(gaps[: int(FILL_S / STEP_S)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(args.runs):
            for fault in ("worker", "node"):
                for warm in (False, True):
                    name = f"{fault} {'warm' if warm else 'cold'}"
                    found = one(Path(folder) / f"{run}-{name.replace(' ', '-')}", fault, warm)
                    results.setdefault(name, []).append(found)
                    print(f"run {run + 1}, {name}:", *(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    print(f"\n{'':14}{'start s':>9}{'total s':>9}{'(min to max)':>16}{'step ms':>9}")
    for name, runs in results.items():
        middle: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        totals = sorted(run["total"] for run in runs)
        span = f"{totals[0]:.2f} to {totals[-1]:.2f}"
        print(f"{name:14}{middle['start']:9.2f}{middle['total']:9.2f}{span:>16}{middle['step'] * 1000:9.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
