"""Parts of a model computed anew: equal on equals, and nothing is left behind."""

from __future__ import annotations

import collections
import copy
import functools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lmres.adapters.replay.parts import Parts
from lmres.adapters.replay.player import Player
from lmres.adapters.replay.pure import why_not
from lmres.adapters.resume.rng import kept_rng

TRACE: list[Any] = []


class Block(nn.Module):
    """Computes with functions of its own too; small, so that it is a part as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + F.gelu(y) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.block = Block(8)
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(32, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.block(self.words(words).mean(1))
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


class Rank:
    """A process with its model, which is replayed at every step."""

    def __init__(self, model: nn.Module, batch: int = 4, every: int = 1) -> None:
        self.model = model
        self.batch = batch
        self.said: list[dict[str, Any]] = []
        self.covered: list[tuple[int, int, str]] = []
        self.player = Player(
            torch,
            every,
            tell=lambda **fields: self.said.append(fields),
            covered=lambda *told: self.covered.append(told),
        )
        self.step = 0

    def train(self, steps: int) -> list[dict[str, Any]]:
        for _ in range(steps):
            words = torch.randint(11, (self.batch, 5))
            self.player.end_looking()
            self.player.at_boundary(self.step, [self.model], ((words,), {}), kept_rng(torch))
            self.model(words).sum().backward()
            self.step += 1
        return self.said


def seeded() -> Net:
    torch.manual_seed(3)
    return Net()


def differing(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> set[str]:
    return {a["what"].split(" ")[0] for a, b in zip(one, other, strict=True) if a["digest"] != b["digest"]}


def test_equals_compute_the_same_whatever_their_data_and_generators() -> None:
    torch.manual_seed(1)
    one = Rank(seeded()).train(9)
    torch.manual_seed(2)
    other = Rank(seeded()).train(9)
    assert one == other and len(one) == 8
    assert len({said["what"] for said in one}) == one[0]["parts"]
    assert all(said["steady"] for said in one)


def test_batches_of_other_sizes_are_made_alike() -> None:
    assert Rank(seeded(), batch=4).train(9) == Rank(seeded(), batch=7).train(9)


def test_every_module_has_its_turn_and_a_small_one_with_children_as_a_whole() -> None:
    rank = Rank(seeded())
    rank.train(9)
    (told,) = rank.covered
    assert told[:2] == (7, 7)
    assert {said["what"].split(" ")[0] for said in rank.said} == {
        "words",
        "block",
        "block.norm",
        "first",
        "norm",
        "drop",
        "last",
    }


@pytest.mark.parametrize("where", ["first", "norm", "block", "words"])
def test_a_layer_that_computes_wrongly_shows_in_its_own_turn_and_in_no_other(where: str) -> None:
    right = Rank(seeded()).train(9)
    model = seeded()
    getattr(model, where).register_forward_hook(lambda module, args, output: output * (1 + 2**-10))
    wrong = Rank(model).train(9)
    assert differing(right, wrong) == {where}
    assert [a["what"] for a in right] == [b["what"] for b in wrong]


def test_a_wrong_gradient_shows_too() -> None:
    right, model = Rank(seeded()).train(9), seeded()
    model.last.register_full_backward_hook(lambda module, given, got: (given[0] * 1.01,))
    wrong = Rank(model).train(9)
    assert {a["what"].split(" ")[0] for a, b in zip(right, wrong, strict=True) if a["digest"] != b["digest"]} == {
        "last"
    }


def test_nothing_is_left_behind() -> None:
    def end(replayed: bool) -> Any:
        model = seeded()
        rank = Rank(model)
        if not replayed:
            rank.player.at_boundary = lambda *_: None  # type: ignore[method-assign]
        torch.manual_seed(5)
        rank.train(12)
        grads = [p.grad for p in model.parameters()]
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
        return list(model.state_dict().values()), grads, torch.get_rng_state(), hooks

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    with_replay, without = end(True), end(False)
    assert same(with_replay[0], without[0]) and same(with_replay[1], without[1])
    assert torch.equal(with_replay[2], without[2]) and with_replay[3] == without[3]


def test_buffers_are_the_same_objects_afterwards() -> None:
    model = seeded()
    before = {name: (id(b), b._version) for name, b in model.named_buffers()}
    rank = Rank(model)
    rank.train(1)
    grown = {name: b._version for name, b in model.named_buffers()}
    rank.player.end_looking()
    rank.player.at_boundary(4, [model], ((torch.randint(11, (4, 5)),), {}), kept_rng(torch))
    after = {name: (id(b), b._version) for name, b in model.named_buffers()}
    assert {n: i for n, (i, _) in after.items()} == {n: i for n, (i, _) in before.items()}
    assert {n: v for n, (_, v) in after.items()} == grown


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Keeps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach()
        return x


class Traces(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TRACE.append(x)
        return x


class Deep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x)

    def _note(self, x: torch.Tensor) -> torch.Tensor:
        noted(x)
        return x


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] and not x.requires_grad:
            return x
        raise RuntimeError("not with made-up inputs")


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.g)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.it = iter(range(1_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + next(self.it)


class Loops(Takes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.it:
            return x + number
        return x


class Inherits(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Aliases(nn.Module):
    def __init__(self, stats: Any) -> None:
        super().__init__()
        self.stats = stats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = self.stats
        d[0] = x.detach().sum()
        return x


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def record(self) -> None:
        self.count += 1


class Records(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.record()
        return x


class Property(Draws):
    @property
    def noise(self) -> torch.Tensor:
        return torch.randn(1, generator=self.g)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.noise


class ElementOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            block.calls = i
        return x


class HandsOver(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + drawn(self)


def drawn(module: Any) -> Any:
    return torch.randn(1, generator=module.g)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, 1, out=self.kept)


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Reduces(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sums.apply(x)


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.others = (nn.BatchNorm1d(4),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](x)


class Without(Draws):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(1, generator=self.g)


STATEFUL = [
    Draws(),
    Takes(),
    Loops(),
    Inherits(),
    Aliases({}),
    Aliases([0]),
    Aliases(collections.deque([0])),
    Aliases(np.zeros(1)),
    Aliases(torch.zeros(1)),
    Records(),
    Property(),
    ElementOf(),
    HandsOver(),
    Writes(),
    Reduces(),
    Elsewhere(),
    Without(),
]


@dataclass
class Config:
    width: int = 4
    drop: float = 0.1


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + 0 * x, None


class Plain(nn.Module):
    """Much of what models do, and nothing that outlives a call."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.shape = (2, 2)
        self.factor = 0.5
        self.act = F.gelu
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Block(4)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU(inplace=True)})
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.head: nn.Module | None = None

    @property
    def half(self) -> float:
        return self.factor / 2

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x.view(-1, *self.shape).transpose(1, 2)
        return y.reshape(x.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.config.drop > 0:
            x = F.dropout(x, p=self.config.drop, training=self.training)
        factor = self.factor
        factor *= 2
        outs = []
        for i, block in enumerate(self.blocks):
            x = block(x) * (i + 1) + self.half
            outs.append(x)
        for one, other in zip(self.blocks, self.named.values(), strict=True):
            x = x + other(one(x))
        weight = self.scale
        y = F.linear(x, self.mask[: weight.shape[0]] * weight, None)
        y += self.weights[0]
        y.mul_(factor)
        scores = [self.act(out) for out in outs]
        scores[0] = scores[0] + math.sqrt(self.config.width)
        x, y = y, self._split(x)
        if self.head is not None:
            x = self.head(x)
        x = x.masked_fill(self.mask.sum() == 0, float("-inf"))
        return Double.apply(torch.stack([*scores, x, y]).sum(0), 2.0) + np.pi


def noted(x: torch.Tensor) -> None:
    global TRACE
    TRACE = [x]


def fine(x: torch.Tensor) -> torch.Tensor:
    out = []
    for part in x.split(2):
        out.append(part.relu_())
    table = {}
    table["sum"] = torch.stack(out).sum()
    y = torch.cat(out)
    y += 1
    return y * table["sum"]


@pytest.mark.parametrize("module", [Counts(), Keeps(), Traces(), Deep(), *STATEFUL], ids=lambda m: type(m).__name__)
def test_what_would_leave_something_behind_is_not_called(module: nn.Module) -> None:
    assert why_not(module.forward)
    parts = Parts.of(torch, [nn.Sequential(nn.Linear(4, 64), module)])
    problems = {part.name: part.problem for part in parts.all}
    assert problems.pop("0") == "" and problems["1"]


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, args, output: output + torch.randn(1, generator=module.g),
        functools.partial(lambda g, module, args, output: output + torch.randn(1, generator=g), torch.Generator()),
        lambda module, args, output, calls=TRACE: calls.append(1),
    ],
)
def test_hooks_are_looked_at_too(hook: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].g = torch.Generator()
    model[1].register_forward_hook(hook)
    assert [bool(part.problem) for part in Parts.of(torch, [model]).all] == [False, True]


