"""``python -m tests.sim --seed N --trace`` replays one seed; ``--count N`` runs many and tells how fast."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.mutants import MUTANTS, planted
from tests.sim.oracle import Violation
from tests.sim.run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    args = parser.parse_args()
    began, bad = time.monotonic(), 0
    for seed in range(args.seed, args.seed + args.count):
        try:
            with planted(args.mutant):
                world = run_seed(seed, trace=args.trace)
        except Violation as violation:
            bad += 1
            print(f"seed {seed}: {violation}")
            continue
        if args.count == 1:
            codes = sorted((p.name, p.exit_code) for p in world.processes)
            print(f"seed {seed}: {world.digest()} {codes}")
    took = time.monotonic() - began
    print(f"{args.count} seeds, {bad} violations, {args.count / took:.1f} seeds/s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
