"""Small training programs of many kinds, and how their state goes to bytes and back.

``python -m tests.unit.adapters.capture_kit FOLDER`` goes on with every program whose image lies in the folder, in a
process that never ran it, and prints the digest of its end.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import lr_scheduler as schedules

from lmres.adapters.capture.collect import collect
from lmres.adapters.capture.copy import Copier
from lmres.adapters.capture.image import plan_layout
from lmres.adapters.capture.restore import apply, read
from lmres.adapters.capture.state import State

BEFORE, AFTER = 3, 4


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers of both kinds, dropout, a parameter without elements, mixed types."""

    def __init__(self, *, half: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, 1, dtype=torch.bfloat16 if half else torch.float32)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.ones(1, 1).expand(4, 8))
        self.register_buffer("missing", None)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found = self.norm(self.first(data)) * self.mask
        found = self.third(self.drop(torch.tanh(self.second(found)))) + self.frozen(found)
        return self.last((found * self.scale).to(self.last.weight.dtype)).float()


class Program:
    """A program of one optimizer, and how it trains. Its data comes from all generators."""

    def __init__(
        self,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        *,
        model: Callable[[], nn.Module] = Net,
        scaler: bool = False,
        closure: bool = False,
        keep_grads: bool = False,
        metric: bool = False,
    ) -> None:
        self.model = model()
        self.optimizer = optimizer(self.model)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if scaler else None
        self.own = torch.Generator().manual_seed(random.getrandbits(20))
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.closure, self.keep_grads, self.metric = closure, keep_grads, metric

    def state(self) -> State:
        return State(
            roots=(self.model,),
            optimizers=(self.optimizer,),
            schedulers=() if self.scheduler is None else (self.scheduler,),
            scalers=() if self.scaler is None else (self.scaler,),
            generators=(self.own,),
            extra_tensors=self.average,
            extra={"position": [1, 2]},
        )

    def loss(self) -> torch.Tensor:
        data = torch.randn(4, 6) + random.random() + torch.randn(4, 1, generator=self.own)
        if isinstance(self.model, nn.EmbeddingBag):
            return self.model(torch.randint(0, 10, (4, 3))).pow(2).sum()
        return (self.model(data) - float(np.random.rand())).pow(2).mean()

    def step(self) -> None:
        if self.closure:
            data = torch.randn(4, 6)

            def again() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(data).pow(2).mean()
                loss.backward()
                return loss

            self.optimizer.step(again)
        elif self.scaler is not None:
            self.scaler.scale(self.loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.loss().backward()
            self.optimizer.step()
        if self.scheduler is not None:
            if self.metric:
                self.scheduler.step(1.0 + self.model.scale.item())
            else:
                self.scheduler.step()
        if not self.keep_grads:
            self.optimizer.zero_grad(set_to_none=isinstance(self.model, nn.EmbeddingBag))
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                self.average[name].mul_(0.9).add_(value, alpha=0.1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def decay(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with settings of their own; one frozen, one without a name in any rule."""
    matrices = [value for value in model.parameters() if value.dim() > 1 and value.requires_grad and value.numel()]
    others = [value for value in model.parameters() if value.dim() <= 1 or not value.requires_grad or not value.numel()]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.003}]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [value for value in model.parameters() if value.requires_grad and value.numel()]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [value for value in trained(model) if value.dim() == 2]


O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Callable[[], Program]] = {
    "sgd": lambda: Program(lambda m: O.SGD(trained(m), lr=0.01)),
    "sgd-momentum": lambda: Program(lambda m: O.SGD(decay(m), lr=0.01, momentum=0.9, nesterov=True)),
    "adam": lambda: Program(lambda m: O.Adam(trained(m), lr=0.01)),
    "adam-amsgrad": lambda: Program(lambda m: O.Adam(trained(m), lr=0.01, amsgrad=True, foreach=False)),
    "adam-tensor-lr": lambda: Program(lambda m: O.Adam(trained(m), lr=torch.tensor(0.01), foreach=False)),
    "adamw-groups": lambda: Program(lambda m: O.AdamW(decay(m), lr=0.01, betas=(0.8, 0.95))),
    "adamw-fused": lambda: Program(lambda m: O.AdamW(trained(m), lr=0.01, fused=True)),
    "adamw-bf16": lambda: Program(lambda m: O.AdamW(trained(m), lr=0.01), model=lambda: Net(half=True)),
    "adamax": lambda: Program(lambda m: O.Adamax(trained(m), lr=0.01)),
    "adagrad": lambda: Program(lambda m: O.Adagrad(trained(m), lr=0.01)),
    "adadelta": lambda: Program(lambda m: O.Adadelta(trained(m))),
    "rmsprop": lambda: Program(lambda m: O.RMSprop(trained(m), lr=0.01, momentum=0.5, centered=True)),
    "asgd": lambda: Program(lambda m: O.ASGD(trained(m), lr=0.01, t0=2)),
    "nadam": lambda: Program(lambda m: O.NAdam(trained(m), lr=0.01)),
    "radam": lambda: Program(lambda m: O.RAdam(trained(m), lr=0.01)),
    "rprop": lambda: Program(lambda m: O.Rprop(trained(m), lr=0.01)),
    "lbfgs": lambda: Program(lambda m: O.LBFGS(trained(m), lr=0.1, max_iter=3, history_size=3), closure=True),
    "lbfgs-wolfe": lambda: Program(
        lambda m: O.LBFGS(trained(m), max_iter=3, line_search_fn="strong_wolfe"), closure=True
    ),
    "sparse-adam": lambda: Program(
        lambda m: O.SparseAdam(list(m.parameters()), lr=0.01),
        model=lambda: nn.EmbeddingBag(10, 3, sparse=True, mode="sum"),
        keep_grads=False,
    ),
    "kept-grads": lambda: Program(lambda m: O.SGD(trained(m), lr=0.01, momentum=0.5), keep_grads=True),
    "scaler": lambda: Program(lambda m: O.AdamW(trained(m), lr=0.01), scaler=True),
}
if hasattr(O, "Adafactor"):
    OPTIMIZERS["adafactor"] = lambda: Program(lambda m: O.Adafactor(trained(m), lr=0.01))
if hasattr(O, "Muon"):
    OPTIMIZERS["muon"] = lambda: Program(lambda m: O.Muon(matrices(m), lr=0.01))


class Warmup:
    """A callable with state of its own, as programs give to LambdaLR."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return float(np.float64(1.0) / (1 + step + self.calls % 2))


def scheduled(make: Callable[[torch.optim.Optimizer], Any], *, metric: bool = False) -> Callable[[], Program]:
    return lambda: Program(lambda m: O.SGD(decay(m), lr=0.05, momentum=0.9), make, metric=metric)


SCHEDULERS: dict[str, Callable[[], Program]] = {
    "lambda": scheduled(lambda o: schedules.LambdaLR(o, lambda step: 0.9**step)),
    "lambda-object": scheduled(lambda o: schedules.LambdaLR(o, [Warmup(), Warmup()])),
    "lambda-numpy": scheduled(lambda o: schedules.LambdaLR(o, lambda step: np.cos(step / 10))),
    "multiplicative": scheduled(lambda o: schedules.MultiplicativeLR(o, lambda step: 0.95)),
    "step": scheduled(lambda o: schedules.StepLR(o, 2)),
    "multistep": scheduled(lambda o: schedules.MultiStepLR(o, [2, 4, 4], gamma=0.5)),
    "constant": scheduled(lambda o: schedules.ConstantLR(o, total_iters=4)),
    "linear": scheduled(lambda o: schedules.LinearLR(o, total_iters=5)),
    "exponential": scheduled(lambda o: schedules.ExponentialLR(o, 0.9)),
    "cosine": scheduled(lambda o: schedules.CosineAnnealingLR(o, 5)),
    "warm-restarts": scheduled(lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, T_mult=2)),
    "polynomial": scheduled(lambda o: schedules.PolynomialLR(o, 6)),
    "onecycle": scheduled(lambda o: schedules.OneCycleLR(o, 0.1, total_steps=12)),
    "cyclic": scheduled(lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.99)),
    "cyclic-function": scheduled(lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=lambda x: 0.9**x)),
    "plateau": scheduled(lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5), metric=True),
    "sequential": scheduled(
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, total_iters=2), schedules.LambdaLR(o, lambda s: 0.9**s)], milestones=[2]
        )
    ),
    "chained": scheduled(
        lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.CosineAnnealingLR(o, 5)])
    ),
}
PROGRAMS = {**OPTIMIZERS, **SCHEDULERS}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def build(name: str, seeded: int) -> Program:
    seed(seeded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PROGRAMS[name]()


def to_bytes(state: State, copier: Copier | None = None) -> tuple[bytes, bytes]:
    """The image's own and shared part."""
    snapshot = collect(state)
    layout = plan_layout(snapshot)
    own, shared = bytearray(layout.own_bytes), bytearray(layout.shared_bytes)
    pending = (copier or Copier()).start(snapshot, layout, shared=memoryview(shared), own=memoryview(own))
    copied = pending.finish()
    assert not copied.torn
    return bytes(own), bytes(shared)


def from_bytes(state: State, image: tuple[bytes, bytes]) -> tuple[str, ...]:
    return apply(state, read(memoryview(image[0]), memoryview(image[1])))


def digest(state: State) -> str:
    """Of everything that is captured, bit for bit."""
    own, shared = to_bytes(state)
    return xxhash.xxh3_128_hexdigest(own + shared)


def spelled(value: Any) -> Any:
    """A value with its type, bit for bit, without any of the code under test."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex() if value.numel() else ""
        return ["tensor", str(value.dtype), list(value.shape), str(value.device), raw]
    if isinstance(value, dict):
        return [type(value).__name__, [[spelled(key), spelled(part)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(spelled(part) for part in value)]
    if isinstance(value, np.ndarray):
        return value.tobytes().hex()
    return [type(value).__name__, value.hex() if isinstance(value, float) else repr(value).split(" at 0x")[0]]


def seen_by_torch(program: Program) -> str:
    """Digest of the program's state as torch itself tells it."""
    everything = [
        {**dict(program.model.named_parameters(remove_duplicate=False)), **dict(program.model.named_buffers())},
        [parameter.grad for parameter in program.model.parameters()],
        program.optimizer.state_dict(),
        None if program.scheduler is None else program.scheduler.state_dict(),
        None if program.scaler is None else program.scaler.state_dict(),
        program.average,
        [torch.get_rng_state(), program.own.get_state(), random.getstate(), np.random.get_state()],
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(spelled(everything)).encode())


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    warnings.simplefilter("ignore")
    for name in PROGRAMS:
        program = build(name, 99)
        from_bytes(program.state(), ((folder / f"{name}.own").read_bytes(), (folder / f"{name}.shared").read_bytes()))
        restored = digest(program.state())
        program.run(AFTER)
        found[name] = [restored, digest(program.state()), seen_by_torch(program)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
