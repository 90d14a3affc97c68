"""DDP in which ranks may compute or load more slowly than the others, from some step on."""

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "state"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import FEATURES, Rows, finish, net, pace
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Slow(Rows):
    def __init__(self, seconds):
        super().__init__(64)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def ranks(text):
    return [int(word) for word in text.split(",")] if text else []


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--compute", type=ranks, default=[], help="ranks that compute twice as long")
    options.add_argument("--load", type=ranks, default=[], help="ranks that load twice as long")
    options.add_argument("--since", type=int, default=0)
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--uneven", type=float, default=0.0, help="share by which steps differ at random")
    args = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    loads = rank in args.load
    data = Slow(0.025 if loads else 0.005)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(rank)
    step = 0
    while step < args.steps:
        for x, y in DataLoader(data, batch_size=2):
            late = step >= args.since
            seconds = 0.03 * (1 + args.uneven * float(torch.rand((), generator=chance)))
            time.sleep(seconds * (2.2 if late and rank in args.compute else 1))
            assert x.shape[1] == FEATURES
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            pace(step)
            if step == args.steps:
                break
    dist.barrier()
    finish(model.module, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
