"""Transcripts of decisions after alarms, sick hosts and what detectors have found: as in ``test_decisions``."""

from collections.abc import Callable

import pytest

from tests.golden.story import Story, started

LOST = ("torch.distributed.DistBackendError", "Connection closed by peer [10.0.0.98]:41234")


def watched(**settings: object) -> Story:
    story = started(**settings)  # type: ignore[arg-type]
    story.watched = True
    return story


def hang_of_a_stopped_worker() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.looks("a", alarm=True).waits()
    story.looks("b", entered=9, phase="user", state="T").waits()
    story.looks("c").commits()
    return story


def hang_again_moves_the_slot() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.looks("a", alarm=True).looks("b", entered=9, phase="loader").looks("c").commits()
    story.forms()
    story.looks("a", alarm=True, step=12).looks("b", entered=9, phase="loader", step=12).looks("c", step=12).commits()
    return story


def hang_of_everybody_blames_nobody() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.looks("a", alarm=True).looks("b", alarm=True).looks("c").commits()
    return story


def hang_and_one_does_not_tell() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.looks("a", alarm=True).looks("b").waits()
    story.commits(unlooked=frozenset("c"))
    return story


def hang_alarm_is_withdrawn() -> Story:
    story = watched(nodes="abc")
    story.looks("a", alarm=True).waits()
    story.looks("b").looks("a", quiet_ms=10).waits()
    story.looks("c", quiet_ms=20).waits()
    return story


def hang_second_alarm_is_not_judged_by_what_was_seen_before() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.looks("a", alarm=True).looks("b", entered=9, phase="user").looks("c").looks("a", quiet_ms=10).waits()
    story.looks("a", alarm=True, entered=30, step=17).waits()
    story.looks("c", entered=30, step=17).commits(unlooked=frozenset("b"))
    return story


def hang_alarm_of_one_that_ended_well() -> Story:
    story = watched(nodes="abc")
    story.looks("a", alarm=True, entered=9, phase="user").waits()
    story.succeeds("a").looks("b").looks("c").waits()
    return story


def desync_is_asked_for_anew_after_an_old_look() -> Story:
    story = watched(nodes="abc")
    story.looks("a", alarm=True).looks("b").looks("c").looks("a", quiet_ms=10).waits()
    story.raises("a", *LOST, step=17).waits()
    return story


def hang_and_then_the_crash_that_caused_it() -> Story:
    story = watched(nodes="abc")
    story.looks("a", alarm=True).waits()
    story.exits("b", -9, step=7).commits()
    return story


def hang_of_one_that_may_be_slow() -> Story:
    story = watched(nodes="abc")
    story.looks("a", alarm=True).looks("b", entered=9, phase="checkpoint_io", quiet_ms=500).looks("c").waits()
    return story


def hang_with_state() -> Story:
    story = watched(nodes="abc", standbys="d", checkpointing=True)
    story.looks("a", alarm=True).looks("b", entered=9, phase="user", state="T").looks("c").waits()
    story.holds("a", "0@7/1").holds("b", "1@7/1").holds("c", "2@7/1").holds("d").commits()
    return story


def desync_behind_a_broken_connection() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.raises("a", *LOST, step=7).waits()
    story.looks("a").looks("b", shape="float32[9]").looks("c").commits()
    return story


def desync_of_two_is_inconclusive() -> Story:
    story = watched()
    story.exits("a", -6, step=7).looks("a").looks("b", shape="float32[9]").commits()
    return story


def broken_connection_without_desync() -> Story:
    story = watched()
    story.exits("b", 1, step=7).looks("a").looks("b").commits()
    return story


def unhealthy_node_is_replaced() -> Story:
    story = watched(standbys="c")
    story.health("b", "the command said: NVLink down").commits()
    return story


def unhealthy_node_without_standby_trains_on() -> Story:
    story = watched()
    story.health("b", "disk: 40 MB free").waits()
    story.health("b").waits()
    return story


