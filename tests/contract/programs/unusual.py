"""Loops that are shaped in an unusual way, each by its name."""

import math
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Rows, finish, net, pace
from torch import nn

kind = sys.argv[1]
if kind != "unseeded":
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
data = Rows()
model = net() if kind != "lazy" else nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(CLASSES))
if kind == "lazy":
    model(data.x[:2])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen, step, value, calls, deadline = [], 0, 0.0, 0, time.time() + 100
extra = None


def batch(count=8):
    rows = [(step * 5 + i) % len(data) for i in range(count)]
    return data.x[rows], data.y[rows]


def train(x, y):
    global step
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    pace(step)
    return loss


if kind == "phases":
    for _ in range(6):
        train(*batch())
    model, extra = net(width=16), model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(12):
        train(*batch())
elif kind.startswith("lbfgs"):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)
    for _ in range(8):
        x, y = batch()

        def closure():
            global calls
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            calls += kind == "lbfgs_reads" and loss.item() > 0
            return loss

        optimizer.step(closure)
        step += 1
        pace(step)
elif kind == "closure":
    for _ in range(10):
        x, y = batch()

        def closure():
            global value
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            value = loss.item()
            return loss

        optimizer.step(closure)
        step += 1
        pace(step)
elif kind == "rollback":
    saved = None
    for _ in range(14):
        loss = train(*batch())
        if step % 4 == 0:
            if saved is not None and loss.item() > saved[0]:
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[2])
            import copy

            saved = (loss.item(), copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
elif kind == "skips_bad":
    while step < 12:
        x, y = batch()
        loss = F.cross_entropy(model(x), y) * (math.inf if len(seen) % 5 == 3 else 1.0)
        seen.append(torch.isfinite(loss).item())
        if not seen[-1]:
            continue
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        pace(step)
elif kind == "unseeded":
    generator = np.random.default_rng()
    for _ in range(12):
        x, y = batch()
        order = generator.permutation(len(x))
        x = x[order] + 0.1 * torch.randn_like(x) * random.random() * float(np.random.rand())
        train(x, y[order])
elif kind == "replaced":
    for _ in range(12):
        train(*batch())
        if step == 4:
            model[4] = nn.Linear(32, CLASSES)
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
elif kind == "evolution":
    loss = torch.tensor(10.0)
    while loss > 1.2 and step < 20:
        loss = train(*batch())
    value = loss.item()
elif kind == "by_clock":
    while time.time() < deadline and step < 12:
        train(*batch())
elif kind == "direct":
    weight = nn.Parameter(torch.zeros(FEATURES, CLASSES))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    for _ in range(12):
        x, y = batch()
        loss = F.cross_entropy(model(x) + x @ weight, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        pace(step)
    extra = weight.sum().item()
else:
    for _ in range(12):
        train(*batch())
if isinstance(extra, nn.Module):
    extra = float(sum(p.sum() for p in extra.parameters()))
finish(model, optimizer, step, seen, value, extra)
