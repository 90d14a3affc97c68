"""Gradients accumulate over three forwards, two of them without synchronisation; clipping by value; a wrapped loss."""

import contextlib

import torch
import torch.distributed as dist
from common import Rows, finish, net, pace
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, output, target):
        return self.inner(output, target) / 3


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
data = Rows(72)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)
model, criterion = DistributedDataParallel(net(), gradient_as_bucket_view=True), Smooth()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
torch.manual_seed(50 + rank)
step, running = 0, torch.zeros(2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    while True:
        done = True
        for micro in range(3):
            try:
                x, y = next(batches)
            except StopIteration:
                break
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = criterion(model(x), y)
                loss.backward()
            running[0] += loss.detach()
            running[1] += 1
        else:
            done = False
        if done:
            optimizer.zero_grad()
            break
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(running)
        pace(step)
        print(f"mean {(running[0] / running[1]).item():.6f}")
finish(model.module, optimizer, step, running.tolist())
dist.barrier()
dist.destroy_process_group()
