"""Values come back as they were, with their types; what is no value of the format is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lmres.adapters.capture.values import check, decode, encode
from lmres.errors import CaptureError
from tests.unit.adapters.capture_kit import spelled


def no_tensor(*_: object) -> Any:
    raise AssertionError


def again(value: object) -> Any:
    text = json.dumps(encode(value, ("here",), no_tensor), allow_nan=False)
    found = json.loads(text)
    check(found)
    return decode(found, no_tensor)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.binary(max_size=8), st.floats(), st.just(-0.0)
)
keys = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
nested = st.recursive(
    scalars,
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.lists(part, max_size=4).map(tuple),
        st.lists(part, max_size=4).map(deque),
        st.dictionaries(keys, part, max_size=4),
        st.dictionaries(keys, part, max_size=4).map(OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, deque):
        return type(other) is deque and same(list(one), list(other)) and one.maxlen == other.maxlen
    if isinstance(one, (set, frozenset)):
        return type(one) is type(other) and one == other
    if isinstance(one, dict):
        return type(one) is type(other) and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return spelled(one) == spelled(other)


@settings(deadline=None, max_examples=150)
@given(nested)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert same(value, again(value))


@pytest.mark.parametrize(
    "value",
    [
        Counter({4: 2, 1: 1}),
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.complex128(1 + 2j),
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.empty((0, 2)),
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.Size([2, 0]),
        bytearray(b"ab"),
        deque([1], maxlen=3),
        10**400,
    ],
)
def test_special_values(value: Any) -> None:
    found = again(value)
    assert type(found) is type(value)
    if isinstance(value, (np.generic, np.ndarray)):
        assert found.dtype == value.dtype and np.array_equal(found, value)
    else:
        assert same(value, found)


@pytest.mark.parametrize("value", [object(), len, 1j, np.array(["a"]), np.array([object()], dtype=object), range(3)])
def test_other_types_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(CaptureError, match=r"^here: a: 1 is a"):
        encode({"a": [0, value]}, ("here",), no_tensor)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list = []
    value.append(value)
    with pytest.raises(CaptureError, match="holds itself"):
        encode(value, ("here",), no_tensor)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tensor": "unknown"},
        {"tensor": 1},
        {"float": "1"},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"dict": {"a": 1}},
        {"ordered": [[{"dict": []}, 1]]},
        {"tuple": 3},
        {"size": [-1]},
        {"deque": [1, [1, 2]]},
        {"bytes": "zz"},
        {"dtype": "Tensor"},
        {"device": "disk"},
        {"numpy": ["|O", None, "00" * 8]},
        {"numpy": ["<f8", [2], "00" * 8]},
        {"numpy": ["<f8", [-1], ""]},
        {"pickle": "00"},
        {"a": 1, "b": 2},
    ],
)
def test_foreign_json_is_refused(value: Any) -> None:
    with pytest.raises(CaptureError):
        check([value], {"known"})
