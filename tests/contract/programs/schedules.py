"""Schedules of many kinds, each by its name; the state of all is in the last words."""

import math
import sys

import torch
import torch.nn.functional as F
from common import Rows, finish, net, pace
from torch.optim import lr_scheduler

STEPS = 16


def warmup(total):
    def factor(step):
        return min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / total))

    return factor


class Doubling:
    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1 + step / 100


torch.manual_seed(1)
data, model = Rows(), net()
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[4].parameters()}], lr=0.1, momentum=0.9
)
schedule = {
    "onecycle": lambda: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=STEPS),
    "lambda": lambda: lr_scheduler.LambdaLR(optimizer, [warmup(STEPS), lambda step: 0.9**step]),
    "object": lambda: lr_scheduler.LambdaLR(optimizer, Doubling()),
    "sequential": lambda: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, STEPS)],
        milestones=[5],
    ),
    "chained": lambda: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "cyclic": lambda: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "swa": lambda: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=4),
    "by_hand": lambda: None,
}[sys.argv[1]]()
for step in range(1, STEPS + 1):
    rows = [(step * 5 + i) % len(data) for i in range(8)]
    loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    else:
        for group in optimizer.param_groups:
            group["lr"] *= 0.95
    print(f"lr {[group['lr'] for group in optimizer.param_groups]}")
    pace(step)
finish(
    model,
    optimizer,
    step,
    [group["lr"] for group in optimizer.param_groups],
    [g["momentum"] for g in optimizer.param_groups],
)
