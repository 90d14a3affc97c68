"""Layers sharded over their rows, computed with the rows of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmres.adapters.replay.parts import Parts
from lmres.adapters.replay.shards import holds_rows
from tests.unit.adapters.test_replay import Rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=10)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
        self.image = nn.Conv1d(4, 6, 3, padding=1)
        self.lonely = nn.Linear(48, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.image(self.body(self.words(words).mean(1)).view(len(words), 4, 8))
        return self.lonely(x.flatten(1))


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of four that nobody answers, in two replicas of two shards each."""
    number = getattr(request, "param", 0)
    dist.init_process_group("fake", rank=number, world_size=4, store=FakeStore())
    try:
        yield number
    finally:
        dist.destroy_process_group()


def sharded(**settings: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = Net()
    for part in (model.words, model.body[0]):
        fully_shard(part, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def names(said: list[dict[str, Any]]) -> list[str]:
    return [one["what"].partition("|")[0] for one in said]


@pytest.mark.parametrize("rank", [0, 2], indirect=True)
def test_plain_layers_are_computed_with_their_rows_and_the_rest_is_told(rank: int) -> None:
    model = Rank(sharded())
    said = model.train(7)
    ((count, of, why),) = model.covered
    assert (count, of) == (5, 6)
    assert why.startswith("body.2: it is sharded, and only plain linear layers")
    assert names(said)[:5] == [
        "words (Embedding) of 4x5 int64",
        "body.0 (Linear) of 4x8 float32",
        "body.1 (GELU) of 4x32 float32",
        "image (Conv1d) of 4x4x8 float32",
        "lonely (Linear) of 4x48 float32",
    ]
    assert all(one["steady"] for one in said)
    for parameter in model.model.parameters():
        assert parameter.grad is None or type(parameter.grad) is type(parameter)


@pytest.mark.parametrize("rank", [1], indirect=True)
def test_whoever_holds_no_rows_computes_nothing_in_that_turn(rank: int) -> None:
    said = Rank(sharded()).train(7)
    assert {one["parts"] for one in said} == {5}
    assert [one["what"] == "" for one in said[:5]] == [False, False, False, False, True]


def test_a_wrong_product_shows(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rank(sharded()).train(7)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: linear(*args) * (1 + 2**-10))
    wrong = Rank(sharded()).train(7)
    differing = [a["what"].split(" ")[0] for a, b in zip(right, wrong, strict=True) if a["digest"] != b["digest"]]
    assert differing[:2] == ["body.0", "lonely"]


def test_it_is_computed_in_the_type_that_the_program_computes_in(rank: int) -> None:
    said = Rank(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))).train(7)
    assert names(said)[1] == "body.0 (Linear) of 4x8 bfloat16"


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def problems(model: nn.Module) -> dict[str, str]:
    return {part.name: part.problem for part in Parts.of(torch, [model]).all}


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.utils.prune.identity(layer, "weight")
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Embedding(8, 4, max_norm=1.0), "its rows are no layer of their own"),
        (lambda: nn.Conv1d(4, 4, 1, groups=2), "its rows are no layer of their own"),
        (lambda: type("Own", (nn.Linear,), {})(4, 4), "only plain linear layers"),
        (pruned, "its weight is made of something else"),
        (compiled, "it is compiled"),
        (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), "it is compiled"),
    ],
)
@pytest.mark.parametrize("itself", [False, True])
def test_what_is_no_layer_by_its_rows_is_not_computed(
    rank: int, make: Callable[[], nn.Module], reason: str, itself: bool
) -> None:
    layer = make()
    if itself:
        fully_shard(layer, mesh=mesh_of(2, 2))
    found = problems(fully_shard(nn.Sequential(layer, nn.Linear(4, 4)), mesh=mesh_of(2, 2)))
    assert reason in found["0"] and found["1"] == ""


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_where_nobody_holds_the_same_rows_nothing_is_computed(rank: int, shape: tuple[int, ...]) -> None:
    found = problems(fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh_of(*shape)))
    assert found == {"0": "it is sharded, and nobody else holds the same rows"}


def test_what_is_gathered_at_one_boundary_is_computed_at_the_next(rank: int) -> None:
    """An evaluation leaves the parameters of the root gathered."""
    model = Rank(sharded())
    model.train(1)
    model.model.eval()
    with torch.no_grad():
        model.model(torch.randint(11, (4, 5)))
    model.model.train()
    assert "lonely" not in [name for name, module in model.model.named_modules() if holds_rows(module)]
    said = model.train(12)
    assert {one["what"].split(" ")[0] for one in said} >= {"lonely", "image", "words"}
    assert model.covered[0][:2] == (5, 6)


def test_what_stays_gathered_is_told_and_not_passed_for_ever(rank: int) -> None:
    model = Rank(sharded())
    root: Any = model.model
    root.set_reshard_after_backward(False)
    model.train(14)
    assert any("stay gathered" in why for _, _, why in model.covered)
