"""What a worker's marks look like to the one who reads the page: both sides' layout, torn entries, nesting."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmres.adapters.bootstrap import page, session
from lmres.adapters.watch import marks, variable_text
from lmres.adapters.watch.marks import (
    BACKWARD,
    CHECKPOINT_IO,
    COLLECTIVE,
    FORWARD,
    LOADER,
    OPTIMIZER,
    Group,
    Watch,
    ranks_text,
    short_name,
)
from lmres.adapters.watch.settings import STACKS_SIGNAL, decode
from lmres.rendezvous.edge.workers import progress
from lmres.rendezvous.edge.workers.progress import PageView, ProgressPage, parse_ranks
from lmres.scout.sighting import MAX_RECENT, GroupSight, OpMark

PID = 4321


class Pages:
    """A page with both its sides."""

    def __init__(self) -> None:
        self.reader = ProgressPage()
        self.memory = mmap.mmap(self.reader.fd, page.PAGE_BYTES)
        page.HEAD.pack_into(self.memory, 0, page.PAGE_MAGIC, page.PAGE_VERSION, PID)
        self.told: list[str] = []
        inner: Any = SimpleNamespace(page=self.memory, events=itertools.count(1))
        self.watch = Watch(inner, "/nowhere/torch/", self.told.append)
        self.watch.begin()

    def view(self) -> PageView:
        view = self.reader.look(PID)
        assert view is not None, self.reader.blind
        return view

    def close(self) -> None:
        self.watch._page = bytearray()
        self.memory.close()
        self.reader.close()


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


def noted(pages: Pages, group: Group, count: int = 1, shape: str = "float32[2]") -> None:
    for _ in range(count):
        pages.watch.entered(group, b"allreduce", shape.encode(), counts=True)


# -- both sides --------------------------------------------------------------------------------------------------------


def test_both_sides_have_the_same_page() -> None:
    for name in ("MAX_GROUPS", "GROUP_AT", "GROUP_BYTES", "RING_AT", "RING"):
        assert getattr(page, name) == getattr(progress, name)
    assert (page.PAGE_MAGIC, page.PAGE_VERSION, page.PAGE_BYTES) == (
        progress.MAGIC,
        progress.VERSION,
        progress.PAGE_BYTES,
    )
    assert (session.PAGE_MAGIC, session.COUNTERS_AT) == (page.PAGE_MAGIC, page.COUNTERS_AT)
    data = bytearray(progress.PAGE_BYTES)
    page.HEAD.pack_into(data, 0, page.PAGE_MAGIC, page.PAGE_VERSION, 3)
    page.COUNTERS.pack_into(data, page.COUNTERS_AT, 4, 5)
    page.FIRST.pack_into(data, page.FIRST_AT, 6)
    assert progress.LAYOUT.unpack_from(data) == (progress.MAGIC, progress.VERSION, 3, 4, 5, 6)
    page.EVENT_PHASE.pack_into(data, page.EVENT_AT, 0, 0, 3, 4)
    page.EVENT.pack_into(data, page.EVENT_AT, 1, 2)
    page.TIMES.pack_into(data, page.TIMES_AT, 5, 6, 7)
    page.ARMED.pack_into(data, page.ARMED_AT, 8)
    page.GROUPS.pack_into(data, page.GROUPS_AT, 9)
    assert progress.ACTIVITY.unpack_from(data, progress.ACTIVITY_AT) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    page.GROUP.pack_into(data, 1024, 1, 2, 3)
    page.GROUP_TEXTS.pack_into(data, 1024 + page.GROUP_TEXTS_AT, b"name", b"ranks")
    assert progress.GROUP.unpack_from(data, 1024)[:3] == (1, 2, 3)
    assert progress.GROUP.unpack_from(data, 1024)[3].rstrip(b"\0") == b"name"
    assert page.OP.format == progress.OP.format
    assert page.RING_AT + page.RING * page.OP.size <= page.GROUP_BYTES
    assert page.GROUP_AT + page.MAX_GROUPS * page.GROUP_BYTES <= page.PAGE_BYTES
    assert progress.GROUP.size <= page.RING_AT
    assert page.GROUPS_AT + page.GROUPS.size <= page.GROUP_AT
    assert (marks.NAME_BYTES, marks.RANKS_BYTES, marks.OP_BYTES, marks.SHAPE_BYTES) == (64, 512, 32, 40)


def test_settings() -> None:
    assert decode(variable_text()) == STACKS_SIGNAL
    assert decode(variable_text(stacks_signal=0)) == 0
    for text in ("", "{}", "[]", '{"stacks_signal": true}', '{"stacks_signal": -1}', '{"stacks_signal": 65}'):
        with pytest.raises(ValueError):
            decode(text)


@pytest.mark.parametrize(
    "ranks",
    [[0], [0, 1], [0, 2], [0, 1, 2, 3], [0, 4, 8, 12], [3, 4, 5, 9, 12, 15, 18], [5, 1, 7], list(range(0, 4096, 8))],
)
def test_ranks_as_text(ranks: list[int]) -> None:
    assert parse_ranks(ranks_text(ranks)) == tuple(ranks)
    assert ranks_text(list(range(0, 4096, 8))) == "0-4088/8"


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1/0", "0-99999999999", "1,,2", "-5"])
def test_what_is_no_list_of_ranks(text: str) -> None:
    assert parse_ranks(text) == ()


def test_long_names_stay_apart() -> None:
    one, two = "x" * 100 + "1", "x" * 100 + "2"
    assert len({short_name(one), short_name(two), short_name(one)}) == 2
    assert len(short_name(one)) == 64
    assert short_name("default") == b"default"


# -- phases ------------------------------------------------------------------------------------------------------------


def test_phases_nest(pages: Pages) -> None:
    watch = pages.watch
    seen = []

    def look(*inner: Any) -> None:
        seen.append(pages.view().phase)
        if inner:
            code, *rest = inner
            watch.within(code, look, rest, {})
            seen.append(pages.view().phase)

    look(LOADER, FORWARD)
    look(OPTIMIZER, FORWARD, COLLECTIVE)
    assert seen == [
        "start", "loader", "forward", "loader", "user",
        "user", "optimizer", "forward", "collective", "forward", "optimizer", "user",
    ]  # fmt: skip


def test_each_entry_and_exit_is_an_event(pages: Pages) -> None:
    before = pages.view()
    pages.watch.within(FORWARD, lambda: None, (), {})
    after = pages.view()
    assert after.event_count == before.event_count + 2
    assert before.event_ns < after.event_ns == after.phase_ns <= time.monotonic_ns()


def test_an_exception_leaves_all_that_was_entered(pages: Pages) -> None:
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        pages.watch.within(FORWARD, pages.watch.within, (COLLECTIVE, fails, (), {}), {})
    assert (pages.view().phase, pages.watch.codes) == ("user", [marks.USER])
    assert pages.told == []


def test_time_belongs_to_the_innermost_kind(pages: Pages) -> None:
    """Waiting inside of writing is waiting, computing inside of reading is reading."""

    def spend() -> None:
        end = time.monotonic_ns() + 1_000_000
        while time.monotonic_ns() < end:
            pass

    def writes() -> None:
        spend()
        pages.watch.within(COLLECTIVE, spend, (), {})

    began = time.monotonic_ns()
    pages.watch.within(CHECKPOINT_IO, writes, (), {})
    pages.watch.within(LOADER, pages.watch.within, (FORWARD, spend, (), {}), {})
    pages.watch.within(FORWARD, spend, (), {})
    took = time.monotonic_ns() - began
    view = pages.view()
    assert min(view.collective_ns, view.loader_ns, view.io_ns) >= 1_000_000
    assert view.collective_ns + view.loader_ns + view.io_ns <= took - 1_000_000


def test_the_end_of_a_backward_is_waiting(pages: Pages) -> None:
    group = Group("0", "0-1")

    def spend() -> None:
        end = time.monotonic_ns() + 1_000_000
        while time.monotonic_ns() < end:
            pass

    pages.watch.within_backward(spend, (), {})
    assert pages.view().collective_ns == 0, "no collective in it"

    def with_collective() -> None:
        spend()
        noted(pages, group)
        pages.watch.within(COLLECTIVE, spend, (), {})
        spend()

    began = time.monotonic_ns()
    pages.watch.within_backward(with_collective, (), {})
    took = time.monotonic_ns() - began
    assert 2_000_000 <= pages.view().collective_ns <= took - 1_000_000, "each moment once"


def test_a_step_is_an_event(pages: Pages) -> None:
    moment = time.monotonic_ns() + 10**9
    page.COUNTERS.pack_into(pages.memory, page.COUNTERS_AT, 3, moment)
    assert (pages.view().step, pages.view().step_ns, pages.view().event_ns) == (3, moment, moment)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_operations_are_numbered_and_the_newest_kept(pages: Pages) -> None:
    group = Group("0", "0-3")
    page.COUNTERS.pack_into(pages.memory, page.COUNTERS_AT, 9, 0)
    noted(pages, group, 70)
    pages.watch.over(group, 69)
    (seen,) = pages.view().groups
    assert (seen.name, seen.ranks, seen.entered, seen.left) == ("0", (0, 1, 2, 3), 70, 69)
    assert [m.number for m in seen.recent] == list(range(71 - MAX_RECENT, 71))
    assert seen.recent[-1] == OpMark(number=70, op="allreduce", shape="float32[2]", step=9)


def test_sends_are_noted_without_a_number(pages: Pages) -> None:
    group = Group("0", "0-3")
    noted(pages, group)
    assert pages.watch.entered(group, b"send", b"int64[1]", counts=False) == 0
    noted(pages, group)
    assert [m.number for m in pages.view().groups[0].recent] == [1, 0, 2]
    assert pages.view().groups[0].entered == 2


def test_the_group_unused_longest_gives_way(pages: Pages) -> None:
    groups = [Group(f"g{i}", "0-1") for i in range(page.MAX_GROUPS + 2)]
    for group in groups:
        noted(pages, group, 3)
    names = {g.name for g in pages.view().groups}
    assert names == {f"g{i}" for i in range(2, page.MAX_GROUPS + 2)}
    noted(pages, groups[0])
    back = next(g for g in pages.view().groups if g.name == "g0")
    assert (back.entered, [m.number for m in back.recent]) == (4, [4]), "its number goes on"


def test_waiting_for_what_has_given_way(pages: Pages) -> None:
    groups = [Group(f"g{i}", "0-1") for i in range(page.MAX_GROUPS + 1)]
    for group in groups:
        noted(pages, group)
    pages.watch.over(groups[0], 1)
    assert all(g.left == 0 for g in pages.view().groups)


@pytest.mark.parametrize("torn", range(0, page.OP.size, 8))
def test_an_operation_that_is_not_whole_is_left_out(pages: Pages, torn: int) -> None:
    """The writer was stopped in the middle of it."""
    group = Group("0", "0-1")
    noted(pages, group, page.RING)
    at = page.GROUP_AT + page.RING_AT
    before = bytes(pages.memory[at : at + page.OP.size])
    noted(pages, group)
    pages.memory[at + torn : at + page.OP.size] = before[torn:]
    marks_seen = pages.view().groups[0].recent
    assert [m.number for m in marks_seen] == list(range(page.RING + 2 - MAX_RECENT, page.RING + 1))


def test_what_changed_between_the_two_reads_is_left_out(pages: Pages) -> None:
    group = Group("0", "0-1")
    noted(pages, group, 5)
    before = bytes(pages.memory)
    noted(pages, group, 2)
    found = progress.decode(bytes(pages.memory), before)
    assert found.groups[0].entered == 7
    assert [m.number for m in found.groups[0].recent] == [1, 2, 3, 4, 5]
    other = bytearray(pages.memory)
    page.GROUP_TEXTS.pack_into(other, page.GROUP_AT + page.GROUP_TEXTS_AT, b"other", b"0-9")
    assert progress.decode(bytes(other), before).groups == ()


# -- what is no page ---------------------------------------------------------------------------------------------------


def test_why_nothing_is_seen(pages: Pages) -> None:
    assert pages.reader.look(PID + 1) is None
    assert pages.reader.blind == f"the page was written by process {PID}, expected {PID + 1}"
    pages.memory[0:3] = b"xyz"
    assert pages.reader.look(PID) is None
    assert "begins with" in pages.reader.blind
    fresh = ProgressPage()
    assert (fresh.look(), fresh.blind) == (None, "no worker has attached")
    fresh.close()
    assert (fresh.look(), fresh.blind) == (None, "the page is closed")
    assert fresh.read() == (0, 0)


def test_a_page_that_was_cut() -> None:
    import os

    reader = ProgressPage()
    os.ftruncate(reader.fd, 100)
    assert reader.look() is None
    assert "100 bytes" in reader.blind
    assert reader.read() == (0, 0)
    reader.close()


def test_garbage_never_raises(pages: Pages) -> None:
    import random

    noted(pages, Group("0", "0-1"), 40)
    good = bytes(pages.memory)
    chance = random.Random(5)
    seen = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.choice((1, 8, 400))):
            at = chance.choice((chance.randrange(32, 200), chance.randrange(page.GROUP_AT, page.GROUP_AT + 4080)))
            data[at] = chance.randrange(256)
        pages.memory[:] = bytes(data)
        view = pages.reader.look(PID)
        assert (view is None) == bool(pages.reader.blind)
        if view is not None:
            seen += 1
            assert all(isinstance(g, GroupSight) and g.name.isprintable() and g.left <= g.entered for g in view.groups)
    assert seen > 100


# -- off ---------------------------------------------------------------------------------------------------------------


def test_a_mark_that_fails_ends_the_watch_once(pages: Pages) -> None:
    pages.watch._times = []
    for _ in range(3):
        assert pages.watch.within(LOADER, lambda: 5, (), {}) == 5
    assert not pages.watch.on
    assert pages.told == ["IndexError: list index out of range"]
    assert not pages.view().armed


def test_an_exception_of_the_program_passes(pages: Pages) -> None:
    """A handler of a signal may raise in the middle of a mark."""
    code = compile("def handler():\n    raise RuntimeError('theirs')", "/home/user/train.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    pages.watch._spend = lambda *_: names["handler"]()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="theirs"):
        pages.watch.within(LOADER, lambda: 5, (), {})
    assert pages.watch.on
    assert pages.told == []
    assert pages.watch.codes == [marks.START]


def test_a_child_writes_elsewhere(pages: Pages) -> None:
    gone: list[int] = []
    pages.watch.on_let_go.append(lambda: gone.append(1))
    before = bytes(pages.memory)
    pages.watch.let_go()
    pages.watch.within(BACKWARD, lambda: None, (), {})
    pages.watch.over(Group("0", "0-1"), 1)
    assert bytes(pages.memory) == before
    assert (pages.watch.on, gone) == (False, [1])
