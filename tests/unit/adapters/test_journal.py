"""The log of scalars: what goes in comes out, in order, and another way through the program is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmres.adapters.resume.journal import Desync, Journal, JournalError, Replay, Unread

NUMBERS = st.one_of(st.booleans(), st.integers(), st.floats(), st.complex_numbers())
VALUES = st.one_of(NUMBERS, st.lists(st.one_of(st.booleans(), st.integers(), st.floats()), max_size=5))


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


@given(st.lists(st.tuples(VALUES, st.integers(0, 100_000)), max_size=20))
def test_values_come_out_as_they_went_in(values: list[tuple[Any, int]]) -> None:
    journal = Journal(bytearray(1 << 16))
    journal.mark(3, 99, 1)
    for value, site in values:
        journal.scalar(value, site)
    replay = Replay(journal._memory, journal.length)
    replay.go_to(replay.marks[0])
    for value, site in values:
        assert same(replay.scalar(site), value)
    assert replay.position == journal.length


def test_marks_are_found_by_step_and_carry_their_fingerprint() -> None:
    journal = Journal(bytearray(1 << 12))
    for step in range(4):
        journal.mark(step, 1000 + step, step // 2)
        journal.scalar(float(step), 7)
    replay = Replay(journal._memory, journal.length)
    assert [(m.step, m.fingerprint, m.iterators) for m in replay.marks] == [
        (0, 1000, 0),
        (1, 1001, 0),
        (2, 1002, 1),
        (3, 1003, 1),
    ]
    found = replay.find(2)
    assert found is not None
    replay.go_to(found)
    assert replay.scalar(7) == 2.0


def two_steps() -> Replay:
    journal = Journal(bytearray(1 << 12))
    journal.mark(0, 0, 0)
    journal.scalar(0.5, 10)
    journal.scalar(True, 11)
    journal.mark(1, 0, 0)
    replay = Replay(journal._memory, journal.length)
    replay.go_to(replay.marks[0])
    return replay


def test_a_read_in_another_line_is_another_way() -> None:
    with pytest.raises(Desync, match="line 12, the first life read one in line 10"):
        two_steps().scalar(12)


def test_a_read_too_many_is_another_way() -> None:
    replay = two_steps()
    replay.scalar(10)
    replay.scalar(11)
    with pytest.raises(Desync, match="did not read in this step"):
        replay.scalar(11)


def test_a_read_too_few_is_another_way() -> None:
    replay = two_steps()
    replay.scalar(10)
    with pytest.raises(Desync, match="were not read"):
        replay.pass_mark(1)


def test_a_forward_after_another_step_is_another_way() -> None:
    replay = two_steps()
    replay.scalar(10)
    replay.scalar(11)
    with pytest.raises(Desync, match="after step 2, in the first life it began after step 1"):
        replay.pass_mark(2)


def test_generators_are_noted_where_they_were() -> None:
    journal = Journal(bytearray(1 << 12))
    journal.mark(0, 0, 0)
    journal.scalar(1, 5)
    journal.generators(b"state")
    replay = Replay(journal._memory, journal.length)
    replay.go_to(replay.marks[0])
    assert replay.generators() is None
    assert replay.scalar(5) == 1
    assert replay.generators() == b"state"


def test_what_stands_before_a_void_is_not_replayed() -> None:
    journal = Journal(bytearray(1 << 12))
    journal.mark(0, 1, 0)
    journal.scalar(1.0, 1)
    journal.void()
    journal.mark(30, 2, 0)
    assert [m.step for m in Replay(journal._memory, journal.length).marks] == [30]


def test_a_full_log_says_so_and_stays_whole() -> None:
    journal = Journal(bytearray(40))
    journal.mark(0, 0, 0)
    journal.scalar(1.0, 1)
    length = journal.length
    with pytest.raises(JournalError, match="full"):
        journal.scalar(2.0, 1)
    assert journal.length == length
    Replay(journal._memory, length)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(JournalError, match="can not be kept"):
        Journal(bytearray(100)).scalar("text", 1)


@pytest.mark.parametrize("cut", [1, 5, 20, 24])
def test_a_torn_log_is_not_used(cut: int) -> None:
    journal = Journal(bytearray(1 << 12))
    journal.mark(0, 0, 0)
    journal.scalar(1.0, 1)
    with pytest.raises(JournalError, match="torn"):
        Replay(journal._memory, journal.length - cut)


def test_not_a_number_is_kept() -> None:
    journal = Journal(bytearray(100))
    journal.mark(0, 0, 0)
    journal.scalar(math.nan, 1)
    replay = Replay(journal._memory, journal.length)
    replay.go_to(replay.marks[0])
    assert math.isnan(replay.scalar(1))


def by_the_clock() -> Replay:
    """Step 0 read lines 5, 9 and 5; only line 9 is read by the clock."""
    journal = Journal(bytearray(1 << 12))
    journal.mark(0, 1, 0)
    for value, line in ((0.5, 5), (9.0, 9), (0.25, 5)):
        journal.scalar(value, line)
    journal.scalar(9.5, 9)
    journal.mark(1, 2, 0)
    replay = Replay(journal._memory, journal.length)
    replay.loose = frozenset({9})
    replay.go_to(replay.marks[0])
    return replay


def test_what_only_the_first_life_read_by_the_clock_is_passed() -> None:
    replay = by_the_clock()
    assert [replay.scalar(5), replay.scalar(5)] == [0.5, 0.25]
    replay.pass_mark(1)


def test_what_both_lives_read_by_the_clock_is_answered() -> None:
    replay = by_the_clock()
    assert [replay.scalar(5), replay.scalar(9), replay.scalar(5), replay.scalar(9)] == [0.5, 9.0, 0.25, 9.5]
    replay.pass_mark(1)


def test_what_only_this_life_reads_by_the_clock_has_no_answer() -> None:
    replay = by_the_clock()
    with pytest.raises(Unread):
        replay.scalar(9)
    assert [replay.scalar(5), replay.scalar(5)] == [0.5, 0.25]


def test_other_lines_are_as_strict_as_ever() -> None:
    replay = by_the_clock()
    with pytest.raises(Desync):
        replay.scalar(6)
    replay = by_the_clock()
    replay.scalar(5)
    with pytest.raises(Desync):
        replay.pass_mark(1)
