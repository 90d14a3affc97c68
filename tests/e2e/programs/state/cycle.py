"""``while step < max_steps`` over ``itertools.cycle(loader)``, momentum, weights averaged by hand."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Rows, finish, net, pace
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

MAX_STEPS = 24

dist.init_process_group("gloo")
torch.manual_seed(1)
data = Rows(48)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=5))
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
average = {name: value.detach().clone() for name, value in model.module.named_parameters()}
torch.manual_seed(100 + dist.get_rank())
batches = itertools.cycle(loader)
step, best = 0, float("inf")
while step < MAX_STEPS:
    x, y = next(batches)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, value in model.module.named_parameters():
            average[name].lerp_(value, 0.1)
    step += 1
    if loss < best:
        best = loss.item()
    pace(step)
dist.barrier()
finish(model.module, optimizer, step, best, float(sum(v.double().sum() for v in average.values())))
dist.destroy_process_group()
