"""Where gradients are cleared: ``before`` or ``after`` the forward, ``end``, ``zeros`` (kept as zeros), ``never``."""

import sys

import torch
import torch.nn.functional as F
from common import Rows, finish, net, pace

where = sys.argv[1]
torch.manual_seed(1)
data, model = Rows(), net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1, 13):
    rows = [(step * 5 + i) % len(data) for i in range(8)]
    if where == "before":
        optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
    if where == "after":
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if where == "end":
        optimizer.zero_grad()
    elif where == "zeros":
        optimizer.zero_grad(set_to_none=False)
    pace(step)
finish(model, optimizer, step, float(sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None)))
