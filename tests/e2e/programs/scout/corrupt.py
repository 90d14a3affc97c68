"""Data-parallel training with batch normalisation and dropout, in which a fault can be planted.

``--flip parameter``, ``exponent`` or ``moment``: one bit, once in the run, on ``--rank`` after step ``--at``.
``--layer NODE``: a layer's output is a little wrong on this node, from step ``--at`` on; with ``--once`` only in the
first life.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))
from common import finish, pace


class Points(Dataset):
    def __init__(self, count):
        made = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, 12, generator=made)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.outer = nn.Linear(16, 2)

    def forward(self, x):
        return self.outer(self.drop(F.relu(self.norm(self.inner(x)))))


def is_first(folder):
    """Once in the run, whatever is started again."""
    try:
        os.close(os.open(Path(folder) / "planted", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def flip(tensor, bit=18):
    """One bit; 18 is in the upper half of the mantissa."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def plant(args, step, model, optimizer):
    if args.flip and step == args.at and dist.get_rank() == args.rank and is_first(args.marks):
        weight = model.module.inner.weight
        if args.flip == "exponent":  # of a number between 1 and 2: now it is infinite, or none
            with torch.no_grad():
                model.module.norm.weight[0] = 1.0
            flip(model.module.norm.weight, 30)
        else:
            flip(weight if args.flip == "parameter" else optimizer.state[weight]["exp_avg"])
    here = bool(args.layer) and step >= args.at and os.environ.get("LMRES_NODE_ID") == args.layer
    if here and not model.module.outer._forward_hooks and (not args.once or is_first(args.marks)):
        model.module.outer.register_forward_hook(a_little_wrong)


def a_little_wrong(module, inputs, output):
    return output * (1 + 2**-8)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--flip", default="")
    options.add_argument("--layer", default="")
    options.add_argument("--once", action="store_true")
    options.add_argument("--at", type=int, default=12)
    options.add_argument("--rank", type=int, default=1)
    options.add_argument("--uneven", action="store_true")
    options.add_argument("--nan", type=int, default=0)
    options.add_argument("--marks", default="")
    args = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = Points(32 * dist.get_world_size())
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4 + rank if args.uneven else 4, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    step, mean, epoch = 0, 0.0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for i, (x, y) in enumerate(loader):
            if args.uneven and i >= 5:  # as many batches as whoever has the largest ones
                break
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = 0.9 * mean + 0.1 * loss.item()
            plant(args, step, model, optimizer)
            if args.nan == step:
                with torch.no_grad():
                    optimizer.state[model.module.inner.weight]["exp_avg_sq"].view(-1)[0] = float("nan")
            pace(step)
            if step == args.steps:
                break
    dist.barrier()
    finish(model.module, optimizer, step, mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os.sys.stdout.flush()
