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
