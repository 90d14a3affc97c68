"""Seconds to capture a training state into memory and to put it back, over a plain copy of the same bytes.

    python -m benchmarks.capture [--runs 9] [--gb 0.1 1] [--four] [--steps 200] [--shared] [--json FILE]

One process, AdamW over square linear layers, memory as the vault gives it (a mapped ``memfd``, touched beforehand).
The three are run in turn, medians are shown:

- ``plain``: one ``copy_`` for each tensor between memories of the same sizes, everything at once;
- ``capture``: collect, lay out, copy, all of it blocking, until it is whole (``/plain`` should be at most 1.1);
  ``start`` and ``finish``: what the program waits for when the copy runs beside forward and backward;
- ``restore``: read and put in place (``plain/`` should be at least 0.8).

``overhead``: a training step of 100 ms (sleep and a small computation) with 20 MB of state, captured in each step,
over the same without, in turn; the median of the differences of neighbours over the median step. Once the copy runs
while the step sleeps (as if an accelerator worked), once while it computes with all cores.
``--shared``: W processes that copy the same state at once, each all of it or each 1/W of it.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmres.adapters.capture.collect import Collector
from lmres.adapters.capture.copy import Copier
from lmres.adapters.capture.image import plan_layout
from lmres.adapters.capture.restore import apply, read
from lmres.adapters.capture.state import State

LAYERS = 12
STEP_S = 0.1
OVERHEAD_GB = 0.02


def memory(size: int) -> memoryview:
    """Touched memory of a ``memfd``."""
    descriptor = os.memfd_create("lmres-benchmark")
    os.ftruncate(descriptor, size)
    mapped = memoryview(mmap.mmap(descriptor, size))
    os.close(descriptor)
    torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
    return mapped


class Training:
    """A model with its optimizer, of about so many bytes in all, after its first step."""

    def __init__(self, gb: float, layers: int = LAYERS) -> None:
        width = max(8, int(math.sqrt(gb * 1e9 / 3 / 4 / layers)))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(2, width)
        self.compute()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = State(roots=(self.model,), optimizers=(self.optimizer,))

    def compute(self) -> None:
        self.model(self.data).pow(2).mean().backward()


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(gb: float, runs: int) -> dict[str, float]:
    training = Training(gb)
    collector = Collector()
    snapshot = collector.collect(training.state)
    layout = plan_layout(snapshot)
    own, shared = memory(layout.own_bytes), memory(layout.shared_bytes)
    sources = [item.tensor for item in snapshot.shared]
    twins = [torch.ones_like(tensor) for tensor in sources]
    copiers = {True: Copier(blocking=True), False: Copier()}
    took: dict[str, list[float]] = {}

    def capture(blocking: bool) -> None:
        nonlocal layout
        began = time.perf_counter()
        found = collector.collect(training.state)
        layout = plan_layout(found, layout)
        pending = copiers[blocking].start(found, layout, shared=shared, own=own)
        started = time.perf_counter()
        while not blocking and not pending.done:
            time.sleep(0.002)
        ready = time.perf_counter()
        pending.finish()
        finished = time.perf_counter()
        took.setdefault("capture" if blocking else "start", []).append(started - began)
        if not blocking:
            took.setdefault("finish", []).append(finished - ready)

    def restore() -> None:
        apply(training.state, read(own[: layout.own_bytes].toreadonly(), shared[: layout.shared_bytes].toreadonly()))

    for _ in range(runs + 3):  # the first captures are compared with their source
        for name, act in (
            ("plain", lambda: [into.copy_(source) for into, source in zip(twins, sources, strict=True)]),
            ("", lambda: capture(True)),
            ("", lambda: capture(False)),
            ("restore", restore),
        ):
            if name:
                with torch.no_grad():
                    took.setdefault(name, []).append(seconds(act))
            else:
                act()
    found = {name: statistics.median(values[3:]) for name, values in took.items()}
    found["gb"] = layout.total_bytes / 1e9
    found["capture/plain"] = found["capture"] / found["plain"]
    found["plain/restore"] = found["plain"] / found["restore"]
    return found


def overhead(steps: int, busy: bool) -> dict[str, float]:
    """Steps with a capture and steps without one, in turn. ``busy``: the computation comes first, then the sleep, so
    that it runs beside the copy."""
    training = Training(OVERHEAD_GB)
    collector, copier = Collector(), Copier()
    layout = plan_layout(collector.collect(training.state))
    own, shared = memory(layout.own_bytes + 65536), memory(layout.shared_bytes)
    took: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * steps + 8):
        captured = step % 2 == 1
        began = time.perf_counter()
        pending = None
        if captured:
            snapshot = collector.collect(training.state)
            layout = plan_layout(snapshot, layout)
            pending = copier.start(snapshot, layout, shared=shared, own=own)
        for act in (training.compute, lambda: time.sleep(STEP_S))[:: 1 if busy else -1]:
            act()
        if pending is not None:
            pending.finish()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if step >= 8:
            took[captured].append(time.perf_counter() - began)
    without = statistics.median(took[False])
    differences = [with_ - before for with_, before in zip(took[True], took[False], strict=True)]
    added = statistics.median(differences)
    return {"step": without, "added": added, "overhead": added / without, "gb": layout.total_bytes / 1e9}


def copies_a_part(size: int, ranks: int, rank: int, barrier: Barrier, runs: int, results: Any) -> None:
    torch.set_num_threads(1)  # what torchrun gives to each of several workers
    source = torch.ones(size, dtype=torch.uint8)
    into = torch.frombuffer(memory(size), dtype=torch.uint8)
    part = slice(rank * size // ranks, (rank + 1) * size // ranks)
    found = []
    for _ in range(runs):
        for chosen in (slice(None), part):
            barrier.wait()
            began = time.perf_counter()
            into[chosen].copy_(source[chosen])
            barrier.wait()
            found.append(time.perf_counter() - began)
    results.put((statistics.median(found[::2]), statistics.median(found[1::2])))


def parts(gb: float, ranks: int, runs: int) -> dict[str, float]:
    """Until all are done: each process copies everything, or its part."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    size = int(gb * 1e9)
    started = [
        context.Process(target=copies_a_part, args=(size, ranks, rank, barrier, runs, results)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    found = [results.get(timeout=300) for _ in started]
    for process in started:
        process.join()
    return {"ranks": ranks, "gb": gb, "all": max(one[0] for one in found), "part": max(one[1] for one in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--gb", type=float, nargs="*", default=[0.1, 1.0])
    parser.add_argument("--four", action="store_true", help="4 GB too (needs 17 GB of memory)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "copies": []}
    print(f"{'GB':>6}{'plain s':>10}{'GB/s':>7}{'capture s':>11}{'/plain':>8}{'start ms':>10}{'finish ms':>11}"
          f"{'restore s':>11}{'GB/s':>7}{'plain/':>8}")  # fmt: skip
    for gb in [*args.gb, *([4.0] if args.four else [])]:
        found = measure(gb, args.runs)
        results["copies"].append(found)
        print(
            f"{found['gb']:6.2f}{found['plain']:10.4f}{found['gb'] / found['plain']:7.1f}{found['capture']:11.4f}"
            f"{found['capture/plain']:8.2f}{found['start'] * 1000:10.2f}{found['finish'] * 1000:11.2f}"
            f"{found['restore']:11.4f}{found['gb'] / found['restore']:7.1f}{found['plain/restore']:8.2f}",
            flush=True,
        )
    if args.steps:
        for name, busy in (("the copy runs while the step sleeps", False), ("while it computes", True)):
            results[f"overhead, {name}"] = found = overhead(args.steps, busy)
            print(
                f"step of {found['step'] * 1000:.1f} ms, {found['gb'] * 1000:.0f} MB captured in each, {name}: "
                f"{found['added'] * 1000:+.2f} ms, {found['overhead']:+.2%}",
                flush=True,
            )
    if args.shared:
        results["shared"] = []
        for ranks in (2, 4):
            found = parts(0.5, ranks, args.runs)
            results["shared"].append(found)
            print(
                f"{ranks} processes, {found['gb']} GB: "
                f"each all {found['all']:.3f} s, each 1/{ranks} {found['part']:.3f} s"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
