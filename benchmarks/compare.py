"""Seconds from a fault to the next optimizer step, this backend beside what else there is, and what it costs at rest.

    python -m benchmarks.compare [--runs 5] [--rival NAME=PYTHON ...] [--only NAME ...] [--faults ...] [--costs ...]
                                 [--bound 60] [--json FILE]

Everything on one host with two cores or more, gloo, one worker an agent. ``--rival`` names the interpreter of an
environment that has a product: ``ft_launcher`` (nvidia-resiliency-ext), ``lm-resiliency``, ``torchft``; ``c10d`` and
``lmres`` use this one unless named. What is not there, or did not start, stands in the table with the reason.

Faults, each planted once training is under way (``benchmarks/products.py`` says how each is started):

- ``crash``: SIGKILL of a worker; ``hang``: SIGSTOP of a worker; ``node``: SIGKILL of an agent and its workers.

Runs are interleaved: every product once, then again. ``step``: from the fault to the first step of the new processes
(torchft: to the first committed step without the victim). ``life``: to the first line of the last new process, so
noticing, stopping, meeting and launching; ``group``: to its process group, so imports too. "no next step in N s" and
"not noticed in N s" (a hang): none within ``--bound``; after two such runs in a row a product is not tried again with
that fault.

``--costs`` (all by default, none with ``--costs none``): see ``benchmarks/costs.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import costs
from benchmarks.measure import Run, cell, one, show, summary
from benchmarks.products import FAULTS, HANG_S, Product, products
from lmres.errors import LmresError

NEVER = 2
"""So many runs in a row without a next step, and a product is not tried again."""


def measure(
    chosen: list[Product],
    faults: list[str],
    runs: int,
    bound_s: float,
    top: Path,
) -> dict[str, dict[str, list[Run]]]:
    """Runs by fault and product, interleaved."""
    found: dict[str, dict[str, list[Run]]] = {f: {p.name: [] for p in chosen} for f in faults}
    for number in range(runs):
        for fault in faults:
            for product in chosen:
                before = found[fault][product.name]
                if len(before) >= NEVER and all(r.get("step_s") is None for r in before[-NEVER:]):
                    continue
                run = one(product, fault, top / f"{fault}-{product.name}-{number}", bound_s)
                before.append(run)
                shown = run.get("step_s")
                words = f"{shown:.2f} s" if shown is not None else run.get("failed", "no step")[:200]
                print(f"run {number + 1}, {fault}, {product.name}: {words}", file=sys.stderr, flush=True)
    return found


def rows_of(found: dict[str, dict[str, list[Run]]], chosen: list[Product], bound_s: float) -> list[list[str]]:
    rows = [["fault", "product", "step s", "min to max", "life s", "group s", "runs", "to c10d", "note"]]
    for fault, by_name in found.items():
        base = summary(by_name.get("c10d", []))["median"]
        for product in chosen:
            runs = by_name[product.name]
            steps = summary(runs)
            notes = [product.note] if product.note else []
            if steps["recovered"] < len(runs):
                failed = [run["failed"] for run in runs if "failed" in run]
                late = len(runs) - steps["recovered"] - len(failed)
                if late:
                    what = "not noticed" if fault == "hang" else "no next step"
                    notes.insert(0, f"{what} in {bound_s:.0f} s" + (f" ({late})" if steps["recovered"] else ""))
                notes = [f"did not start: {_last(failed[-1])}", *notes] if failed else notes
            median = steps["median"]
            spans = [summary(runs, key)["median"] for key in ("life_s", "group_s")]
            rows.append(
                [
                    fault,
                    product.name,
                    cell(median),
                    "-" if median is None else f"{steps['min']:.2f} to {steps['max']:.2f}",
                    *map(cell, spans),
                    f"{steps['recovered']}/{len(runs)}",
                    f"{median / base:.2f}" if median is not None and base else "-",
                    "; ".join(notes),
                ]
            )
    return rows


def phase_rows(found: dict[str, dict[str, list[Run]]]) -> list[list[str]]:
    """Medians of what the first agent told of its own recoveries."""
    rows: list[list[str]] = []
    for fault, by_name in found.items():
        told = [run["phases"] for run in by_name.get("lmres", []) if run.get("phases")]
        names = list(told[0]) if told else []
        if not rows and names:
            rows.append(["lmres", *(name.removesuffix("_s") for name in names)])
        if names:
            rows.append([fault, *(cell(summary(told, name)["median"]) for name in names)])
    return rows


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{lines[0]} .. {lines[-1]}"[:160] if len(lines) > 1 else text[:160]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these products")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--costs", nargs="+", default=list(costs.PARTS), choices=[*costs.PARTS, "none"])
    parser.add_argument("--bound", type=float, default=60.0, help="seconds to wait for the next step")
    parser.add_argument("--folder", type=Path, help="logs are kept here; else in a folder that is removed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for pair in options.rival:
        name, _, python = pair.partition("=")
        if name not in [p.name for p in products({})] or not Path(python).is_file():
            parser.error(f"--rival: found {pair!r}; expected NAME=PYTHON with a known product and its interpreter")
    return options


def main() -> None:
    options = parse()
    known = products(dict(pair.split("=", 1) for pair in options.rival))
    asked = [p for p in known if not options.only or p.name in options.only]
    missing = {p.name: reason for p in asked if (reason := p.missing())}
    chosen = [p for p in asked if p.name not in missing]
    results: dict[str, Any] = {"missing": missing, "hang_timeout_s": HANG_S, "bound_s": options.bound}
    with tempfile.TemporaryDirectory(prefix="lmres-compare-") as temporary:
        top = options.folder or Path(temporary)
        if options.faults:
            found = measure(chosen, options.faults, options.runs, options.bound, top)
            results["faults"] = found
            rows = rows_of(found, chosen, options.bound)
            rows += [["all", name, *["-"] * 6, f"not run: {reason}"] for name, reason in missing.items()]
            show(rows)
            if any(run.get("phases") for runs in found.values() for run in runs.get("lmres", [])):
                print()
                show(phase_rows(found))
        by_name = {p.name: p for p in chosen}
        for part in options.costs:
            if part == "none" or "lmres" not in by_name:
                continue
            try:
                result, rows = costs.PARTS[part](by_name, options.runs, top / part)
            except (LmresError, OSError) as error:
                result, rows = {"failed": str(error)}, [[part, f"could not be measured: {_last(str(error))}"]]
            results[part] = result
            print(f"\n{part}: {costs.PARTS[part].__doc__}")
            show(rows)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
