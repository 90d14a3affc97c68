"""What the programs here share: a small model, data, and the digest that ends a run. Nothing of lmres."""

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 16, 4


class Rows(Dataset):
    """Rows with noise from the process's own generator, as augmentation has it."""

    def __init__(self, count=64):
        made = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=made)
        self.y = torch.randint(CLASSES, (count,), generator=made)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.01 * torch.randn(FEATURES), self.y[index]


def net(width=32, dropout=0.2):
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, CLASSES),
    )


def pace(step):
    """One line a step, and time enough to be hit."""
    print(f"rank {os.environ['RANK']} step {step}", flush=True)
    time.sleep(float(os.environ.get("STEP_S", "0")))


def finish(model, optimizer, *more):
    """The digest of parameters, buffers, optimizer state and whatever else counts, in the last line."""
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for _key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if torch.is_tensor(value):
                    digest.update(value.contiguous().numpy().tobytes())
    text = " ".join(repr(value) for value in more)
    line = f"FINAL rank {os.environ['RANK']} {digest.hexdigest()[:16]} {text}"
    folder = os.environ.get("FINAL_DIR")
    if folder:
        with open(os.path.join(folder, f"final-{os.environ['RANK']}"), "w") as file:
            file.write(line)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
