import random

import numpy as np
import torch
import torch.nn.functional as F

from .tools import Average


class Stop(Exception):
    pass


def batches(data, size):
    """For ever, shuffled by hand in each epoch, with augmentation from three generators."""
    epoch = 0
    while True:
        order = list(range(len(data)))
        random.shuffle(order)
        shift = np.random.permutation(16)
        for at in range(0, len(order), size):
            rows = order[at : at + size]
            x = data.x[rows][:, shift]
            if random.random() < 0.5:
                x = x.flip(1)
            x = x + np.float32(0.1 * np.random.randn())
            yield epoch, (x + 0.01 * torch.randn_like(x), data.y[rows])
        epoch += 1


class Trainer:
    def __init__(self, model, config, limit):
        self.model, self.config, self.limit = model, config, limit
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 6, 0.5)
        self.done, self.raised = 0, 0
        self.on_step = []
        self.meters = {"loss": Average(), "norm": Average()}

    def step(self, x, y):
        if self.done >= self.limit:
            raise Stop(f"after {self.done}")
        loss = self._loss(x, y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.done += 1
        self.meters["loss"].add(loss.item())
        self.meters["norm"].add(norm)
        for call in self.on_step:
            call(loss.item())
        print(f"{self.done} {loss.item():.7f} {norm:.6f} {self.schedule.get_last_lr()}", flush=True)
        return loss.item()

    def _loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def check(self, loss):
        if loss > 0.5:
            raise ValueError(loss)

    def averages(self):
        return {name: float(meter.value) for name, meter in sorted(self.meters.items())}