def test_what_reads_only_plain_values_and_modules_is_covered() -> None:
    assert why_not(Plain().forward) == ""
    big = nn.Sequential(Plain(), nn.Linear(64, 64))
    assert {part.name: part.problem for part in Parts.of(torch, [big]).all}["0"] == ""
    assert torch.isfinite(big[0](torch.randn(3, 4))).all()


LAYERS = [
    nn.Linear(4, 4),
    nn.Conv2d(1, 1, 1),
    nn.BatchNorm1d(4),
    nn.LayerNorm(4),
    nn.GroupNorm(2, 4),
    nn.RMSNorm(4),
    nn.MultiheadAttention(4, 2),
    nn.Transformer(4, 2, 1, 1, 8),
    nn.LSTM(4, 4),
    nn.GRUCell(4, 4),
    nn.Embedding(4, 4),
    nn.Bilinear(2, 2, 2),
    nn.PReLU(),
    nn.Softmax(-1),
    nn.MaxPool2d(2),
    nn.AdaptiveAvgPool2d(1),
    nn.Upsample(scale_factor=2),
    nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: type(m).__name__)
def test_torchs_own_modules_are_covered(layer: nn.Module) -> None:
    assert [
        part.problem for part in Parts.of(torch, [nn.Sequential(layer, nn.Linear(99, 99))]).all if part.problem
    ] == []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("where", ["root", "below", "inside", "each"])
