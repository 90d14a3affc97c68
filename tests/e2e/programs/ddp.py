"""A tiny DDP program. Knows nothing of lmres. Prints a line a step; faults are planted through its environment."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "40"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))


def fault(name: str, step: int) -> bool:
    """PLANT_<name>=RANK:STEP, optionally :GENERATIONS (how many generations it strikes in, default 1)."""
    value = os.environ.get(f"PLANT_{name}")
    if value is None:
        return False
    rank, at, *limit = (int(part) for part in value.split(":"))
    seen = int(os.environ.get("LMRES_GENERATION", "1"))
    return rank == dist.get_rank() and at == step and seen <= (limit[0] if limit else 1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    where = [os.environ.get(name, "-") for name in ("LMRES_GENERATION", "TORCHELASTIC_RESTART_COUNT")]
    print("start", *where, rank, os.environ["MASTER_PORT"], flush=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        if fault("RAISE", step):
            raise ValueError(f"planted at step {step}")
        if fault("EXIT", step):
            os._exit(7)
        loss = model(torch.ones(4, 8) * step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}", *([time.time()] if "STAMP" in os.environ else []), flush=True)
        time.sleep(STEP_S)
    time.sleep(float(os.environ.get("LAST_S", "0")) * rank)
    if fault("LATE", STEPS):
        os._exit(9)
    dist.destroy_process_group()
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    main()
