"""Steps that a gradient scaler skips, weights averaged in a dictionary, a permutation from a generator of the program's
own, a meter, a history that grows, early stopping by validation."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, FEATURES, finish, net, pace
from torch.nn.parallel import DistributedDataParallel


class Meter:
    def __init__(self):
        self.count, self.total, self.best, self.bad = 0, torch.zeros(()), 1e9, 0


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
made = torch.Generator().manual_seed(7)
x, y = torch.randn(48, FEATURES, generator=made), torch.randint(CLASSES, (48,), generator=made)
plain = net()
model = DistributedDataParallel(plain)
frozen = copy.deepcopy(plain).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
average = {name: value.detach().clone() for name, value in plain.named_parameters()}
meter, history = Meter(), []
order = torch.Generator().manual_seed(20 + rank)
torch.manual_seed(100 + rank)
step = 0
for _epoch in range(4):
    permutation = torch.randperm(48, generator=order)
    for start in range(0, 48, 8):
        rows = permutation[start : start + 8]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for name, value in plain.named_parameters():
                average[name].lerp_(value, 0.05)
        meter.count += 1
        meter.total += loss.detach()
        history.append(loss.item())
        step += 1
        pace(step)
    model.eval()
    value = F.cross_entropy(plain(x), y).item()
    model.train()
    if value < meter.best:
        meter.best, meter.bad = value, 0
    else:
        meter.bad += 1
    if meter.bad > 2:
        break
dist.barrier()
mean = float(meter.total) / meter.count
finish(
    plain,
    optimizer,
    step,
    mean,
    meter.best,
    sum(history),
    scaler.get_scale(),
    float(sum(v.sum() for v in average.values())),
)
dist.destroy_process_group()
