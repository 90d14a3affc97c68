"""What watching a worker costs it.

    python -m benchmarks.watch [--runs 15] [--step-ms 100] [--json FILE]

- ``mark``: one phase entered and left (two marks on the page), and one operation noted, ns;
- ``collective``: a synchronous ``all_reduce`` whose backend does nothing, with the watch and without, us;
- ``step``: a step of DistributedDataParallel on two ranks (gloo, one thread each), with the watch and without, ms;
  ``step_cpu``: the processor time of the main thread in it.

All but ``step`` are processor time of one thread, which a loaded machine changes less.

With and without are processes of their own that live at the same time and work in turn, one block each, in changing
order; medians of the blocks and of the ratios of neighbours are shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmres.adapters.bootstrap.page import PAGE_BYTES
from lmres.adapters.watch import variable_text
from lmres.adapters.watch.install import build
from lmres.adapters.watch.marks import FORWARD, Group, Watch

COLLECTIVES = 2000
MARKS = 50_000
STEPS = 5
LAYERS = 8
WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (collective,) = in_turn(no_backend, {}, options.runs, 1)
    step, step_cpu = in_turn(training, {"rows": rows_for(options.step_ms)}, options.runs, 2)
    found = {"mark": marks(), "collective": collective, "step": step, "step_cpu": step_cpu}
    for name, values in found.items():
        print(name, "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def watched() -> Watch:
    page = mmap.mmap(-1, PAGE_BYTES)
    session: Any = SimpleNamespace(page=page, events=itertools.count(1), send=lambda line: None, watch=None)
    return build(torch, variable_text(), session)


# -- marks -------------------------------------------------------------------------------------------------------------


def marks() -> dict[str, float]:
    session: Any = SimpleNamespace(page=mmap.mmap(-1, PAGE_BYTES), events=itertools.count(1))
    watch = Watch(session, "", lambda reason: None)
    watch.begin()
    group = Group("0", "0-1")

    def nothing() -> None:
        pass

    def phase() -> None:
        watch.within(FORWARD, nothing, (), {})

    def operation() -> None:
        watch.entered(group, b"allreduce", b"float32[16]", counts=True)

    found = {}
    for name, call in (("phase_ns", phase), ("operation_ns", operation)):
        blocks = []
        for _ in range(5):
            began = time.thread_time_ns()
            for _ in range(MARKS):
                call()
            blocks.append((time.thread_time_ns() - began) / MARKS)
        found[name] = min(blocks)
    return found


# -- blocks of work, with and without ----------------------------------------------------------------------------------


def no_backend(pipe: Connection, watch: bool, rank: int, port: int) -> None:
    """Microseconds of a collective."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    if watch:
        watched()
    tensor = torch.ones(16)
    while pipe.recv():
        began = time.thread_time()
        for _ in range(COLLECTIVES):
            dist.all_reduce(tensor)
        pipe.send([(time.thread_time() - began) / COLLECTIVES * 1e6])


def network() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def rows_for(step_ms: float) -> int:
    """As many as make a forward and a backward of this processor time."""
    torch.set_num_threads(1)
    net, batch = network(), torch.ones(512, WIDTH)
    spent = []
    for _ in range(6):
        began = time.thread_time()
        net(batch).square().mean().backward()
        spent.append(time.thread_time() - began)
    return max(8, int(512 * step_ms / 1e3 / min(spent)))


def training(pipe: Connection, watch: bool, rank: int, port: int, rows: int) -> None:
    """Milliseconds of a step."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if watch:
        watched()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    batch = torch.ones(rows, WIDTH)
    while pipe.recv():
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            step(batch)
        dist.barrier()
        spent = (time.perf_counter() - began, time.thread_time() - began_cpu)
        pipe.send([seconds / STEPS * 1e3 for seconds in spent])


class Team:
    """Processes that work when they are told."""

    def __init__(self, work: Any, given: dict[str, Any], ranks: int, watch: bool) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, watch, rank, port), kwargs=given, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def block(self) -> list[float]:
        """What rank 0 measured."""
        for pipe in self.pipes:
            pipe.send(True)
        first, *_ = [pipe.recv() for pipe in self.pipes]
        return list(first)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join(30)


def in_turn(work: Any, given: dict[str, Any], runs: int, ranks: int) -> list[dict[str, float]]:
    """For each of the values that a block gives."""
    teams = {watch: Team(work, given, ranks, watch) for watch in (False, True)}
    blocks: dict[bool, list[list[float]]] = {False: [], True: []}
    for team in teams.values():
        team.block()
    for run in range(runs):
        for watch in (False, True) if run % 2 else (True, False):
            blocks[watch].append(teams[watch].block())
    for team in teams.values():
        team.end()
    return [
        compared(plain, seen)
        for plain, seen in zip(zip(*blocks[False], strict=True), zip(*blocks[True], strict=True), strict=True)
    ]


def compared(plain: tuple[float, ...], seen: tuple[float, ...]) -> dict[str, float]:
    return {
        "plain": statistics.median(plain),
        "watched": statistics.median(seen),
        "difference": statistics.median(s - p for s, p in zip(seen, plain, strict=True)),
        "ratio": statistics.median(s / p for s, p in zip(seen, plain, strict=True)),
    }


if __name__ == "__main__":
    main()
