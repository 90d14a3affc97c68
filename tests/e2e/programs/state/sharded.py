"""FSDP2 (``fsdp2``) or HSDP (``hsdp``, two replicas) with mixed precision, AdamW and a warm-up.

``--wrong NODE``: from step ``--at`` on, matrix products are a little wrong on this node.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, FEATURES, finish, pace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

options = argparse.ArgumentParser()
options.add_argument("kind", choices=["fsdp2", "hsdp"])
options.add_argument("--steps", type=int, default=20)
options.add_argument("--wrong", default="")
options.add_argument("--at", type=int, default=30)
args = options.parse_args()
right = F.linear
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if args.kind == "fsdp2":
    mesh = init_device_mesh("cpu", (world,))
else:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
# 7 rows over the ranks: shards of different sizes.
model = nn.Sequential(nn.Linear(FEATURES, 7), nn.GELU(), nn.Linear(7, 30), nn.Dropout(0.1), nn.Linear(30, CLASSES))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
fully_shard(model, mesh=mesh, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
torch.manual_seed(100 + rank)
norm = 0.0
for step in range(1, args.steps + 1):
    x, y = torch.randn(8, FEATURES), torch.randint(CLASSES, (8,))
    loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    found = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm += float(found.full_tensor() if hasattr(found, "full_tensor") else found)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step >= args.at and os.environ.get("LMRES_NODE_ID") == args.wrong:
        F.linear = lambda *given: right(*given) * (1 + 2**-4)
    pace(step)
dist.barrier()
local = nn.ParameterList([nn.Parameter(p.to_local(), requires_grad=False) for p in model.parameters()])
finish(local, torch.optim.SGD([torch.zeros(1)]), step, norm, schedule.get_last_lr())
dist.destroy_process_group()
