"""What is put back, in place, and what does not fit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmres.adapters.capture.restore import apply, read
from lmres.adapters.capture.state import State
from lmres.errors import CaptureError
from tests.unit.adapters import capture_kit as kit


def trained(name: str, steps: int = kit.BEFORE) -> kit.Program:
    program = kit.build(name, 5)
    program.run(steps)
    return program


@pytest.mark.parametrize("name", sorted(kit.PROGRAMS))
def test_a_program_that_never_stepped_goes_on_as_the_first(name: str) -> None:
    first = trained(name)
    image = kit.to_bytes(first.state())
    first.run(kit.AFTER)
    end = kit.seen_by_torch(first)
    second = kit.build(name, 77)
    assert kit.from_bytes(second.state(), image) == ()
    assert kit.to_bytes(second.state()) == image
    second.run(kit.AFTER)
    assert kit.seen_by_torch(second) == end


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw-groups", "lbfgs", "adafactor", "scaler", "sequential"])
def test_a_program_that_went_on_comes_back(name: str) -> None:
    first = trained(name)
    image = kit.to_bytes(first.state())
    first.run(kit.AFTER)
    end = kit.seen_by_torch(first)
    first.run(1)
    kit.from_bytes(first.state(), image)
    first.run(kit.AFTER)
    assert kit.seen_by_torch(first) == end


@pytest.mark.parametrize("name", ["adamw-groups", "sgd-momentum", "adam-tensor-lr", "scaler"])
def test_a_state_before_the_first_step(name: str) -> None:
    first = trained(name, 0)
    image = kit.to_bytes(first.state())
    first.run(2)
    end = kit.seen_by_torch(first)
    kit.from_bytes(first.state(), image)
    assert not any(first.optimizer.state.values())
    first.run(2)
    assert kit.seen_by_torch(first) == end


def test_moments_are_bitwise_and_not_zero() -> None:
    first, second = trained("adam"), kit.build("adam", 77)
    kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    states = list(zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True))
    assert states
    for one, other in states:
        assert one["exp_avg_sq"].any()
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one[key], other[key])
            assert one[key].data_ptr() != other[key].data_ptr()


def test_tensors_that_are_there_are_filled_in_place() -> None:
    first, second = trained("adam-tensor-lr"), trained("adam-tensor-lr", 1)
    before = [*second.model.parameters(), *second.model.buffers(), second.optimizer.param_groups[0]["lr"]]
    before += [tensor for state in second.optimizer.state.values() for tensor in state.values()]
    kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    after = [*second.model.parameters(), *second.model.buffers(), second.optimizer.param_groups[0]["lr"]]
    after += [tensor for state in second.optimizer.state.values() for tensor in state.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(parameter.requires_grad for parameter in second.model.first.parameters())


def test_the_image_can_go_once_it_is_applied() -> None:
    first, second = trained("lbfgs"), kit.build("lbfgs", 77)
    own, shared = (bytearray(part) for part in kit.to_bytes(first.state()))
    apply(second.state(), read(memoryview(own), memoryview(shared)))
    before = kit.seen_by_torch(second)
    own[:], shared[:] = bytes(len(own)), bytes(len(shared))
    assert kit.seen_by_torch(second) == before


def test_gradients_come_back_as_nothing_zero_or_values() -> None:
    first, second = kit.Net(), kit.Net()
    first.scale.grad = torch.tensor(3.0)
    first.first.weight.grad = torch.zeros(8, 6)
    first.first.bias.grad = torch.zeros(8)
    second.first.weight.grad = kept = torch.ones(8, 6)
    second.last.weight.grad = torch.ones(1, 8)
    kit.from_bytes(State(roots=(second,)), kit.to_bytes(State(roots=(first,))))
    assert second.scale.grad == 3.0
    assert second.first.weight.grad is kept and not kept.any()
    assert torch.equal(second.first.bias.grad, torch.zeros(8))
    assert second.last.weight.grad is None


def test_all_generators_go_on() -> None:
    own = torch.Generator()

    def draw() -> list[Any]:
        values = [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return [*values, torch.rand(1, generator=own).item()]

    kit.seed(3)
    own.manual_seed(3)
    draw()
    state = State(generators=(own,))
    image = kit.to_bytes(state)
    expected = [draw(), draw()]
    kit.from_bytes(state, image)
    assert [draw(), draw()] == expected


def test_added_objects_and_tensors() -> None:
    class Meter:
        def __init__(self, value: float) -> None:
            self.value = {"sum": value, "shape": (1, 2), "kept": torch.full((2,), value)}

        def state_dict(self) -> dict[str, Any]:
            return self.value

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state

    first = State(states={"meter": Meter(0.1), "tensor": torch.arange(3), "model": nn.Linear(2, 2)})
    second = State(states={"meter": Meter(0.7), "tensor": torch.zeros(3, dtype=torch.int64), "model": nn.Linear(2, 2)})
    image = kit.to_bytes(first)
    kit.from_bytes(second, image)
    assert kit.to_bytes(second) == image
    assert second.states["meter"].value["shape"] == (1, 2)
    assert torch.equal(second.states["model"].weight, first.states["model"].weight)


def test_two_places_that_were_one_tensor_stay_one() -> None:
    first, second = kit.build("sgd", 1), kit.build("sgd", 1)
    parameter = first.model.scale
    both = torch.ones(3)
    first.optimizer.state[parameter] = {"a": both, "b": [both]}
    kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    state = second.optimizer.state[second.model.scale]
    assert state["a"] is state["b"][0]


def test_state_in_other_strides_keeps_them() -> None:
    first, second = kit.build("sgd", 1), kit.build("sgd", 1)
    first.optimizer.state[first.model.scale] = {"a": torch.arange(6.0).view(2, 3).t()}
    kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    found = second.optimizer.state[second.model.scale]["a"]
    assert found.stride() == (1, 3)
    assert torch.equal(found, torch.arange(6.0).view(2, 3).t())


def test_state_of_the_optimizer_as_a_whole() -> None:
    first, second = kit.build("sgd", 1), kit.build("sgd", 1)
    first.optimizer.state["global"] = {"norm": torch.tensor(2.0), "count": 4}
    kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    assert second.optimizer.state["global"] == {"norm": torch.tensor(2.0), "count": 4}


def test_a_setting_that_was_not_captured_keeps_its_value_and_is_noted() -> None:
    first, second = trained("adamw-groups"), kit.build("adamw-groups", 77)
    second.optimizer.param_groups[1]["newer"] = "default"
    notes = kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    assert second.optimizer.param_groups[1]["newer"] == "default"
    assert notes == ("optimizer 0, group 1: settings that were not captured keep their values: newer='default'",)


class Other(torch.optim.SGD):
    pass


def changed(change: Any) -> Any:
    """A second program that differs in one thing."""

    def build() -> State:
        program = kit.build("sgd-momentum", 77)
        found = change(program)
        return found if isinstance(found, State) else program.state()

    return build


def with_other_optimizer(program: kit.Program) -> None:
    program.optimizer = Other(program.optimizer.param_groups, lr=0.1)


MISFITS: dict[str, tuple[Any, str]] = {
    "no root": (lambda p: State(), "1 roots were captured, 0 are here"),
    "scheduler": (
        lambda p: setattr(p, "scheduler", torch.optim.lr_scheduler.StepLR(p.optimizer, 1)),
        "0 schedulers were captured, 1 are here",
    ),
    "missing": (
        lambda p: delattr(p.model, "last"),
        "parameters of root 0 captured, but not here: 'last.weight', 'last.bias'",
    ),
    "added": (
        lambda p: setattr(p.model, "more", nn.Linear(1, 1)),
        "parameters of root 0 here, but not captured: 'more.weight', 'more.bias'",
    ),
    "shape": (
        lambda p: setattr(p.model, "last", nn.Linear(8, 2)),
        r"parameter 'last.weight' was captured as float32 \[1, 8\], here it is float32 \[2, 8\]",
    ),
    "dtype": (
        lambda p: setattr(p.model, "last", nn.Linear(8, 1, dtype=torch.float64)),
        r"'last.weight' was captured as float32 \[1, 8\], here it is float64 \[1, 8\]",
    ),
    "buffer": (lambda p: p.model.register_buffer("seen", torch.zeros(2)), "buffer 'seen' was captured as int64"),
    "optimizer": (with_other_optimizer, "optimizer 0 was captured as SGD, here it is Other"),
    "groups": (
        lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        r"captured with groups of \[3, 8\] parameters, here it has \[3, 8, 1\]",
    ),
    "other parameter": (
        lambda p: p.optimizer.param_groups[0]["params"].reverse(),
        "parameter 0 of group 0 is another than",
    ),
    "untied": (
        lambda p: setattr(p.model.third, "weight", p.model.frozen.weight),
        "is one tensor here with what was captured apart",
    ),
    "extra": (lambda p: p.average.pop("scale"), "extra tensors captured, but not here: 'scale'"),
    "generator": (lambda p: State(roots=(p.model,), optimizers=(p.optimizer,)), "1 generators were captured, 0"),
}


@pytest.mark.parametrize("name", sorted(MISFITS))
def test_what_does_not_fit_is_named_and_nothing_has_changed(name: str) -> None:
    change, words = MISFITS[name]
    image = kit.to_bytes(trained("sgd-momentum").state())
    state = changed(change)()
    before = kit.digest(state)
    with pytest.raises(CaptureError, match=words):
        kit.from_bytes(state, image)
    assert kit.digest(state) == before


def test_only_the_first_differences_are_told() -> None:
    image = kit.to_bytes(State(roots=(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))),)))
    with pytest.raises(CaptureError, match="and 14 more") as raised:
        kit.from_bytes(State(roots=(nn.Sequential(*(nn.Linear(3, 3) for _ in range(9))),)), image)
    assert len(str(raised.value)) < 700


def test_other_kinds_of_scheduler_and_scaler() -> None:
    first, second = trained("step"), kit.build("exponential", 1)
    with pytest.raises(CaptureError, match="scheduler 0 was captured as StepLR, here it is ExponentialLR"):
        kit.from_bytes(second.state(), kit.to_bytes(first.state()))
    first, second = trained("scaler"), kit.build("scaler", 1)
    second.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(CaptureError, match="gradient scaler 0 was captured switched on"):
        kit.from_bytes(second.state(), kit.to_bytes(first.state()))


def test_a_scaler_that_is_off() -> None:
    scalers = [torch.amp.GradScaler("cpu", enabled=False) for _ in range(2)]
    kit.from_bytes(State(scalers=(scalers[1],)), kit.to_bytes(State(scalers=(scalers[0],))))


def test_a_generator_state_that_is_not_valid_is_refused_before_anything_changes() -> None:
    program = trained("sgd")
    own, shared = kit.to_bytes(program.state())
    loaded = read(memoryview(own), memoryview(shared))
    loaded.tensors["rng.torch"] = torch.zeros(5056, dtype=torch.uint8)  # type: ignore[index]
    before = kit.digest(program.state())
    with pytest.raises(CaptureError, match="random generator"):
        apply(program.state(), loaded)
    assert kit.digest(program.state()) == before


def test_an_object_that_refuses_its_state_is_an_error_of_ours() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("x")

    state = State(states={"odd": Odd()})
    with pytest.raises(CaptureError, match="restored only in part: KeyError"):
        kit.from_bytes(state, kit.to_bytes(state))
