"""One process of the group that ``test_capture_torch_distributed`` starts: ``FOLDER RANK``."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lmres.adapters.capture.state import State
from lmres.errors import CaptureError
from tests.unit.adapters import capture_kit as kit

WORLD = 3
Step = Callable[[], None]
Case = tuple[State, Step]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(7, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.drop(torch.tanh(self.first(data))))


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, *, evaluates: bool = False, clips: bool = True) -> Case:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    def step() -> None:
        model(torch.randn(3, 5) + random.random()).pow(2).mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                model(torch.ones(3, 5))

    return State(roots=(model,), optimizers=(optimizer,), schedulers=(schedule,)), step


def ddp(group: Any) -> Case:
    model = DistributedDataParallel(Model(), process_group=group)
    return trains(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def sharded(mesh: DeviceMesh, *, evaluates: bool = False, **options: Any) -> Case:
    model = Model()
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return trains(model, torch.optim.AdamW(model.parameters(), lr=0.01), evaluates=evaluates)


def columns(mesh: DeviceMesh) -> Case:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Module()
    model.a = nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh, [Shard(1)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        (model.a * model.a).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return State(roots=(model,), optimizers=(optimizer,)), step


def run(make: Callable[[], Case], rank: int) -> dict[str, Any]:
    kit.seed(7)
    state, step = make()
    kit.seed(rank)
    for _ in range(3):
        step()
    own, shared = image = kit.to_bytes(state)
    told = {"captured": kit.digest(state), "own": xxhash.xxh3_64_hexdigest(own)}
    told["shared"] = xxhash.xxh3_64_hexdigest(shared)
    local = getattr(next(state.roots[0].parameters()), "_local_tensor", None)
    told["rows"] = 0 if local is None else local.shape[0]
    for _ in range(3):
        step()
    told["end"] = kit.digest(state)
    kit.seed(8)
    state, step = make()
    step()
    kit.from_bytes(state, image)
    told["restored"] = kit.digest(state)
    for _ in range(3):
        step()
    told["again"] = kit.digest(state)
    return told


def misfit(make: Callable[[], Case], folder: Path, rank: int) -> str:
    """What is said when a process gets the image of its neighbour."""
    state, step = make()
    step()
    for name, part in zip(("own", "shared"), kit.to_bytes(state), strict=True):
        (folder / f"{name}-{rank}").write_bytes(part)
    dist.barrier()
    neighbour = (rank + 1) % WORLD
    try:
        kit.from_bytes(
            state, ((folder / f"own-{neighbour}").read_bytes(), (folder / f"shared-{neighbour}").read_bytes())
        )
    except CaptureError as problem:
        return str(problem)
    return ""


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    pair = dist.new_group([0, 1])
    three = DeviceMesh("cpu", list(range(WORLD)))
    two = DeviceMesh("cpu", [0, 1])
    cases: dict[str, Callable[[], Case]] = {
        "fsdp2-uneven": lambda: sharded(three),
        "fsdp2-after-evaluation": lambda: sharded(three, evaluates=True),
        "fsdp2-mixed": lambda: sharded(three, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "dtensor-columns": lambda: columns(three),
    }
    told: dict[str, Any] = {}
    for name, make in cases.items():
        told[name] = run(make, rank)
    if rank < 2:
        told["ddp"] = run(lambda: ddp(pair), rank)
        told["fsdp2"] = run(lambda: sharded(two), rank)
    told["misfit"] = misfit(cases["fsdp2-uneven"], folder, rank)
    (folder / f"told-{rank}").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
