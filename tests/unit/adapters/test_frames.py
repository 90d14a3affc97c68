# ruff: noqa: F841 (variables are there to be found)
"""What is found in the frames of a program, under which paths, and what is not."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmres.adapters.resume import frames

NOTHING: set[int] = set()


def held(known: set[int] = NOTHING) -> frames.Held:
    return frames.walk(torch, known)


def mine(found: dict[str, Any], function: str) -> dict[str, Any]:
    """What hangs on one function's variables, without its name."""
    marked = f":{function}."
    return {p.split(marked, 1)[1]: v for p, v in found.items() if marked in p}


def test_plain_values_by_path() -> None:
    def program() -> frames.Held:
        step, mean, name, nothing, flag = 3, 0.5, "x", None, True
        numbers = {"a": 1, 2: [1.5, "b"], (1, "c"): 2}
        return held()

    values = mine(program().values, "program")
    assert values["step"] == 3
    assert values["mean"] == 0.5
    assert values["name"] == "x"
    assert values["nothing"] is None
    assert values["flag"] is True
    assert values["numbers['a']"] == 1
    assert values["numbers[2][0]"] == 1.5
    assert values["numbers[2].len"] == 2
    assert values["numbers[(1, 'c')]"] == 2


def test_frames_are_numbered_from_the_inside_out() -> None:
    def inner() -> frames.Held:
        here = 1
        return held()

    def outer() -> frames.Held:
        here = 2
        return inner()

    values = outer().values
    depth = {p.split(":")[1]: int(p.split(":")[0]) for p in values if p.endswith(".here")}
    assert depth["inner.here"] < depth["outer.here"]


@dataclass
class Settings:
    lr: float
    tags: frozenset[str] = frozenset({"a"})


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 4


class Held:
    shared = 7

    def __init__(self) -> None:
        self.value = torch.zeros(2)
        self.self = self

    def method(self) -> None:
        pass


def test_objects_of_the_program() -> None:
    def program() -> frames.Held:
        settings, slotted, space, recent = (
            Settings(0.1, frozenset({"b"})),
            Slotted(),
            SimpleNamespace(a=1),
            deque([1, 2], maxlen=3),
        )
        thing = Held()
        call, later = thing.method, functools.partial(max, [5])
        return held()

    found = program()
    values = mine(found.values, "program")
    assert values["settings.lr"] == 0.1
    assert values["settings.tags.len"] == 1
    assert values["slotted.count"] == 4
    assert values["space.a"] == 1
    assert values["recent[1]"] == 2
    assert values["later.args[0][0]"] == 5
    assert "thing.value" in mine(found.tensors, "program")
    assert __file__ in found.files


def test_classes_hold_values_of_their_own() -> None:
    values = held().values
    assert next(v for p, v in values.items() if p.endswith("test_frames.Held.shared")) == 7


def test_closures() -> None:
    def make() -> Any:
        count, weights = 5, {"w": torch.ones(1)}

        def update() -> tuple[int, Any]:
            return count, weights

        return update

    def program() -> frames.Held:
        update = functools.wraps(make)(make())
        return held()

    found = program()
    assert mine(found.values, "program")["update<make>.count"] == 5
    assert "update<make>.weights['w']" in mine(found.tensors, "program")


def test_generators_that_run() -> None:
    def batches() -> Iterator[int]:
        position = 11
        yield position

    def program() -> frames.Held:
        running = batches()
        next(running)
        return held()

    assert mine(program().values, "program")["running<batches>.position"] == 11


def test_random_generators_but_not_the_systems() -> None:
    def program() -> frames.Held:
        ours, made, numpy, system = random.Random(1), torch.Generator(), np.random.default_rng(1), random.SystemRandom()
        return held()

    assert set(mine(program().generators, "program")) == {"ours", "made", "numpy"}


def test_a_tensor_is_found_once_and_known_ones_not_at_all() -> None:
    def program() -> frames.Held:
        one, known = torch.zeros(1), torch.zeros(1)
        same = [one, known]
        return held({id(known)})

    assert list(mine(program().tensors, "program")) == ["one"]


def test_arrays_and_their_scalars() -> None:
    def program() -> frames.Held:
        table, number, big = np.zeros(3), np.float32(1.5), np.zeros((frames.MAX_ARRAY_BYTES >> 3) + 1)
        objects = np.array([object()])
        return held()

    found = program()
    assert set(mine(found.arrays, "program")) == {"table"}
    assert mine(found.values, "program")["number"] == 1.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 3
        self.plain = torch.zeros(1)
        self._private = 1


def test_modules_by_their_parameters_and_own_attributes() -> None:
    def program() -> frames.Held:
        model = Model()
        return held()

    found = program()
    assert {"model.layer.weight", "model.layer.bias", "model.plain"} == set(mine(found.tensors, "program"))
    assert mine(found.values, "program")["model.calls"] == 3
    path = next(p for p in found.attributes if p.endswith("program.model.calls"))
    assert found.attributes[path][1] == "calls"


def test_modules_that_are_captured_are_not_looked_at_again() -> None:
    def program() -> frames.Held:
        model = Model()
        return frames.walk(torch, NOTHING, frames.Captured(model.modules()))

    assert set(mine(program().tensors, "program")) == {"model.plain"}


class Foreign:
    def __init__(self) -> None:
        self.total, self.count, self.parts = torch.zeros(1), 3, [torch.zeros(1)]


def test_of_packages_objects_only_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(frames._user_types, Foreign, False)

    def program() -> frames.Held:
        meter = Foreign()
        return held()

    found = program()
    assert set(mine(found.tensors, "program")) == {"meter.total", "meter.parts[0]"}
    assert not mine(found.values, "program")


def test_a_list_that_grows_does_not_cost_more() -> None:
    def program(count: int) -> frames.Held:
        history = [0.5] * count
        return held()

    counts = {n: len(mine(program(n).values, "program")) for n in (300, 10_000)}
    assert counts[300] == counts[10_000] == frames.LAST_ITEMS + 2
    values = mine(program(10_000).values, "program")
    assert values["history.len"] == 10_000
    assert values["history[9999]"] == 0.5


def test_limits() -> None:
    def program() -> frames.Held:
        wide = {i: i for i in range(frames.MAX_ITEMS + 1)}
        deep: Any = 1
        for _ in range(frames.MAX_DEPTH + 1):
            deep = [deep]
        text, names = "x" * (frames.MAX_TEXT + 1), {"b", "a"}
        return held()

    values = mine(program().values, "program")
    assert not any(p.startswith("wide[") for p in values)
    assert values["text"] == (frames.MAX_TEXT + 1, frames.hash_text("x" * (frames.MAX_TEXT + 1)))
    assert "deep" + "[0]" * frames.MAX_DEPTH not in values
    assert values["names.len"] == 2
    assert values["names.set"] == frames.hash_text(repr(sorted(["'a'", "'b'"])))


def test_the_interpreter_and_packages_are_not_the_program() -> None:
    assert frames.is_program("/home/me/train.py")
    assert frames.is_program("/tmp/made.py")
    for other in (random.__file__, torch.__file__, np.__file__, frames.__file__, "<frozen importlib>", "<string>"):
        assert not frames.is_program(str(other))


def test_an_object_that_refuses_to_be_looked_at_is_no_reason_to_stop() -> None:
    class Strange:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    def program() -> frames.Held:
        strange, number = Strange(), 1
        return held()

    assert mine(program().values, "program")["number"] == 1
