"""How long a worker may be quiet, and for how long it has been."""

from __future__ import annotations

import pytest

from lmres.scout.hangs import History, Quiet, teaches, timeout_ms
from lmres.scout.sighting import PHASES, Phase


def after(pause_ms: int) -> History:
    history = History()
    history.note(pause_ms)
    return history


@pytest.mark.parametrize(
    ("pause_ms", "expected_ms"),
    [(0, 60_000), (5_999, 60_000), (6_000, 60_000), (20_000, 200_000), (180_000, 1_800_000), (10**7, 1_800_000)],
)
def test_auto_follows_the_longest_pause_within_limits(pause_ms: int, expected_ms: int) -> None:
    assert timeout_ms("auto", after(pause_ms), phase="loader") == expected_ms


def test_the_longest_pause_stays() -> None:
    history = after(30_000)
    history.note(10)
    assert timeout_ms("auto", history, phase="collective") == 300_000


@pytest.mark.parametrize("phase", ["start", "user", "forward", "checkpoint_io", "end"])
def test_auto_gives_ten_minutes_where_it_may_take_long(phase: Phase) -> None:
    assert timeout_ms("auto", after(10), phase=phase) == 600_000
    assert timeout_ms("auto", after(100_000), phase=phase) == 1_000_000


@pytest.mark.parametrize("phase", ["backward", "optimizer", "collective", "loader"])
def test_auto_is_short_only_in_what_a_step_consists_of_and_after_three_steps(phase: Phase) -> None:
    assert [timeout_ms("auto", after(10), phase=phase, steps=n) for n in range(4)] == [600_000] * 3 + [60_000]


def test_until_the_first_step_everything_is_the_start() -> None:
    assert timeout_ms("auto", after(10), phase="forward", steps=0) == 600_000
    assert timeout_ms(3.0, after(10), phase="collective", steps=0) == 600_000
    assert timeout_ms(3.0, after(10), phase="collective", steps=1) == 3_000
    assert timeout_ms(300.0, after(10), phase="start", steps=0) == 900_000


def test_a_fixed_time_counts_as_it_is() -> None:
    phases: tuple[Phase, ...] = ("user", "forward", "backward", "optimizer", "collective", "loader", "checkpoint_io")
    for phase in phases:
        assert timeout_ms(3.0, after(50_000), phase=phase) == 3_000


def test_a_stopped_process_compiles_nothing() -> None:
    assert timeout_ms(3.0, History(), phase="start", steps=0, stopped=True) == 3_000
    assert timeout_ms("auto", History(), phase="start", steps=0, stopped=True) == 600_000


@pytest.mark.parametrize("phase", PHASES)
def test_only_its_own_work_teaches(phase: Phase) -> None:
    assert teaches(phase, stopped=False) == (phase not in ("collective", "checkpoint_io"))
    assert not teaches(phase, stopped=True)


def test_quiet_grows_while_nothing_moves_and_ends_with_an_event() -> None:
    quiet = Quiet()
    assert quiet.saw(7, 900, 1_000) == 0
    for now_ms in range(1_250, 3_001, 250):
        assert quiet.saw(7, 900, now_ms) == 0
    assert quiet.quiet_ms == 2_000
    assert quiet.saw(8, 3_050, 3_250) == 2_000
    assert quiet.quiet_ms == 200


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The host slept for an hour, the worker with it."""
    quiet = Quiet()
    quiet.saw(7, 1_000, 1_000)
    quiet.saw(7, 1_000, 3_601_000)
    assert quiet.quiet_ms == Quiet.MAX_TURN_MS


def test_an_event_of_long_ago_is_no_quiet_that_was_seen() -> None:
    quiet = Quiet()
    quiet.saw(7, 1_000, 3_601_000)
    assert quiet.quiet_ms == 0
    quiet.saw(9, 1_500, 3_601_250)
    assert quiet.quiet_ms == 250
