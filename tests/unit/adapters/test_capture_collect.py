"""What is found in a training state, and what is refused by name."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from lmres.adapters.capture.collect import Collector, collect
from lmres.adapters.capture.image import plan_layout
from lmres.adapters.capture.state import State
from lmres.errors import CaptureError
from tests.unit.adapters import capture_kit as kit


def names(items: tuple) -> list[str]:
    return [item.name for item in items]


def test_parameters_and_optimizer_state_are_shared_and_the_rest_is_own() -> None:
    program = kit.build("adamw-groups", 1)
    program.run(1)
    snapshot = collect(program.state())
    assert names(snapshot.shared)[:3] == ["r0.p.scale", "r0.p.nothing", "r0.p.first.weight"]
    kinds = [name.split(".")[0][0] for name in names(snapshot.shared)]
    assert kinds == sorted(kinds, reverse=True), "first all parameters, then all optimizer state"
    assert "o0.g0.0.exp_avg" in names(snapshot.shared)
    assert {"r0.b.seen", "r0.b.mask", "r0.b.norm.running_var", "rng.torch", "g0"} <= set(names(snapshot.own))
    json.dumps(snapshot.meta, allow_nan=False)


def test_tied_parameters_are_one_item() -> None:
    snapshot = collect(State(roots=(kit.Net(),)))
    parameters = dict(snapshot.meta["roots"][0]["parameters"])
    assert parameters["third.weight"] == parameters["second.weight"] == "r0.p.second.weight"
    assert names(snapshot.shared).count("r0.p.second.weight") == 1


def test_a_tensor_of_the_program_that_is_a_parameter_is_not_stored_again() -> None:
    model = nn.Linear(3, 3)
    snapshot = collect(State(roots=(model,), extra_tensors={"alias": model.weight.data, "flat": model.weight.view(-1)}))
    assert snapshot.meta["extra_tensors"] == [["alias", "r0.p.weight"], ["flat", "x.flat"]]


def test_views_of_one_storage_are_kept_one_by_one() -> None:
    flat = torch.arange(12.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    assert names(collect(State(roots=(model,))).shared) == ["r0.p.a", "r0.p.b"]


def test_a_parameter_that_only_an_optimizer_has() -> None:
    lonely = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([lonely], lr=0.1)
    snapshot = collect(State(optimizers=(optimizer,)))
    assert names(snapshot.shared) == ["o0.g0.p0"]
    assert snapshot.shared[0].parameter


@pytest.mark.parametrize(("value", "stored"), [(0.0, None), (-0.0, "grad.r0.p.weight"), (2.0, "grad.r0.p.weight")])
def test_gradients_are_nothing_zero_or_values(value: float, stored: str | None) -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), value)
    snapshot = collect(State(roots=(model,)))
    assert snapshot.meta["grads"] == {"r0.p.weight": stored}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "device 'meta'"),
        (torch.empty(3, dtype=torch.bits8), "bits8"),
    ],
)
def test_what_can_not_be_captured_is_named(tensor: torch.Tensor, words: str) -> None:
    model = nn.Module()
    model.register_buffer("odd", tensor)
    with pytest.raises(CaptureError, match=f"buffer 'odd' of root 0.*{words}"):
        collect(State(roots=(model,)))


def test_a_tensor_class_with_its_own_operations_is_refused() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(CaptureError, match=r"extra tensor 'odd' is a .*Own"):
        collect(State(extra_tensors={"odd": torch.ones(2).as_subclass(Own)}))


def test_a_tensor_class_that_only_adds_attributes_is_taken() -> None:
    class Named(nn.Parameter):
        pass

    model = nn.Module()
    model.a = Named(torch.ones(2))
    assert names(collect(State(roots=(model,))).shared) == ["r0.p.a"]


def test_a_parameter_without_a_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="no size yet"):
        collect(State(roots=(nn.LazyLinear(3),)))


def test_a_value_of_an_unknown_type_is_named_with_its_place() -> None:
    program = kit.build("sgd-momentum", 1)
    program.run(1)
    next(iter(program.optimizer.state.values()))["odd"] = {"deep": [object()]}
    with pytest.raises(CaptureError, match=r"optimizer 0 \(SGD\): group 0: .*: odd: deep: 0 is a builtins.object"):
        collect(program.state())


def test_state_for_a_parameter_of_no_group_is_refused() -> None:
    program = kit.build("sgd", 1)
    program.optimizer.state[torch.ones(5)] = {"a": torch.ones(1)}
    with pytest.raises(CaptureError, match=r"shape \[5\] that is in no group"):
        collect(program.state())


def test_a_scaler_between_unscale_and_update_is_refused() -> None:
    program = kit.build("scaler", 1)
    program.scaler.scale(program.loss()).backward()
    program.scaler.unscale_(program.optimizer)
    with pytest.raises(CaptureError, match="gradient scaler 0 is between"):
        collect(program.state())


def test_an_added_object_without_the_protocol_is_refused() -> None:
    with pytest.raises(CaptureError, match="state 'mine' is a object"):
        collect(State(states={"mine": object()}))


def test_an_error_of_the_program_comes_as_ours() -> None:
    class Bad:
        def state_dict(self) -> dict:
            raise ZeroDivisionError("of the program")

        def load_state_dict(self, state: dict) -> None: ...

    with pytest.raises(CaptureError, match="ZeroDivisionError: of the program"):
        collect(State(states={"mine": Bad()}))


def test_nothing_of_the_program_changes() -> None:
    twins = []
    for captured in (True, False):
        program = kit.build("adamw-groups", 3)
        collector = Collector()
        for _ in range(4):
            if captured:
                versions = [tensor._version for tensor in program.model.state_dict().values()]
                plan_layout(collector.collect(program.state()))
                assert versions == [tensor._version for tensor in program.model.state_dict().values()]
            program.step()
        twins.append((kit.seen_by_torch(program), torch.rand(1).item(), random.random(), np.random.rand()))
    assert twins[0] == twins[1]
    assert torch.is_grad_enabled()


def test_modes_and_defaults_of_the_program_see_nothing() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    program = kit.build("kept-grads", 3)
    program.run(1)
    expected = kit.digest(program.state())
    state = program.state()
    with Functions(), Dispatches():
        found = kit.to_bytes(state)
    assert seen == []
    torch.set_default_dtype(torch.float64)
    try:
        assert kit.digest(state) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == kit.to_bytes(state)


class TestWhatIsRemembered:
    """A collector must give what a new one would."""

    def same(self, collector: Collector, program: kit.Program) -> bool:
        found, fresh = collector.collect(program.state()), collect(program.state())
        assert found.meta == fresh.meta
        for part in ("shared", "own"):
            pairs = list(zip(getattr(found, part), getattr(fresh, part), strict=True))
            assert [one.name for one, _ in pairs] == [other.name for _, other in pairs]
            for one, other in pairs:
                assert one.tensor.shape == other.tensor.shape
                if not one.name.startswith(("rng", "g0")):
                    assert one.tensor.data_ptr() == other.tensor.data_ptr(), one.name
        before = collector._fixed
        collector.collect(program.state())
        return before is collector._fixed

    @pytest.mark.parametrize("name", ["sgd", "adamw-groups", "adafactor", "lbfgs", "radam", "asgd"])
    def test_after_each_step(self, name: str) -> None:
        program, collector = kit.build(name, 1), Collector()
        for _ in range(4):
            assert self.same(collector, program)
            program.step()

    def test_steady_state_is_not_built_again(self) -> None:
        program, collector = kit.build("adamw-groups", 1), Collector()
        program.run(1)
        first = collector.collect(program.state())
        program.step()
        assert collector.collect(program.state()).shared is first.shared

    def test_after_changes_of_every_kind(self) -> None:
        program, collector = kit.build("adamw-groups", 1), Collector()
        program.run(1)
        model, optimizer = program.model, program.optimizer
        changes = [
            lambda: setattr(model.first, "weight", nn.Parameter(torch.randn(8, 6))),
            lambda: setattr(model.first.bias, "data", torch.randn(8)),
            lambda: setattr(model.second.weight, "data", model.second.weight.data.t()),
            lambda: model.register_buffer("late", torch.ones(2)),
            lambda: setattr(model, "mask", torch.ones(1, 8).expand(4, 8)),
            lambda: setattr(model, "extra", nn.Linear(2, 2)),
            lambda: optimizer.add_param_group({"params": model.extra.parameters()}),
            lambda: optimizer.state[model.scale].update(exp_avg=torch.ones(())),
            lambda: optimizer.state[model.scale].update(more=3),
            lambda: optimizer.state.pop(model.scale),
            lambda: optimizer.state.pop(optimizer.param_groups[0]["params"].pop()),
            optimizer.state.clear,
            lambda: optimizer.state.update(named=torch.ones(3)),
            lambda: delattr(model, "drop"),
        ]
        for change in changes:
            change()
            with torch.no_grad():
                self.same(collector, program)

    def test_other_roots_and_optimizers(self) -> None:
        collector = Collector()
        for name in ("adamw-groups", "sgd", "adamw-groups"):
            program = kit.build(name, 1)
            self.same(collector, program)


def test_collecting_from_another_thread_is_the_same() -> None:
    program = kit.build("adamw-groups", 1)
    program.run(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(kit.to_bytes(program.state())))
    thread.start()
    thread.join()
    assert found == [kit.to_bytes(program.state())]
