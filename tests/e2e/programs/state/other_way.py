"""A loop whose course depends on something that is different in every life."""

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
lives = int(os.environ["LMRES_GENERATION"])
weight = 0.5 * lives
for step in range(1, 25):
    x, y = torch.randn(8, FEATURES), torch.randint(CLASSES, (8,))
    loss = weight * F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pace(step)
dist.barrier()
finish(model.module, optimizer, step)
dist.destroy_process_group()
