"""Which ranks may have the same shared part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmres.adapters.capture.equals import Equals


def text(coordinate: list[int], placements: tuple[str, ...] = ("R", "S(0)"), machine: str = "m") -> str:
    shard = {"shape": [8, 4], "placements": list(placements), "mesh": [2, 2], "coordinate": coordinate}
    layout: Any = SimpleNamespace(
        keys=((("weight", "float32", (4, 4)), ("bias", "float32", (4,))), ()),
        shared_items=(SimpleNamespace(name="weight"), SimpleNamespace(name="bias")),
    )
    return Equals(lambda: machine).text(layout, {"weight": {"shard": shard, "stride": [4, 1]}})


def test_the_replicas_of_a_shard_are_equals() -> None:
    assert text([0, 1]) == text([1, 1])


@pytest.mark.parametrize(
    "other",
    [text([0, 0]), text([0, 1], placements=("S(0)", "S(0)")), text([0, 1], machine="another")],
    ids=["another shard", "sharded otherwise", "another machine"],
)
def test_others_are_not(other: str) -> None:
    assert text([0, 1]) != other


def test_where_nothing_is_replicated_each_is_alone() -> None:
    both = ("S(0)", "S(1)")
    assert text([0, 1], both) != text([1, 1], both)
