"""DDP with a metric and a save every ten steps. Once, if FOLDER/plant is there, one rank does what nobody expects."""

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
from torch.utils.data import DataLoader, DistributedSampler

FOR_EVER_S = 3600


def planted(args, kind, step):
    """Whether this rank does it now. Its later lives find no file."""
    plant = os.path.join(args.folder, "plant")
    if args.fault != kind or dist.get_rank() != args.rank or step != args.at or not os.path.exists(plant):
        return False
    os.remove(plant)
    with open(os.path.join(args.folder, "when"), "w") as file:
        file.write(str(time.time()))
    return True


class Stalling(Rows):
    """A file system that does not answer."""

    def __init__(self, args, count):
        super().__init__(count)
        self.args = args
        self.step = 0

    def __getitem__(self, index):
        if planted(self.args, "loader", self.step):
            time.sleep(FOR_EVER_S)
        return super().__getitem__(index)


def spin_in_c():
    """Never comes back to the interpreter, and never gives its lock away."""
    sum(range(10**15))


def metric_of(args, loss, step):
    """The mean loss of all ranks, by an operation of the program's own."""
    if planted(args, "leave_out", step):
        return loss.item()
    size = 5 if planted(args, "shape", step) else 4000 if planted(args, "size", step) else 3
    value = torch.full((size,), loss.item())
    dist.all_reduce(value)
    return float(value[0]) / dist.get_world_size()


def save(args, model, step):
    name = os.path.join(args.folder, f"model-{dist.get_rank()}.pt")
    if planted(args, "save", step):
        name = os.path.join(args.folder, "pipe")
        os.mkfifo(name)  # nobody reads
    torch.save(model.state_dict(), name)


def evaluate(model, seconds):
    """One rank alone, while the others wait for it."""
    model.eval()
    with torch.no_grad():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            model(torch.zeros(2, FEATURES))
            time.sleep(0.2)
    model.train()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("folder")
    options.add_argument("--fault", default="none")
    options.add_argument("--rank", type=int, default=1)
    options.add_argument("--at", type=int, default=10)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--evaluate", type=float, default=0, help="seconds, once")
    args = options.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Stalling(args, 48)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    step, mean = 0, 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if planted(args, "sleep", step):
                time.sleep(FOR_EVER_S)
            if planted(args, "spin", step):
                spin_in_c()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * metric_of(args, loss, step)
            step += 1
            data.step = step
            if step % 10 == 0:
                save(args, model, step)
            if args.evaluate and step == args.at and dist.get_rank() == args.rank:
                evaluate(model.module, args.evaluate)
            pace(step)
    dist.barrier()
    finish(model.module, optimizer, step, mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
