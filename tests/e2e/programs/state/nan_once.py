"""The first life that is resumed has not-a-number in its parameters four steps later, and notices."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, FEATURES, finish, net, pace
from torch.nn.parallel import DistributedDataParallel

marker = os.path.join(sys.argv[1], f"spoilt-{os.environ['RANK']}")
spoil = int(os.environ["LMRES_GENERATION"]) > 1 and not os.path.exists(marker)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net(dropout=0.0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start = int(os.environ["LMRES_RESUME_STEP"])
for step in range(start + 1, 31):
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, FEATURES, generator=drawn), torch.randint(CLASSES, (8,), generator=drawn)
    loss = F.cross_entropy(model(x), y)
    assert torch.isfinite(loss), "the loss is not finite"
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if spoil and step == start + 4:
        with open(marker, "w") as file:
            file.write(str(step))
        with torch.no_grad():
            model.module[0].weight.fill_(float("nan"))
    pace(step)
dist.barrier()
finish(model.module, optimizer, step)
dist.destroy_process_group()
