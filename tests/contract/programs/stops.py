"""Programs that can not be brought back exactly, each by its name: they must be stopped, not go on wrongly."""

import os
import random
import sys

import torch
import torch.nn.functional as F
from common import Rows, finish, net, pace

kind = sys.argv[1]
life = int(os.environ["LMRES_GENERATION"])
torch.manual_seed(1)
data, model = Rows(), net(width=32 if kind != "shape" or life == 1 else 24)
optimizer = (torch.optim.SGD if kind == "optimizer" and life == 2 else torch.optim.Adam)(model.parameters(), lr=1e-2)
restarts = 0
if kind == "counter" and life == 2:
    restarts = 1
entropy = random.SystemRandom()
values, numbers, longer = [], {}, []
for step in range(1, 13 if kind != "shorter" or life == 1 else 6):
    rows = [(step * 5 + i) % len(data) for i in range(8)]
    loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if kind == "entropy":
        values.append(int.from_bytes(os.getrandom(4), "big"))
    if kind == "arrays":
        values.append(float(model(data.x[:40]).detach().numpy().mean()))
    if kind == "draws":
        values += [random.random()] * 40
        random.random() if life == 2 else None
    if kind == "one_read_more" and life == 2 and step == 4:
        loss.item()
    if kind == "one_read_less" and (life == 1 or step != 4):
        loss.item()
    if kind == "text" and step == 3:
        numbers["name"] = "first" if life == 1 else "second"
    if kind == "tensor" and life == 1 and step == 3:
        numbers["tensor"] = torch.ones(3)
    if kind == "batch" and step > 4:
        longer.append(life)
    if kind == "loss_scale" and life == 2 and step == 5:
        longer.append(restarts)
    pace(step)
finish(model, optimizer, step)
