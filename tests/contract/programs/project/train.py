"""A program in several files, with a trainer class, settings of many kinds, callbacks, and control by exceptions."""

import argparse
import dataclasses
import enum
import os
import pathlib
import random
import tempfile
import time
import uuid
from collections import defaultdict, deque

import numpy as np
import torch
from common import Rows, finish, net
from parts.loop import Stop, Trainer, batches


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclasses.dataclass
class Config:
    lr: float = 0.01
    widths: tuple = (32, 16)
    mode: Mode = Mode.FAST
    folder: pathlib.Path = pathlib.Path("out")
    seed: int = 5
    tags: set = dataclasses.field(default_factory=lambda: {"a", "b", "c"})


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    config = Config()
    config.folder.mkdir(exist_ok=True)
    seed_all(config.seed)
    run_id, process, begun = uuid.uuid4().hex, os.getpid(), time.time()
    place = tempfile.mkdtemp()
    name = f"run-{time.strftime('%H%M%S')}-{process}-{random.SystemRandom().random()}"
    recent, scalars = deque(maxlen=5), defaultdict(list)
    data = Rows(40)
    trainer = Trainer(net(config.widths[0]), config, args.steps)
    trainer.on_step.append(lambda loss: recent.append(loss))
    learned = np.float64(0.0)
    try:
        for epoch, (x, y) in batches(data, 8):
            loss = trainer.step(x, y)
            learned += np.float64(loss) * np.float32(0.5)
            scalars[f"epoch{epoch}"].append(loss)
            if trainer.done % 7 == 0:
                try:
                    trainer.check(loss)
                except ValueError:
                    trainer.raised += 1
    except Stop as stop:
        reason = str(stop)
    os.rmdir(place)
    assert run_id and begun and name
    finish(
        trainer.model,
        trainer.optimizer,
        trainer.done,
        trainer.raised,
        float(learned),
        list(recent),
        dict(scalars),
        reason,
        trainer.averages(),
    )


if __name__ == "__main__":
    main()
