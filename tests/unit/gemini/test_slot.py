from __future__ import annotations

import itertools

import pytest

from lmres.gemini.inventory import Key
from lmres.gemini.slot import TRANSITIONS, SlotState, SlotTable
from lmres.gemini.watermark import Verdict

FIRST, SECOND, THIRD = Key(1, 1), Key(2, 1), Key(3, 1)


def table(*keys: Key | None) -> SlotTable:
    """Slots with these keys sealed."""
    found = SlotTable()
    for slot, key in enumerate(keys):
        if key is not None:
            found.put(slot, key)
    return found


def grantable(found: SlotTable, *, safe: Key | None = None, dead: tuple[Key, ...] = ()) -> int | None:
    return found.grantable(Verdict(safe=safe, dead=dead).reusable)


def test_empty_slots_are_granted_first() -> None:
    assert grantable(table()) == 0
    assert grantable(table(FIRST)) == 1
    assert grantable(table(None, FIRST), safe=FIRST) == 0


def test_while_nothing_newer_is_safe_both_images_stay() -> None:
    assert grantable(table(FIRST, SECOND)) is None
    assert grantable(table(FIRST, SECOND), safe=FIRST) is None


def test_the_older_one_goes_once_the_newer_one_is_safe() -> None:
    assert grantable(table(FIRST, SECOND), safe=SECOND) == 0
    assert grantable(table(SECOND, FIRST), safe=SECOND) == 1


def test_a_dead_one_goes_though_the_safe_one_is_older() -> None:
    assert grantable(table(FIRST, SECOND), safe=FIRST, dead=(SECOND,)) == 1


def test_both_older_than_the_safe_one_the_oldest_goes() -> None:
    assert grantable(table(SECOND, FIRST), safe=THIRD) == 1


def test_one_grant_at_a_time() -> None:
    found = table()
    found.grant(0)
    assert found.granted == 0
    assert grantable(found) is None


def test_what_is_being_digested_is_not_granted_whatever_its_key() -> None:
    found = table(None, FIRST)
    found.grant(0)
    found.fill(0, SECOND)
    assert grantable(found, safe=FIRST, dead=(SECOND,)) is None
    found.seal(0)
    assert grantable(found, safe=FIRST, dead=(SECOND,)) == 0


def test_a_dead_writers_slot_is_empty() -> None:
    found = table(FIRST)
    found.grant(1)
    found.clear(1)
    assert found.state(1) is SlotState.EMPTY
    assert [key for _, key in found.sealed()] == [FIRST]


def test_a_pinned_slot_is_not_granted() -> None:
    found = table(FIRST, SECOND)
    found.pin(0)
    assert grantable(found, safe=SECOND) is None
    found.unpin(0)
    assert grantable(found, safe=SECOND) == 0


def test_only_sealed_slots_are_readable() -> None:
    found = table(FIRST)
    found.grant(1)
    assert list(found.sealed()) == [(0, FIRST)]
    found.fill(1, SECOND)
    assert list(found.sealed()) == [(0, FIRST)]
    assert found.newest == FIRST
    assert found.find(SECOND) == 1
    found.seal(1)
    assert found.newest == SECOND


@pytest.mark.parametrize(("before", "after"), sorted(itertools.product(SlotState, repeat=2), key=str))
def test_no_way_but_those_of_the_table(before: SlotState, after: SlotState) -> None:
    found = SlotTable()
    reach = {
        SlotState.EMPTY: [],
        SlotState.GRANTED: [lambda: found.grant(0)],
        SlotState.FILLED: [lambda: found.grant(0), lambda: found.fill(0, FIRST)],
        SlotState.SEALED: [lambda: found.put(0, FIRST)],
    }[before]
    for step in reach:
        step()
    if (before, after) in TRANSITIONS:
        found._move(0, after, FIRST)
        assert found.state(0) is after
    else:
        with pytest.raises(AssertionError):
            found._move(0, after, FIRST)
