"""Models with something special, each by its name."""

import random
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Rows, finish, pace
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

kind = sys.argv[1]
STEPS = 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, 12, bias=False)
        self.middle = nn.utils.spectral_norm(nn.Linear(12, 12))
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(12, FEATURES))
        self.head = nn.Linear(FEATURES, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return F.linear(self.head(self.other(torch.relu(self.middle(self.embed(x))))), self.embed.weight.t())[
            :, :CLASSES
        ]


class Meter(nn.Module):
    """As libraries of metrics keep theirs: plain tensors as attributes, replaced at each update."""

    def __init__(self):
        super().__init__()
        self.total = torch.tensor(0.0)
        self.count = torch.tensor(0)
        self.updates = 0

    def forward(self, output, target):
        self.total = self.total + (output.argmax(1) == target).sum()
        self.count = self.count + len(target)
        self.updates += 1
        return self.total / self.count


class Counting(nn.Module):
    """Counts its own calls, and anneals by them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self.temperature = 2.0
        self.scale = 1.0
        self.past = []

    def forward(self, x):
        self.calls += 1
        self.temperature = max(0.5, self.temperature * 0.97)
        output = self.layer(x) / self.temperature * self.scale
        self.past.append(self.calls)
        return output


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.7:
                x = F.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return self.head(x)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, y=None):
        logits = self.layer(x)
        return Output(logits, F.cross_entropy(logits, y) if y is not None else None)


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, CLASSES))


torch.manual_seed(1)
random.seed(2)
data = Rows()
model = {"tied": Tied, "counting": Counting, "layerdrop": LayerDrop, "output": WithLoss}.get(kind, plain)()
meter = Meter()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "averaged" else None
swa = AveragedModel(model, use_buffers=True) if kind == "averaged" else None
teacher = plain().requires_grad_(False) if kind == "teacher" else None
memory = torch.zeros(4, CLASSES)
grabbed = {}
if kind == "hook":
    model[0].register_forward_hook(lambda module, args, output: grabbed.__setitem__("first", output))
if kind == "unfreeze":
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=1e-2)
if kind == "freeze":
    model[0].requires_grad_(True)
extra = 0.0
for step in range(1, STEPS + 1):
    rows = [(step * 5 + i) % len(data) for i in range(8)]
    x, y = data.x[rows], data.y[rows]
    if kind == "unfreeze" and step == 6:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    if kind == "freeze" and step == 6:
        model[0].requires_grad_(False)
    optimizer.zero_grad()
    if kind == "contrastive":
        one, two = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(one, y) + (one - two).pow(2).mean()
    elif kind == "output":
        loss = model(x, y).loss
    elif kind == "teacher":
        teacher.eval()
        with torch.no_grad():
            target = teacher(x).softmax(1)
        output = model(x)
        loss = F.cross_entropy(output, y) + F.kl_div(output.log_softmax(1), target)
    elif kind == "penalty":
        x = x.clone().requires_grad_()
        output = model(x)
        loss = F.cross_entropy(output, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.pow(2).sum()
    elif kind == "queue":
        output = model(x)
        loss = F.cross_entropy(output, y) + (output.mean(0) - memory.mean(0)).pow(2).sum()
        memory = torch.cat([memory[1:], output.mean(0, keepdim=True).detach()])
    else:
        output = model(x)
        loss = F.cross_entropy(output, y)
        if kind == "hook":
            loss = loss + grabbed["first"].pow(2).mean()
    if kind == "metric":
        extra = meter(output.detach(), y).item()
    loss.backward()
    optimizer.step()
    if averaged is not None:
        averaged.update_parameters(model)
        if step > 5:
            swa.update_parameters(model)
    if kind == "teacher":
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters()):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
    if kind == "counting" and step % 5 == 0:
        model.scale *= 0.9
    pace(step)
if kind == "counting":
    extra = (model.calls, model.temperature, model.scale, sum(model.past))
if averaged is not None:
    torch.optim.swa_utils.update_bn([data.x[:8]], swa)
    extra = [float(sum(p.sum() for p in m.parameters())) for m in (averaged, swa)]
if teacher is not None:
    extra = float(sum(p.sum() for p in teacher.parameters()))
finish(model, optimizer, step, extra, meter.total.item(), meter.updates, memory.tolist(), loss.item())
