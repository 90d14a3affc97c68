"""What a vault reports to the hub."""

from __future__ import annotations

from lmres.gemini.edge.seat import whole_keys
from lmres.gemini.inventory import Key


def key(step: int) -> Key:
    return Key(step, 1)


def test_nothing_sealed_nothing_passed() -> None:
    assert whole_keys([]) == (frozenset(), frozenset(), -1)
    assert whole_keys([(-1, {})]) == (frozenset(), frozenset(), -1)


def test_a_restored_step_is_passed() -> None:
    assert whole_keys([(7, {})])[2] == 7


def test_whole_needs_every_local_rank() -> None:
    whole, seen, floor = whole_keys([(1, {key(1): True}), (-1, {})])
    assert (whole, seen, floor) == (frozenset(), {key(1)}, 0)
    assert whole_keys([(1, {key(1): True}), (1, {key(1): True})]) == ({key(1)}, {key(1)}, 1)


def test_a_key_that_waits_for_its_copies_keeps_the_floor_below_it() -> None:
    whole, _, floor = whole_keys([(2, {key(1): True, key(2): False})])
    assert whole == {key(1)}
    assert floor == 1


def test_a_rank_that_passed_a_step_without_it_makes_it_never() -> None:
    whole, seen, floor = whole_keys([(2, {key(1): True, key(2): True}), (3, {key(1): True, key(3): True})])
    assert whole == {key(1)}
    assert seen == {key(1), key(2), key(3)}
    assert floor == 2  # step 3 may still come from the first rank, step 2 can not from the second


def test_a_step_nobody_took_is_passed_with_the_next_one() -> None:
    assert whole_keys([(9, {key(9): True})])[2] == 9