def unhealthy_standby_is_not_chosen() -> Story:
    story = watched(standbys="cd")
    story.health("c", "ECC errors").goes("b").commits()
    return story


def unhealthy_before_the_start() -> Story:
    story = Story()
    story.joins("a", "b").health("a", "no link").waits()
    story.joins("c").commits()
    return story


def straggler_is_reported() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.finds("a", "straggler", "b", "2.1 times slower in its loader", reaction="report").waits()
    return story


def straggler_is_replaced() -> Story:
    story = watched(nodes="abc", standbys="d")
    story.finds("a", "straggler", "b", "2.1 times slower in compute", reaction="replace").commits()
    return story


def corruption_is_evicted_and_rolled_back() -> Story:
    story = watched(nodes="abc", standbys="d", checkpointing=True)
    story.finds("a", "silent_corruption", "b", "its parameters differ at step 9", evict=True, trusted=(8, 1))
    for slot, node in enumerate("abc"):
        story.holds(node, f"{slot}@8/1", f"{slot}@9/1", ddp=True)
    story.holds("d", "1@8/1", "1@9/1", ddp=True).commits()
    return story


def corruption_of_one_of_two_evicts_nobody() -> Story:
    story = watched(standbys="c", checkpointing=True)
    story.finds("a", "silent_corruption", None, "ranks 0 and 1 differ at step 9", attributed=False, trusted=(8, 1))
    story.holds("a", "0@8/1", "0@9/1").holds("b", "1@8/1", "1@9/1").holds("c").commits()
    return story


def corruption_and_nothing_is_trusted() -> Story:
    story = watched(nodes="abc", checkpointing=True)
    story.finds("a", "silent_corruption", "b", "its computation differs", evict=True, trusted=(0, 0))
    for slot, node in enumerate("abc"):
        story.holds(node, f"{slot}@8/1")
    story.commits()
    return story


def corruption_in_files_is_not_taken_later() -> Story:
    story = watched(nodes="ab", checkpointing=True)
    story.finds("a", "silent_corruption", "b", "its parameters differ", evict=True, trusted=(8, 1))
    story.holds("a", "0@8/1", "0@9/1", files="0@9/1 1@9/1").holds("b", "1@8/1", "1@9/1").commits()
    story.forms()
    story.exits("b", -9, step=8)
    story.holds("a", "0@8/1", files="0@9/1 1@9/1").holds("b", "1@8/1", files="0@9/1 1@9/1").commits()
    return story


def corruption_from_the_start_and_then_a_crash() -> Story:
    story = watched(nodes="ab", checkpointing=True)
    story.finds("a", "silent_corruption", "b", "its computation differs", trusted=(0, 0))
    story.holds("a", files="0@9/1 1@9/1").holds("b", files="0@9/1 1@9/1").commits()
    story.forms()
    story.exits("b", -9, step=2)
    story.holds("a", files="0@9/1 1@9/1").holds("b", files="0@9/1 1@9/1").commits()
    return story


def unhealthy_node_and_no_state_is_left() -> Story:
    story = watched(standbys="c", checkpointing=True)
    story.health("b", "ECC errors").stands("a", problem="rank 0 is not protected")
    story.holds("a", ever=True).holds("b", ever=True).holds("c").waits()
    return story


def unhealthy_node_and_no_state_is_kept() -> Story:
    story = watched(standbys="c")
    story.health("b", "gpu: lost").waits(step=40)
    story.exits("a", -9, step=41).commits(step=41)
    return story


def unhealthy_node_that_has_no_restarts_left() -> Story:
    story = watched(nodes="abc", standbys="de", node_strikes=1)
    story.forms(restarts_left={"b": 0}).health("b", "gpu: lost").exits("b", -9, step=9).commits()
    return story


STORIES: tuple[Callable[[], Story], ...] = tuple(
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not name.startswith("test_")
    and name != "watched"
)


@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.__name__)
def test_detection(story: Callable[[], Story], golden: Callable[[str, str], None]) -> None:
    golden(story.__name__, story().transcript())
