"""Nothing is trained: a model is only looked at; or it is trained without an optimizer."""

import sys

import torch
from common import Rows, net

torch.manual_seed(1)
model, data = net(), Rows()
if sys.argv[1] == "evaluate":
    model.eval()
    with torch.no_grad():
        total = sum(model(data.x[i : i + 8]).sum().item() for i in range(0, 64, 8))
else:
    for i in range(0, 64, 8):
        loss = model(data.x[i : i + 8]).pow(2).mean()
        for parameter, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            parameter.data -= 0.01 * slope
    total = float(sum(p.sum() for p in model.parameters()))
print("FINAL", repr(total))
