"""Two lives of a program, compared."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lmres.adapters.resume.certificate import OwnStart, differences, same, summary, variable


def compare(then: dict[str, Any], now: dict[str, Any], **given: Any) -> list[str]:
    settings: dict[str, Any] = {"volatile": frozenset(), "life_then": {}, "life_now": {}, **given}
    return [d.path for d in differences(then, now, **settings)]


def test_equal_lives_have_no_differences() -> None:
    values = {"0:main.step": 3, "0:main.best": math.nan, "0:main.name": "x", "0:main.none": None}
    assert compare(values, dict(values)) == []


@pytest.mark.parametrize(("a", "b"), [(1, 2), (1, 1.0), (True, 1), ("a", "b"), (0.1, 0.1 + 1e-17 + 1e-16), (None, 0)])
def test_differences_are_exact_in_type_and_value(a: Any, b: Any) -> None:
    assert compare({"0:f.x": a}, {"0:f.x": b}) == ["0:f.x"]


def test_a_value_that_is_missing_differs() -> None:
    assert compare({"0:f.x": 1}, {}) == ["0:f.x"]
    assert compare({}, {"0:f.x": 1}) == ["0:f.x"]


def test_what_comes_from_a_clock_may_differ() -> None:
    volatile = frozenset({"t0"})
    assert compare({"0:f.t0": 1.0, "0:f.a.t0.x": 2}, {"0:f.t0": 3.0, "0:f.a.t0.x": 4}, volatile=volatile) == []
    assert compare({"0:f.t01": 1.0}, {"0:f.t01": 3.0}, volatile=volatile) == ["0:f.t01"]


def test_what_names_the_life_may_differ() -> None:
    lives = {"life_then": {"port": "4001", "pid": "17"}, "life_now": {"port": "4002", "pid": "18"}}
    assert compare({"0:f.p": 4001}, {"0:f.p": 4002}, **lives) == []
    assert compare({"0:f.u": "tcp://h:4001"}, {"0:f.u": "tcp://h:4002"}, **lives) == []
    assert compare({"0:f.p": 4001}, {"0:f.p": 18}, **lives) == ["0:f.p"]


def own_start(**given: Any) -> OwnStart:
    settings: dict[str, Any] = {"settled_then": frozenset(), "first_now": {}, "variables_now": frozenset(), **given}
    return OwnStart(**settings)


def test_the_step_that_an_own_checkpoint_started_at_may_differ() -> None:
    start = own_start(settled_then=frozenset({"0:f.start"}), first_now={"0:f.start": 20})
    assert compare({"0:f.start": 0}, {"0:f.start": 20}, own_start=start) == []


def test_a_counter_must_not_differ_after_an_own_start() -> None:
    start = own_start(first_now={"0:f.step": 20}, variables_now=frozenset({"0:f.step"}))
    assert compare({"0:f.step": 27}, {"0:f.step": 26}, own_start=start) == ["0:f.step"]


def test_what_the_own_start_read_and_what_it_has_not_come_to_may_differ() -> None:
    start = own_start(first_now={"0:f.saved['step']": 20}, variables_now=frozenset({"0:f.saved"}))
    assert compare({}, {"0:f.saved['step']": 20}, own_start=start) == []
    assert compare({"0:f.state['step']": 20}, {}, own_start=start) == []
    assert compare({"0:f.saved['more']": 20}, {}, own_start=start) == ["0:f.saved['more']"]


def test_variables_are_the_beginnings_of_paths() -> None:
    assert variable("0:main.saved['a'][0].b") == "0:main.saved"
    assert variable("trainer.best.value") == "trainer.best"


def test_a_summary_is_short() -> None:
    found = differences({f"0:f.v{i}": i for i in range(20)}, {}, volatile=frozenset(), life_then={}, life_now={})
    text = summary(found)
    assert "f.v0 was 0, is (absent)" in text and text.endswith("and 14 more")


def test_sequences_are_compared_item_by_item() -> None:
    assert same([1, (2, math.nan)], [1, (2, math.nan)])
    assert not same([1, 2], [1, 2, 3])


def test_a_short_name_of_a_life_is_one_only_where_the_source_says_so() -> None:
    lives: dict[str, Any] = {"life_then": {"restarts": "0"}, "life_now": {"restarts": "1"}}
    assert compare({"0:f.bad": 0, "0:f.restarts": 0}, {"0:f.bad": 1, "0:f.restarts": 1}, **lives) == [
        "0:f.bad",
        "0:f.restarts",
    ]
    named = {**lives, "named_after_life": frozenset({"restarts"})}
    assert compare({"0:f.bad": 0, "0:f.restarts": 0}, {"0:f.bad": 1, "0:f.restarts": 1}, **named) == ["0:f.bad"]


def test_a_text_with_names_of_a_life_is_the_same_but_for_them() -> None:
    lives = {"life_then": {"port": "4001", "host": "node-a"}, "life_now": {"port": "4002", "host": "node-b"}}
    assert compare({"0:f.x": "node-a:4001/run"}, {"0:f.x": "node-b:4002/run"}, **lives) == []
    assert compare({"0:f.x": "node-a:4001/run"}, {"0:f.x": "node-b:4002/bun"}, **lives) == ["0:f.x"]
    assert compare({"0:f.x": "4001"}, {"0:f.x": 4002}, **lives) == ["0:f.x"]
