"""A loop that starts where LMRES_RESUME_STEP says; the data of a step follow from its number."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, FEATURES, finish, net, pace
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
start = int(os.environ.get("LMRES_RESUME_STEP", "0"))
for step in range(start + 1, 25):
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, FEATURES, generator=drawn), torch.randint(CLASSES, (8,), generator=drawn)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pace(step)
dist.barrier()
finish(model.module, optimizer, step)
dist.destroy_process_group()
