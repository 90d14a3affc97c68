"""Slow ranks against their peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from lmres.scout.sighting import Pace
from lmres.scout.straggler import AGAIN_MS, Slow, StragglerJudge

BUSY_US, INPUT_US = 20_000, 2_000
Costs = Callable[[int, int], tuple[int, int]]
"""What a step costs a rank in a window: busy and input microseconds."""


def usual(_rank: int, _window: int) -> tuple[int, int]:
    return BUSY_US, INPUT_US


def slow_in(rank: int, *, busy: float = 1.0, data: float = 1.0, since: int = 0, until: int = 10**6) -> Costs:
    def costs(r: int, window: int) -> tuple[int, int]:
        hit = r == rank and since <= window < until
        return round(BUSY_US * (busy if hit else 1)), round(INPUT_US * (data if hit else 1))

    return costs


class Run:
    """Windows of ten steps of one second each."""

    def __init__(self, nodes: Mapping[str, tuple[int, ...]], *, slowdown: float = 1.5, windows: int = 3) -> None:
        self.nodes = nodes
        self.ranks = [r for ranks in nodes.values() for r in ranks]
        self.judge = StragglerJudge(ranks=len(self.ranks), slowdown=slowdown, windows=windows)
        self.totals = dict.fromkeys(self.ranks, (0, 0, 0))
        self.now_ms = 0
        self.window = 0
        self.see()

    def paces(self) -> dict[str, tuple[Pace, ...]]:
        def pace(r: int) -> Pace:
            steps, busy, data = self.totals[r]
            return Pace(rank=r, steps=steps, busy_us=busy, input_us=data, waiting_us=0)

        return {n: tuple(map(pace, ranks)) for n, ranks in self.nodes.items()}

    def see(self) -> tuple[Slow, ...]:
        return self.judge.see(self.paces(), self.now_ms)

    def go(self, windows: int, costs: Costs = usual, *, steps: int = 10, window_ms: int = 1_000) -> list[Slow]:
        found: list[Slow] = []
        for _ in range(windows):
            for r in self.ranks:
                busy, data = costs(r, self.window)
                total = self.totals[r]
                self.totals[r] = (total[0] + steps, total[1] + steps * busy, total[2] + steps * data)
            self.now_ms += window_ms
            self.window += 1
            found += self.see()
        return found


def four() -> Run:
    return Run({"a": (0,), "b": (1,), "c": (2,), "d": (3,)})


def test_a_rank_that_computes_twice_as_long_is_told_after_three_windows() -> None:
    run = four()
    assert run.go(2, slow_in(2, busy=2)) == []
    (found,) = run.go(1, slow_in(2, busy=2))
    assert (found.node_id, found.rank, found.cause) == ("c", 2, "compute")
    assert found.detail == (
        "rank 2 on c works 42.0 ms a step, the others 22.0 ms, 1.9 times as long, in 3 windows in a row: "
        "it spends more on computing"
    )
    assert run.go(10, slow_in(2, busy=2)) == [], "once"


def test_a_slow_loader_is_input() -> None:
    (found,) = four().go(3, slow_in(1, data=12))
    assert (found.node_id, found.rank, found.cause) == ("b", 1, "input")


def test_two_windows_are_not_persistent() -> None:
    run = four()
    assert run.go(12, lambda r, w: slow_in(2, busy=2)(r, w) if w % 3 else usual(r, w)) == []


def test_a_slowdown_of_all_is_none() -> None:
    run = four()
    run.go(3)
    assert run.go(10, lambda _r, _w: (4 * BUSY_US, 3 * INPUT_US)) == []


def test_most_of_them_slow_is_nobody_slow() -> None:
    assert four().go(10, lambda r, _w: (BUSY_US * (1 if r == 0 else 3), INPUT_US)) == []


def test_a_small_difference_is_none_however_large_the_factor() -> None:
    assert four().go(10, lambda r, _w: (4_000 if r == 2 else 1_000, 0)) == []
    assert len(four().go(10, lambda r, _w: (7_000 if r == 2 else 1_000, 0))) == 1


def test_below_the_factor_is_none() -> None:
    assert four().go(10, slow_in(2, busy=1.4)) == []


def test_two_ranks_are_peers_enough() -> None:
    (found,) = Run({"a": (0,), "b": (1,)}).go(3, slow_in(0, busy=2))
    assert found.rank == 0


def test_one_rank_has_no_peers() -> None:
    assert Run({"a": (0,)}).go(5, slow_in(0, busy=2)) == []


def test_all_ranks_of_a_node_are_the_node() -> None:
    run = Run({"a": (0, 1), "b": (2, 3), "c": (4, 5)})
    (found,) = run.go(3, lambda r, _w: (BUSY_US * (2 if r in (2, 3) else 1), INPUT_US))
    assert (found.node_id, found.rank, found.cause) == ("b", None, "compute")
    assert "each of the 2 ranks of node b" in found.detail
    assert run.go(10, lambda r, _w: (BUSY_US * (2 if r in (2, 3) else 1), INPUT_US)) == []


def test_one_rank_of_a_node_is_that_rank() -> None:
    (found,) = Run({"a": (0, 1), "b": (2, 3)}).go(3, slow_in(3, busy=2))
    assert (found.node_id, found.rank) == ("b", 3)


def test_again_only_after_it_was_fast_and_a_minute() -> None:
    run = four()
    assert len(run.go(3, slow_in(2, busy=2))) == 1
    run.go(1)
    assert run.go(5, slow_in(2, busy=2)) == []
    run.go(1)
    found = run.go(AGAIN_MS // 1_000, slow_in(2, busy=2))
    assert len(found) == 1


def test_nothing_is_judged_before_all_are_heard_of() -> None:
    run = four()
    run.judge.ranks = 5
    assert run.go(5, slow_in(2, busy=2)) == []


@pytest.mark.parametrize(("steps", "window_ms"), [(9, 5_000), (50, 900)])
def test_a_window_needs_steps_and_time(steps: int, window_ms: int) -> None:
    run = four()
    assert run.go(3, slow_in(2, busy=2), steps=steps, window_ms=window_ms) == []
    assert len(run.go(3, slow_in(2, busy=2), steps=steps, window_ms=window_ms)) == 1


def test_counts_that_go_back_start_anew() -> None:
    """A lease still tells what a rank had done in the generation before."""
    run = four()
    run.go(2, slow_in(2, busy=2))
    run.totals = dict.fromkeys(run.ranks, (0, 0, 0))
    run.see()
    assert run.go(1, slow_in(2, busy=2)) != [], "two windows were whole"
