"""Seconds from a fault to the next optimizer step: this backend against torchrun's own ``c10d``, interleaved.

    python -m benchmarks.recovery [--runs 5] [--faults crash node] [--json FILE]

The short form of ``benchmarks.compare``, which says what is measured and how: these two products and no costs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.compare import measure, phase_rows, rows_of
from benchmarks.measure import show
from benchmarks.products import FAULTS, products

BOUND_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", default=["crash", "node"], choices=FAULTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [p for p in products({}) if p.name in ("lmres", "c10d")]
    with tempfile.TemporaryDirectory(prefix="lmres-recovery-") as top:
        found = measure(chosen, options.faults, options.runs, BOUND_S, Path(top))
    show(rows_of(found, chosen, BOUND_S))
    show(phase_rows(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
