"""Three ranks: two DDP models in turn, and DDP that is made after a first forward; the order of summation must last."""

import sys

import torch
import torch.distributed as dist
from common import FEATURES, Rows, finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
data = Rows(48)


def deep(inputs, outputs):
    parts = [nn.Linear(inputs, 700)]
    for _ in range(3):
        parts += [nn.ReLU(), nn.Linear(700, 700)]
    return nn.Sequential(*parts, nn.ReLU(), nn.Linear(700, outputs))


options = {"bucket_cap_mb": 1}
one, two = deep(FEATURES, 6), deep(6, 1)
if kind == "late":
    one(torch.zeros(2, FEATURES))
if kind == "unused":
    one.register_parameter("never", nn.Parameter(torch.zeros(3)))
    two.register_parameter("never", nn.Parameter(torch.zeros(3)))
    options["find_unused_parameters"] = True
if kind == "static":
    options["static_graph"] = True
one, two = (DistributedDataParallel(m, **options) for m in (one, two))
if kind == "hook":
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powers

    one.register_comm_hook(powers.PowerSGDState(None, start_powerSGD_iter=1000), powers.powerSGD_hook)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (one, two)]
torch.manual_seed(10 + rank)
for step in range(1, 9):
    x = data.x[torch.randperm(48)[:6]] + 0.1 * torch.randn(6, FEATURES)
    if kind == "turns":
        loss = two(one(x).detach()).pow(2).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        loss = (one(x) - 1).pow(2).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    else:
        loss = (two(one(x)) - 1).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"step {step} {total.item():.7f}", flush=True)
finish(one.module, optimizers[0], step)
finish(two.module, optimizers[1], step, loss.item())
dist.barrier()
dist.destroy_process_group()