def test_what_fsdp_has_flattened_is_not_computed(where: str, original: bool) -> None:
    fsdp = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), fsdp(nn.Linear(4, 4)) if where == "each" else nn.Dropout(0.5))
        model: nn.Module = fsdp(inner)
    roots = {"below": nn.Sequential(nn.Linear(8, 4), model), "inside": inner}
    parts = Parts.of(torch, [roots.get(where, model)]).all
    problems = {part.name: part.problem for part in parts if part.problem or list(part.module.parameters())}
    assert (problems.pop("0") == "") if where == "below" else True
    assert problems and set(problems.values()) == {"it is sharded"}


@pytest.mark.usefixtures("alone")
def test_only_the_root_may_be_wrapped_and_only_by_torchs_ddp() -> None:
    def problems(root: nn.Module) -> set[bool]:
        return {bool(part.problem) for part in Parts.of(torch, [root]).all}

    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert problems(ddp) == {False}
    assert problems(nn.Sequential(ddp)) == {True}
    assert problems(nn.DataParallel(nn.Linear(4, 4))) == {True}
    other = type("FullyShardedDataParallel", (nn.Sequential,), {})
    assert problems(type("Mine", (other,), {})(nn.Linear(4, 4))) == {True}
    assert problems(type("DistributedDataParallel", (nn.Sequential,), {})(nn.Linear(4, 4))) == {True}
    holding = nn.Sequential(nn.Linear(4, 4))
    holding.group = torch.distributed.group.WORLD
    assert problems(holding) == {True}


def test_what_changes_only_its_own_is_fine() -> None:
    assert why_not(fine) == ""
    assert all(not why_not(m.forward) for m in [nn.Linear(1, 1), nn.LSTM(1, 1), nn.TransformerEncoderLayer(4, 2)])


class Words(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.turn = nn.Linear(5, 4)
        self.part = part

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.turn(self.part(words.float()))


def test_a_part_that_fails_is_left_out_and_the_others_go_on() -> None:
    rank = Rank(Words(Fails()))
    said = rank.train(9)
    assert rank.covered[0][:2] == (2, 2) and rank.covered[1][:2] == (1, 2) and "made-up" in rank.covered[1][2]
    assert {s["what"].split(" ")[0] for s in said} == {"turn", ""}


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + time.perf_counter_ns() % 1_000_003


def test_what_does_not_come_out_the_same_twice_is_not_covered() -> None:
    rank = Rank(Words(Noisy()))
    rank.train(5)
    assert "the same twice" in rank.covered[1][2]


def test_what_was_wrong_once_is_told_as_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(seeded())
    rank.train(2)
    true, calls = rank.player._once, []

    def once(*args: Any) -> str:
        calls.append(args)
        return "0" * 32 if len(calls) == 2 else true(*args)

    monkeypatch.setattr(rank.player, "_once", once)
    said = rank.train(1)[-1]
    assert not said["steady"] and said["digest"] != "0" * 32 and len(calls) == 4


def test_a_module_that_is_shared_is_deep_copied_with_its_hooks() -> None:
    model = seeded()
    model.last.register_forward_hook(lambda module, args, output: output * 1.01)
    assert Rank(copy.deepcopy(model)).train(5) == Rank(model).train(5)
