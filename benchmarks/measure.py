"""One planted fault, and the summary of several."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.products import QUIET_S, Product, hurt, resumed
from lmres.cli.text import table
from lmres.cli.trial import Trial
from lmres.errors import LmresError

Run = dict[str, Any]


def one(product: Product, fault: str, folder: Path, bound_s: float, env: Mapping[str, str] | None = None) -> Run:
    """One run: its spans in seconds, or why there are none."""
    try:
        with Trial(folder) as trial:
            product.start(product, trial, fault, env or {})
            time.sleep(QUIET_S)
            fault_s = hurt(product, trial, fault)
            found = resumed(product, trial, fault_s, bound_s)
            if found is None:
                return {"step_s": None}
            spans = {"step_s": found.step_s, "life_s": found.life_s, "group_s": found.group_s}
            return {**spans, "phases": own_phases(trial)} if product.name == "lmres" else spans
    except (LmresError, OSError) as error:
        return {"failed": str(error)}


def own_phases(trial: Trial) -> dict[str, float | None]:
    """The phases that the first agent, whose worker is not the victim, told of its recovery."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for event in events_of(trial, "recovery_completed"):
            if event["node_id"] == trial.agents[0].name:
                return {k: v for k, v in event.items() if k.endswith("_s")}
        time.sleep(0.1)
    return {}


def events_of(trial: Trial, name: str) -> list[dict[str, Any]]:
    """All agents' events of this name, by time."""
    found = []
    for agent in trial.agents:
        path = trial.folder / agent.name / "events.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            if f'"{name}"' in line and line.endswith("}"):
                found.append(json.loads(line))
    return sorted((e for e in found if e["event"] == name), key=lambda e: float(e["time"]))


def summary(runs: list[Run], key: str = "step_s") -> dict[str, Any]:
    """Median, least and most of what there is."""
    good = [run[key] for run in runs if run.get(key) is not None]
    if not good:
        return {"median": None, "runs": len(runs), "recovered": 0}
    return {
        "median": statistics.median(good),
        "min": min(good),
        "max": max(good),
        "runs": len(runs),
        "recovered": len(good),
    }


def cell(value: float | None) -> str:
    """Seconds for a table."""
    return "-" if value is None else f"{value:.2f}"


def show(rows: list[list[str]]) -> None:
    print("\n".join(table(rows, width=10_000)), flush=True)
