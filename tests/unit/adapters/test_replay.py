"""Parts of a model computed anew: equal on equals, and nothing is left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


@pytest.mark.parametrize("module", [Counts(), Keeps(), Traces(), Deep()], ids=lambda m: type(m).__name__)
def test_what_would_leave_something_behind_is_not_called(module: nn.Module) -> None:
    assert why_not(module.forward)
    model = nn.Sequential(nn.Linear(4, 4), module)
    parts = Parts.of(torch, [model])
    assert [bool(part.problem) for part in parts.all] == [False, True]


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
    def __init__(self) -> None:
        super().__init__()
        self.turns = iter(range(1_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + next(self.turns)


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
