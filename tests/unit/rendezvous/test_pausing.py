"""Where workers are to stand still: from what each node has told."""

from __future__ import annotations

import pytest

from lmres.rendezvous.decide import Commit, Wait
from lmres.rendezvous.pausing import MAX_PAUSE_MS, NEXT_BOUNDARY, PAUSE_MS, allowed_ms, is_possible, moving, target
from tests.golden.story import Story, started


def group() -> Story:
    return started(nodes="abc", standbys="d", checkpointing=True)


def test_the_next_boundary_until_all_have_told() -> None:
    story = group().stands("a", reach=9).stands("b", reach=7)
    assert target(story.view, story.head()) == NEXT_BOUNDARY
    assert moving(story.view, story.head()) == ("a", "b", "c")


def test_then_the_furthest_that_anybody_may_come() -> None:
    story = group().stands("a", reach=9).stands("b", reach=7).stands("c", 8)
    assert target(story.view, story.head()) == 9
    assert moving(story.view, story.head()) == ("a", "b", "c"), "to stand at another step is not enough"
    story.stands("a", 9).stands("c", 9, reach=8)
    assert moving(story.view, story.head()) == ("b",)


def test_a_later_step_when_one_can_not_save_before() -> None:
    story = group().stands("a", 9).stands("b", 9).stands("c", 9)
    assert moving(story.view, story.head()) == ()
    story.stands("b", reach=12)
    assert target(story.view, story.head()) == 12
    assert moving(story.view, story.head()) == ("a", "b", "c")


def test_who_has_gone_or_is_done_has_no_workers_to_wait_for() -> None:
    story = group().stands("a", 9).stands("b", 9)
    story.succeeds("c")
    assert (target(story.view, story.head()), moving(story.view, story.head())) == (9, ())
    other = group().stands("a", 9).stands("b", 9).goes("c")
    assert moving(other.view, other.head()) == ()


def test_what_an_earlier_incarnation_told_does_not_count() -> None:
    story = group().stands("a", 9).stands("b", 9).stands("c", 9)
    story.joins("c")
    assert moving(story.view, story.head()) == ()
    assert target(story.view, story.head()) == 9, "its workers are gone with it"


def test_nobody_pauses_before_the_group_has_formed_or_when_one_can_not() -> None:
    story = Story(min_nodes=2, checkpointing=True).joins("a", "b").holds("a").holds("b")
    story.commits()
    assert not is_possible(story.view, story.head())
    story.forms()
    assert is_possible(story.view, story.head())
    story.stands("a", reach=3, problem="rank 0 is not protected")
    assert not is_possible(story.view, story.head())


@pytest.mark.parametrize(
    ("generation_ms", "steps", "allowed"),
    [
        (60_000, 600, PAUSE_MS),
        (600_000, 100, 18_000),
        (10_000_000, 10, MAX_PAUSE_MS),
        (60_000, 0, PAUSE_MS),
        (60_000, -5, PAUSE_MS),
    ],
)
def test_slow_steps_are_given_longer(generation_ms: int, steps: int, allowed: int) -> None:
    assert allowed_ms(generation_ms, steps) == allowed


def test_without_states_there_is_nothing_to_save() -> None:
    story = started(standbys="c").operator("drain", "b")
    assert isinstance(story.decides(), Commit)


def test_workers_stand_until_the_plan_is_written() -> None:
    story = started(standbys="c", checkpointing=True).operator("drain", "b")
    assert story.waits().pause
    story.stands("a", 7).stands("b", 7)
    told = story.waits()
    assert told.pause and told.freeze
    story.holds("a", "0@7/1").holds("b", "1@7/1").holds("c")
    decision = story.decides()
    assert isinstance(decision, Commit) and decision.pause


def test_nobody_stands_still_for_want_of_a_standby_or_after_a_failure() -> None:
    story = started(checkpointing=True).operator("drain", "b")
    assert not story.waits().pause
    failed = started(standbys="c", checkpointing=True).operator("drain", "b").exits("a", -9, step=3)
    decision = failed.decides()
    assert isinstance(decision, Wait) and decision.freeze and not decision.pause
