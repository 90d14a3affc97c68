"""Epochs, DistributedSampler, DataLoader, dropout, clipping, accumulation, AdamW, cosine schedule."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Rows, finish, net, pace
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--accumulate", type=int, default=2)
    args = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = Rows()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=args.workers, drop_last=True)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader) // args.accumulate)
    torch.manual_seed(100 + rank)
    step, mean = 0, 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % args.accumulate == 0
            model.require_backward_grad_sync = last
            loss = F.cross_entropy(model(x), y) / args.accumulate
            loss.backward()
            if not last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            mean = 0.9 * mean + 0.1 * loss.item()
            pace(step)
    dist.barrier()
    finish(model.module, optimizer, step, mean, schedule.get_last_lr())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os.sys.stdout.flush()
