"""Seconds from a fault until it is told with its class and culprit, and until training goes on; for each kind of fault.

    python -m benchmarks.detection [--runs 3] [--faults NAME ...] [--hang-s 3] [--folder FOLDER] [--json FILE]

Three agents with one worker each and a standby on this host, gloo, steps of about 40 ms, default policy but for
``hang_timeout_s`` (``--hang-s``), ``straggler.action: replace``, ``corruption.interval_steps: 4`` and a health command.
Runs are interleaved: every fault once, then again; medians are shown.

- ``told``: from the moment of the fault to the first ``fault_detected`` of its class that names somebody. For a hang
  the timeout is in it; ``beyond`` is what comes on top of it.
- ``right``: how often that event named the rank or node that went wrong, and only it.
- ``step``: from the fault to the first step of new processes.
- ``false``: events of another class or that name another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import Run, cell, events_of, show
from benchmarks.products import HERE, START_S, start_agents, wait_warm
from lmres.cli.trial import Trial, TrialAgent, store_pid, wait_for
from lmres.errors import LmresError

PROGRAM = str(HERE / "faulty.py")
VICTIM = 1
LEARNED_STEPS = 60
"""Steps before the fault: each part of the model has been replayed, paces are known."""
BOUND_S = 90.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``outside``: done to the worker or its host, not by the program. ``hang``: noticed by a timeout."""

    failure_class: str
    outside: bool = False
    hang: bool = False


FAULTS = {
    "killed": Fault("process_crash", outside=True),
    "node killed": Fault("node_lost", outside=True),
    "stopped": Fault("hang", outside=True, hang=True),
    "spin in C": Fault("hang", hang=True),
    "sleep": Fault("hang", hang=True),
    "loader": Fault("hang", hang=True),
    "save": Fault("hang", hang=True),
    "left out": Fault("collective_desync", hang=True),
    "other shape": Fault("collective_desync"),
    "slow compute": Fault("straggler"),
    "slow loader": Fault("straggler"),
    "parameter": Fault("silent_corruption"),
    "moment": Fault("silent_corruption"),
    "layer": Fault("silent_corruption"),
    "sick host": Fault("node_unhealthy", outside=True),
}


def policy(folder: Path, hang_s: float) -> Path:
    path = folder / "policy.yaml"
    path.write_text(
        f"""schema_version: 1
observe: {{log_level: debug}}
detection:
  hang_timeout_s: {hang_s}
  straggler: {{action: replace}}
  corruption: {{interval_steps: 4}}
  health: {{interval_s: 1, command: 'test ! -e {folder}/sick-$LMRES_NODE_ID'}}
"""
    )
    return path


def one(name: str, folder: Path, hang_s: float) -> Run:
    fault = FAULTS[name]
    try:
        with Trial(folder) as trial:
            victim = start(trial, name, hang_s)
            wait_for("training", lambda: len(trial.agents[0].told("step")) >= LEARNED_STEPS, START_S)
            wait_warm(trial)
            when = plant(trial, victim, name, fault)
            found = wait_for("fault_detected", lambda: first(trial, fault, when), BOUND_S)
            resumed = trial.resumed(when, BOUND_S)
            told = [e for e in events_of(trial, "fault_detected") if e["time"] >= when]
            return {
                "told_s": found["time"] - when,
                "step_s": None if resumed is None else resumed.step_s,
                "right": is_right(found, victim.name),
                "false": sorted({e["detail"] for e in told if not is_known(e, fault, victim.name)}),
            }
    except (LmresError, OSError) as error:
        return {"failed": str(error)}


def start(trial: Trial, name: str, hang_s: float) -> TrialAgent:
    """The agent of the rank that will go wrong."""
    env = {"FAULT": name, "FAULT_RANK": str(VICTIM), "FAULT_FILE": str(trial.folder / "fault")}
    start_agents(trial, "abcs", "3:4", sys.executable, [PROGRAM], policy(trial.folder, hang_s), env=env)

    def victim() -> TrialAgent | None:
        node = next((e["node_id"] for e in events_of(trial, "generation_started") if VICTIM in e["ranks"]), None)
        return next((agent for agent in trial.agents if agent.name == node), None)

    return wait_for("the victim's start", victim, START_S)


def plant(trial: Trial, victim: TrialAgent, name: str, fault: Fault) -> float:
    """The time at which it went wrong."""
    file = trial.folder / "fault"
    if not fault.outside:
        file.touch()
        when = file.with_name("fault.when")
        return float(wait_for("the fault", lambda: when.read_text() if when.exists() else None, START_S))
    if name == "killed":
        return victim.kill_worker()
    if name == "node killed":
        store = store_pid(victim)
        return victim.kill_node(but=() if store is None else (store,))
    if name == "stopped":
        return victim.stop_worker()
    (trial.folder / f"sick-{victim.name}").touch()
    return time.time()


def first(trial: Trial, fault: Fault, since: float) -> dict[str, Any] | None:
    told = [e for e in events_of(trial, "fault_detected") if e["time"] >= since and e["suspects"]]
    return next((e for e in told if e["failure_class"] == fault.failure_class), None)


def is_right(event: dict[str, Any], node: str) -> bool:
    return [(s["node_id"], s["rank"] in (None, VICTIM)) for s in event["suspects"]] == [(node, True)]


def is_known(event: dict[str, Any], fault: Fault, node: str) -> bool:
    """Broken connections at the victim's peers accuse nobody."""
    if not event["suspects"]:
        return True
    return event["failure_class"] == fault.failure_class and is_right(event, node)


def rows_of(found: dict[str, list[Run]], hang_s: float) -> list[list[str]]:
    rows = [["fault", "class", "told s", "min to max", "beyond s", "step s", "right", "false", "note"]]
    for name, runs in found.items():
        fault = FAULTS[name]
        told = [run["told_s"] for run in runs if "told_s" in run]
        steps = [run["step_s"] for run in runs if run.get("step_s") is not None]
        failed = [run["failed"] for run in runs if "failed" in run]
        middle = statistics.median(told) if told else None
        rows.append(
            [
                name,
                fault.failure_class,
                cell(middle),
                f"{min(told):.2f} to {max(told):.2f}" if told else "-",
                cell(middle - hang_s) if fault.hang and middle is not None else "-",
                cell(statistics.median(steps) if steps else None),
                f"{sum(run.get('right', False) for run in runs)}/{len(runs)}",
                str(sum(bool(run.get("false")) for run in runs)),
                failed[-1][:120] if failed else "",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, metavar="NAME")
    parser.add_argument("--hang-s", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="logs are kept here; else in a folder that is removed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[Run]] = {name: [] for name in options.faults}
    with tempfile.TemporaryDirectory(prefix="lmres-detection-") as temporary:
        top = options.folder or Path(temporary)
        for number in range(options.runs):
            for name in options.faults:
                run = one(name, top / f"{name.replace(' ', '-')}-{number}", options.hang_s)
                found[name].append(run)
                print(f"run {number + 1}, {name}: {run}", file=sys.stderr, flush=True)
    show(rows_of(found, options.hang_s))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
