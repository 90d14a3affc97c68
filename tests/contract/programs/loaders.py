"""One way of using a loader, named in the arguments; augmentation draws from the process's generator."""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Rows, finish, net, pace
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

kind = sys.argv[1]
STEPS = 20


class Stream(IterableDataset):
    def __init__(self):
        self.given = 0

    def __iter__(self):
        made = np.random.default_rng(3)
        for _ in range(70):
            self.given += 1
            yield torch.from_numpy(made.standard_normal(FEATURES).astype(np.float32)), int(made.integers(CLASSES))


class Buckets(Sampler):
    """Batches of growing sizes in a shuffled order."""

    def __init__(self, count):
        self.count = count
        self.passes = 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.passes += 1
        order = torch.randperm(self.count).tolist()
        sizes = [2 + i % 3 for i in range(8)]
        random.shuffle(sizes)
        for size in sizes:
            yield [order.pop() for _ in range(size)]


class Prefetcher:
    def __init__(self, loader):
        self.loader = loader
        self.start()

    def start(self):
        self.batches = iter(self.loader)
        self.load()

    def load(self):
        try:
            self.x, self.y = next(self.batches)
            self.x = self.x * 1.5
        except StopIteration:
            self.x = self.y = None

    def next(self):
        if self.x is None:
            self.start()
        x, y = self.x, self.y
        self.load()
        return x, y


def collate(rows):
    x = torch.stack([row[0] for row in rows])
    return x + 0.01 * random.random() + 0.01 * float(np.random.rand()), torch.stack([row[1] for row in rows])


class NumpyRows(Rows):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * np.float32(1 + 0.1 * np.random.randn()) + 0.01 * random.gauss(0, 1), y


torch.manual_seed(1)
random.seed(2)
np.random.seed(3)
data = Rows(48)
own = torch.Generator()
own.manual_seed(9)
loader = {
    "plain": lambda: DataLoader(data, batch_size=6, shuffle=True),
    "skip": lambda: DataLoader(data, batch_size=6, shuffle=True),
    "zip": lambda: DataLoader(data, batch_size=6, shuffle=True),
    "prefetch": lambda: DataLoader(data, batch_size=6, shuffle=True),
    "ahead": lambda: DataLoader(data, batch_size=6, shuffle=True),
    "persistent": lambda: DataLoader(data, batch_size=6, shuffle=True, num_workers=1, persistent_workers=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=6),
    "iterable_workers": lambda: DataLoader(Stream(), batch_size=6, num_workers=1),
    "buckets": lambda: DataLoader(data, batch_sampler=Buckets(48)),
    "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, True)),
    "replacement": lambda: DataLoader(
        data, batch_size=6, sampler=RandomSampler(data, replacement=True, num_samples=30)
    ),
    "weighted": lambda: DataLoader(data, batch_size=6, sampler=WeightedRandomSampler([1.0 + i for i in range(48)], 42)),
    "generator": lambda: DataLoader(data, batch_size=6, shuffle=True, generator=own),
    "generator_workers": lambda: DataLoader(data, batch_size=6, shuffle=True, generator=own, num_workers=2),
    "collate": lambda: DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate),
    "numpy": lambda: DataLoader(NumpyRows(48), batch_size=6, shuffle=True),
    "numpy_workers": lambda: DataLoader(NumpyRows(48), batch_size=6, shuffle=True, num_workers=2),
    "curriculum": lambda: None,
    "random_split": lambda: DataLoader(torch.utils.data.random_split(data, [40, 8])[0], batch_size=6, shuffle=True),
}[kind]()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, seen = 0, 0


def train(x, y):
    global step, seen
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    step += 1
    seen += len(x)
    pace(step)


while step < STEPS:
    if kind == "zip":
        for _, (x, y) in zip(range(7), loader):
            train(x, y)
    elif kind == "prefetch":
        batches = Prefetcher(loader)
        while step < STEPS:
            train(*batches.next())
    elif kind == "ahead":
        batches = iter(loader)
        following = next(batches)
        while following is not None:
            (x, y), following = following, next(batches, None)
            train(x, y)
    elif kind == "curriculum":
        for x, y in DataLoader(data, batch_size=4 * (1 + step // 12), shuffle=True):
            train(x, y)
    else:
        for i, (x, y) in enumerate(loader):
            if kind == "skip" and i % 3 == 1:
                continue
            if len(x) < 2:
                break
            train(x, y)
finish(model, optimizer, step, seen)
