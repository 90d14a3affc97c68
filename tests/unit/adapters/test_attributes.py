"""What forwards have changed in modules."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import nn

from lmres.adapters.resume.attributes import put_back


def module(**attributes: Any) -> Any:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def back(made: Any, then: dict[str, Any], now: dict[str, Any], **given: Any) -> bool:
    attributes = {f"m.{name}": (made, name) for name in vars(made) if not name.startswith("_")}
    return put_back(attributes, then, now, settled=given.get("settled", ()), tensors=given.get("tensors", ()))


def test_a_counter() -> None:
    made = module(calls=1)
    assert back(made, {"m.calls": 9}, {"m.calls": 1})
    assert made.calls == 9


def test_what_the_first_life_had_not_changed_is_left_to_the_certificate() -> None:
    made = module(width=16)
    assert not back(made, {"m.width": 32}, {"m.width": 16}, settled={"m.width"})
    assert made.width == 16


def test_equal_values_are_left_alone() -> None:
    assert not back(module(calls=9), {"m.calls": 9}, {"m.calls": 9})


def test_lists_in_place() -> None:
    past = [1]
    made = module(past=past, recent=deque([1], maxlen=2), pair=(1, 2))
    then = {
        "m.past.len": 2, "m.past[0]": 1, "m.past[1]": 2,
        "m.recent.len": 2, "m.recent[0]": 3, "m.recent[1]": 4,
        "m.pair.len": 2, "m.pair[0]": 5, "m.pair[1]": 6,
    }  # fmt: skip
    assert back(made, then, {})
    assert made.past is past
    assert past == [1, 2]
    assert made.recent == deque([3, 4], maxlen=2)
    assert made.recent.maxlen == 2
    assert made.pair == (5, 6)


def test_dictionaries_with_their_keys() -> None:
    made = module(seen={"a": 1})
    assert back(made, {"m.seen['a']": 2, "m.seen[3]": 4}, {"m.seen['a']": 1})
    assert made.seen == {"a": 2, 3: 4}


def test_a_list_known_only_in_part_is_left_alone() -> None:
    made = module(past=[1])
    assert not back(made, {"m.past.len": 300, "m.past[299]": 1}, {"m.past.len": 1, "m.past[0]": 1})
    assert made.past == [1]


def test_tensors_are_not_its_matter() -> None:
    made = module(cache={"n": 1})
    assert not back(made, {"m.cache['n']": 2}, {"m.cache['n']": 1}, tensors={"m.cache['t']"})


def test_numpy_scalars_keep_their_type() -> None:
    made = module(mean=np.float32(1))
    assert back(made, {"m.mean": 2.5}, {"m.mean": 1.0})
    assert type(made.mean) is np.float32
    assert made.mean == 2.5


def test_another_attribute_of_like_name_is_not_touched() -> None:
    made = module(call=1, calls=1)
    assert back(made, {"m.calls": 2, "m.call": 1}, {"m.calls": 1, "m.call": 1})
    assert (made.call, made.calls) == (1, 2)
