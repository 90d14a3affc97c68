"""What the records of health make of a group: unfit nodes are replaced when that can be done, and not chosen."""

from __future__ import annotations

from lmres.rendezvous.decide import Wait
from tests.golden.story import Story, started


def test_an_unfit_active_node_is_replaced_and_put_aside() -> None:
    plan = started(standbys="c").health("b", "disk: the file system is read-only").commits()
    assert (plan.action, plan.failure_class) == ("replace", "node_unhealthy")
    assert plan.active_map() == {"0": "a", "1": "c"}
    assert [q.node_id for q in plan.quarantined] == ["b"]
    assert "read-only" in plan.quarantined[0].reason and plan.charged == ()


def test_an_unfit_node_is_not_struck_and_costs_no_restart() -> None:
    plan = started(standbys="c", node_strikes=1).health("b", "gpu: lost").commits()
    assert plan.strikes == () and plan.charged == () and plan.streak.count == 0


def test_without_a_standby_it_trains_on() -> None:
    story = started().health("b", "memory: low")
    assert "training goes on" in story.waits().reason
    story.health("b")
    assert "is running" in story.waits().reason


def test_an_unfit_standby_does_not_take_over() -> None:
    story = started(standbys="cd").health("c", "gpu: lost").goes("b")
    assert story.commits().active_map() == {"0": "a", "1": "d"}


def test_the_last_standby_is_not_chosen_either_until_it_is_fit() -> None:
    story = started(standbys="c").health("c", "gpu: lost").goes("b")
    assert story.waits().for_standby
    story.health("c")
    assert story.commits().active_map() == {"0": "a", "1": "c"}


def test_who_is_unfit_when_the_run_starts_is_not_among_the_first() -> None:
    story = Story(min_nodes=2).joins("a", "b").health("a", "network: eth0 has lost its carrier")
    waits = story.waits()
    assert "lost its carrier" in waits.reason
    assert set(story.joins("c").commits().active_map().values()) == {"b", "c"}


def test_two_unfit_nodes_and_one_standby() -> None:
    story = started(nodes="abc", standbys="d").health("a", "gpu: lost").health("b", "gpu: lost")
    plan = story.commits()
    assert plan.active_map() == {"0": "d", "1": "b", "2": "c"}
    assert "keeps slot 1 for want of a standby" in plan.reason


def test_what_an_earlier_incarnation_said_of_itself_does_not_count() -> None:
    story = started(standbys="c").health("c", "gpu: lost")
    story.joins("c").goes("b")
    assert story.commits().active_map() == {"0": "a", "1": "c"}


def test_a_crash_of_the_unfit_nodes_worker_replaces_it_at_once() -> None:
    story = started(standbys="c").health("b", "gpu: lost").exits("b", -9, step=3)
    plan = story.commits()
    assert plan.active_map() == {"0": "a", "1": "c"} and plan.failure_class == "process_crash"
    assert [q.node_id for q in plan.quarantined] == ["b"]


def test_a_readmitted_node_that_is_still_unfit_is_not_chosen() -> None:
    story = started(standbys="c").health("b", "gpu: lost")
    story.commits()
    story.forms().operator("readmit", "b").goes("a")
    assert isinstance(story.decides(), Wait)
    story.health("b")
    assert story.commits().active_map() == {"0": "b", "1": "c"}


def unfit_with_states(*held: str, **finds: object) -> Story:
    """The group can not stand still, so the vaults are asked at once."""
    story = started(standbys="c", checkpointing=True).health("b", "gpu: lost")
    story.stands("a", problem="rank 0 is not protected")
    return story.holds("a", *held[:1]).holds("b", *held[1:]).holds("c")


def test_it_is_not_replaced_where_all_steps_would_be_lost() -> None:
    kept = unfit_with_states("0@7/1", "1@7/1")
    assert kept.commits(step=8).recovery_step == 7
    lost = unfit_with_states().waits(step=8)
    assert (
        lost.vain == "node_unhealthy b"
        and "all 8 steps would be made again" in lost.reason
        and "training goes on" in lost.reason
    )
    assert unfit_with_states().commits(step=0).action == "replace"


def test_nobody_is_asked_to_stand_still_or_to_tell_again_at_once_after_that() -> None:
    again = unfit_with_states("0@7/1", "1@7/1").waits(step=8, vain="node_unhealthy b")
    assert not again.vain and not again.freeze and not again.pause and "training goes on" in again.reason


def test_a_drain_is_tried_though_another_replacement_was_given_up() -> None:
    story = unfit_with_states().operator("drain", "b")
    assert story.commits(step=8, vain="node_unhealthy b").failure_class == "drain"


def test_without_states_it_is_not_replaced_once_steps_have_been_made() -> None:
    story = started(standbys="c").health("b", "gpu: lost")
    waits = story.waits(step=3)
    assert "all 3 steps would be made again" in waits.reason and not waits.freeze and not waits.pause
    assert started(standbys="c").health("b", "gpu: lost").commits().action == "replace"


def test_a_slow_node_is_not_replaced_at_that_price_either_but_one_that_is_drained_is() -> None:
    slow = started(nodes="abc", standbys="d").finds("a", "straggler", "b", "slow in compute", reaction="replace")
    assert "training goes on" in slow.waits(step=3).reason
    assert started(standbys="c").operator("drain", "b").commits(step=3).failure_class == "drain"


def test_a_failure_replaces_it_whatever_is_lost() -> None:
    story = started(standbys="c").health("b", "gpu: lost").exits("a", -9, step=3)
    assert story.commits(step=3).active_map() == {"0": "a", "1": "c"}


def test_two_reasons_to_leave_one_slot_take_one_standby() -> None:
    plan = started(standbys="cd", node_strikes=1).health("b", "gpu: lost").exits("b", -9, step=3).commits()
    assert plan.active_map() == {"0": "a", "1": "c"} and plan.standby == ("d",)
    assert [q.node_id for q in plan.quarantined] == ["b"]
    assert plan.reason.count("slot 1 goes from b") == 1


def test_one_that_is_dismissed_and_unfit_is_both() -> None:
    story = started(standbys="cd").forms(restarts_left={"b": 0}).health("b", "gpu: lost").exits("b", -9, step=3)
    plan = story.commits()
    assert plan.active_map() == {"0": "a", "1": "c"} and plan.standby == ("d",)
    assert list(plan.dismissed) == ["b"] and [q.node_id for q in plan.quarantined] == ["b"]
    assert "no restarts left" in plan.reason and "unhealthy" not in plan.reason


def test_one_that_is_dismissed_and_unfit_without_a_standby_ends_the_run() -> None:
    story = started().forms(restarts_left={"b": 0}).health("b", "gpu: lost").exits("b", -9, step=3)
    assert story.commits().action == "stop"
