"""A tiny DDP program for measurements: plain torch, knows nothing of who runs it. Tells in lines what it does when.

``life RANK PID TIME`` first of all, ``group RANK PID TIME`` when the process group stands, ``step N PID TIME`` after
each optimizer step; Unix seconds. ``TRIAL_IMPORTS``: modules to import as well, with commas between them;
``TRIAL_STEP_S``: what a step sleeps; ``TRIAL_STEPS``: how many there are.
"""

import os
import time

print("life", os.environ["RANK"], os.getpid(), time.time(), flush=True)

import importlib  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def main() -> None:
    for name in filter(None, os.environ.get("TRIAL_IMPORTS", "").split(",")):
        importlib.import_module(name)
    dist.init_process_group("gloo")
    print("group", os.environ["RANK"], os.getpid(), time.time(), flush=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, int(os.environ.get("TRIAL_STEPS", "1000000")) + 1):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, os.getpid(), time.time(), flush=True)
        time.sleep(float(os.environ.get("TRIAL_STEP_S", "0.1")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
