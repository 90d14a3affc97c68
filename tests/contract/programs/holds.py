"""Where programs hold things: closures, classes, slots, other modules, installed packages' objects, arrays, numbers."""

import functools
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from common import CLASSES, Rows, finish, net, pace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
import elsewhere
from installed import Accuracy, Mean


def averager(model, decay):
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    calls = 0

    def update():
        nonlocal calls
        calls += 1
        for name, value in model.named_parameters():
            weights[name].lerp_(value.detach(), 1 - decay)
        return calls, weights

    return update


class Counts:
    total = torch.zeros(())
    steps = 0
    names = set()


class Slotted:
    __slots__ = ("count", "sum")

    def __init__(self):
        self.count, self.sum = 0, torch.zeros(2)

    def add(self, value):
        self.count += 1
        self.sum = self.sum + value


def note(table, value):
    table[0] += value


class Timer:
    def __init__(self):
        self.times, self.mean = [], 0.0

    def update(self, seconds):
        self.times.append(seconds)
        self.mean = sum(self.times) / len(self.times)


torch.manual_seed(1)
data, model = Rows(), net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
update, slotted, accuracy, mean = averager(model, 0.9), Slotted(), Accuracy(), Mean()
table = np.zeros(3)
kept = functools.partial(note, np.zeros(2))
timer, times, spent = Timer(), [], {"step": 0.0}
end = time.time()
first_id, place = id(model), data.x.data_ptr()
trail, confusion, weight = [], np.zeros((CLASSES, CLASSES)), 1.0
for step in range(1, 17):
    rows = [(step * 5 + i) % len(data) for i in range(8)]
    x, y = data.x[rows], data.y[rows]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
        output = model(x)
    loss = F.cross_entropy(output.float(), y) * weight
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    calls, averaged = update()
    Counts.total += loss.detach()
    Counts.steps += 1
    Counts.names.add(f"step{step % 5}")
    slotted.add(loss.detach())
    accuracy.update(output, y)
    mean.add(loss.detach())
    elsewhere.record(loss.detach())
    table[step % 3] += float(loss.detach().numpy())
    kept(loss.item())
    trail.append(np.mean([loss.detach(), loss.detach() * 2]))
    guess = output.float().argmax(1).numpy()
    np.add.at(confusion, (y.numpy(), guess), 1)
    accuracy_now = (guess == y.numpy()).mean()
    weight = 1.0 + 0.1 * accuracy_now
    timer.update(time.time() - end)
    times.append(time.time() - end)
    spent["step"] += time.time() - end
    end = time.time()
    pace(step)
finish(
    model,
    optimizer,
    calls,
    [float(v.sum()) for v in averaged.values()],
    float(Counts.total),
    Counts.steps,
    sorted(Counts.names),
    slotted.count,
    slotted.sum.tolist(),
    float(accuracy.compute()),
    float(mean.total / mean.count),
    elsewhere.told(),
    table.tolist(),
    kept.args[0].tolist(),
    float(sum(trail)),
    confusion.tolist(),
    float(weight),
)
