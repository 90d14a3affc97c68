"""Transcripts of decisions: the records, the plan, the reason. Reviewed as text, under ``decisions/``."""

from collections.abc import Callable

import pytest

from tests.golden.story import Story, started

LOST = ("torch.distributed.DistBackendError", "Connection closed by peer [10.0.0.98]:41234")


def start() -> Story:
    story = Story(min_nodes=3)
    story.joins("a", "b").waits()
    story.joins("c", "d").commits()
    story.waits()
    return story


def killed_worker_restarts_in_place() -> Story:
    story = started(standbys="c")
    story.exits("b", -9, step=7).commits()
    return story


def second_strike_moves_the_slot() -> Story:
    story = started(standbys="c")
    story.exits("b", -9, step=7).commits()
    story.forms().exits("b", -11, step=9).commits()
    return story


def second_strike_without_standby_keeps_the_slot() -> Story:
    story = started()
    story.exits("b", -9, step=7).commits()
    story.forms().exits("b", -11, step=9).commits()
    return story


def lost_node_is_replaced() -> Story:
    story = started(standbys="c")
    story.goes("a").commits()
    return story


def two_lost_nodes_one_plan() -> Story:
    story = started(nodes="abc", standbys="de")
    story.goes("a").goes("c").commits()
    return story


def lost_node_waits_for_a_standby() -> Story:
    story = started()
    story.goes("a").waits()
    story.joins("c").commits()
    return story


def lost_node_waited_too_long() -> Story:
    story = started()
    story.goes("a").waits()
    story.commits(wait_over=True)
    return story


def lost_node_and_no_standby_fails() -> Story:
    story = started(on_no_standby="fail")
    story.goes("a").commits()
    return story


def told_to_leave() -> Story:
    story = started(standbys="c")
    story.goes("a", how="left", planned=True).commits()
    return story


def drained_by_the_operator() -> Story:
    story = started(standbys="c")
    story.operator("drain", "b").commits()
    story.forms().waits()
    story.operator("readmit", "b").waits()
    return story


def drained_without_standby_trains_on() -> Story:
    story = started()
    story.operator("drain", "b").waits()
    story.joins("c").commits()
    return story


def standby_lost_is_no_reason() -> Story:
    story = started(standbys="cd")
    story.goes("c").waits()
    story.joins("e").waits()
    return story


def first_cause_before_its_consequence() -> Story:
    story = started(standbys="c")
    story.raises("a", *LOST, step=12, at_ms=10)
    story.raises("b", "ValueError", "loss is nan", step=12, at_ms=0)
    story.commits()
    return story


def on_one_host_its_clock_decides() -> Story:
    story = started()
    story.exits("a", -9, step=4, at_ms=1010, boot="same")
    story.exits("b", -9, step=4, at_ms=1000, boot="same")
    story.commits()
    return story


def only_broken_connections() -> Story:
    story = started(nodes="abc", standbys="d")
    story.raises("a", *LOST, step=5)
    story.waits(unconfirmed=frozenset("bc"))
    story.raises("b", *LOST, step=5)
    story.waits(unconfirmed=frozenset("c"))
    story.commits()
    return story


def broken_connections_and_then_the_loss() -> Story:
    story = started(nodes="abc", standbys="d")
    story.raises("a", *LOST, step=5)
    story.waits(unconfirmed=frozenset("c"))
    story.goes("c").commits(unconfirmed=frozenset("c"))
    return story


def broken_connections_again_and_again() -> Story:
    story = started()
    for port in (41234, 50001):
        story.raises("a", LOST[0], f"Connection closed by peer [10.0.0.98]:{port}", step=5).commits()
        story.forms()
    story.raises("b", "RuntimeError", "Broken pipe", step=5).commits()
    return story


def exit_code_one_is_ambiguous() -> Story:
    story = started(standbys="c")
    story.exits("b", 1, step=3)
    story.waits(unconfirmed=frozenset("a"))
    story.commits()
    return story


def no_restarts_left_is_dismissed() -> Story:
    story = Story(min_nodes=2)
    story.joins("a", "b", "c").commits()
    story.forms(restarts_left={"a": 0, "b": 0}).exits("b", -9, step=7).commits()
    story.forms(restarts_left={"a": 0, "c": 0}).waits()
    return story


def no_restarts_left_and_no_standby_stops() -> Story:
    story = Story(min_nodes=2)
    story.joins("a", "b").commits()
    story.forms(restarts_left={"a": 0, "b": 0}).raises("b", "ValueError", "loss is nan", step=7).commits()
    story.waits()
    return story


def same_exception_at_the_same_step() -> Story:
    story = started(standbys="c")
    for _ in range(2):
        story.raises("b", "ValueError", "bad sample 17", step=41).commits()
        story.forms()
    story.raises("b", "ValueError", "bad sample 17", step=41).commits()
    return story


def same_exception_after_progress_goes_on() -> Story:
    story = started()
    for step in (41, 42, 43, 44):
        story.raises("b", "ValueError", "bad sample", step=step).commits()
        story.forms()
    return story


def returning_node_keeps_its_slot() -> Story:
    story = started()
    story.goes("b").waits()
    story.joins("c").decides()
    story.joins("b").commits()
    return story


def restarted_agent_takes_its_slot_back() -> Story:
    story = started(standbys="c")
    story.joins("b").commits()
    return story


def quarantined_until_readmitted() -> Story:
    story = started(standbys="c", node_strikes=1)
    story.exits("b", -9, step=7).commits()
    story.forms().goes("a").waits()
    story.operator("readmit", "b").commits()
    return story


def quarantined_node_comes_back_new_and_stays_aside() -> Story:
    story = started(standbys="c", node_strikes=1)
    story.exits("b", -9, step=7).commits()
    story.forms().goes("b").joins("b").goes("a").waits()
    return story


def one_node_two_detectors() -> Story:
    story = started(standbys="cd")
    story.exits("b", -9, step=7)
    story.goes("b").commits()
    story.forms().waits()
    return story


def late_crash_after_others_have_ended() -> Story:
    story = started()
    story.succeeds("a").waits()
    story.exits("b", -9, step=7).commits()
    story.forms().succeeds("a", "b").decides()
    return story


def ended_node_may_leave() -> Story:
    story = started()
    story.succeeds("a").goes("a", how="left", planned=True).waits()
    story.succeeds("b").decides()
    return story


def ended_node_left_and_the_other_is_drained() -> Story:
    story = started()
    story.succeeds("a").goes("a", how="left", planned=True)
    story.operator("drain", "b").waits()
    return story


def operator_stops_the_run() -> Story:
    story = started()
    story.operator_stops().commits()
    story.waits()
    return story


def operator_stops_before_the_start() -> Story:
    story = Story(min_nodes=2)
    story.joins("a").operator_stops().decides()
    return story


def late_node_is_unfit() -> Story:
    story = started(standbys="c")
    story.exits("a", -9, step=7).commits()
    story.decides(late=frozenset("b"))
    return story


def late_node_becomes_ready_after_all() -> Story:
    story = started()
    story.exits("a", -9, step=7).commits()
    story.waits(late=frozenset("b"))
    story.forms().waits()
    return story


def silent_standby_comes_last() -> Story:
    story = started(standbys="cd")
    story.goes("a").commits(silent=frozenset("c"))
    return story


def garbage_instead_of_the_next_plan() -> Story:
    story = started(standbys="c")
    story.garbage(story.keys.plan(2), '{"record":"Plan","generation":2').waits()
    story.goes("b").commits()
    return story


def plan_of_another_generation_under_the_next_key() -> Story:
    story = started(standbys="c")
    other = story.view.stored[story.keys.plan(1)]
    story.put(story.keys.plan(2), other.record)
    story.lines.append("the plan of generation 1 stands under the key of generation 2")
    story.waits()
    return story


# -- which state the next generation goes on from ---------------------------------------------------------------------


def state_begins_at_the_start() -> Story:
    story = Story(min_nodes=2, checkpointing=True)
    story.joins("a", "b").waits()
    story.holds("a").waits()
    story.holds("b", problem="too little memory: 8.0 GB are needed, 4.1 GB may be used").commits()
    return story


def state_restored_in_place() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7).waits()
    story.holds("a", "0@6/1", "0@7/1").waits()
    story.holds("b", "1@6/1", "1@7/1").commits()
    return story


def state_from_a_peer_after_the_loss_of_a_node() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.goes("b").waits()
    story.holds("a", "0@7/1", "1@7/1").holds("c").commits()
    return story


def state_from_live_replicas() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.goes("b")
    story.holds("a", "0@7/1", "1@7/1+own+log", ddp=True).holds("c").commits()
    return story


def state_of_an_older_common_step() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7)
    story.holds("a", "0@6/1", "0@7/1").holds("b", "1@6/1").commits()
    return story


def state_never_mixes_origins() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7).holds("a", "0@6/1", "0@7/1").holds("b", "1@6/1", "1@7/1").commits()
    story.forms().exits("b", -9, step=8)
    story.holds("a", "0@7/1", "0@8/1").holds("b", "1@7/1", "1@8/2").commits()
    return story


def state_only_in_files() -> Story:
    story = started(nodes="ab", standbys="cd", checkpointing=True)
    story.goes("a").goes("b")
    story.holds("c", files="0@100/1 1@100/1").holds("d", files="0@100/1 1@100/1").commits()
    return story


def state_found_in_files_by_a_new_run() -> Story:
    story = Story(min_nodes=2, checkpointing=True)
    story.joins("a", "b").holds("a", files="0@100/3 1@100/3").holds("b", files="0@100/3 1@100/3").commits()
    return story


def state_of_an_earlier_run_in_pieces() -> Story:
    story = Story(min_nodes=2, checkpointing=True)
    story.joins("a", "b").holds("a", "0@100/3").holds("b").commits()
    return story


def state_lost() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.goes("b")
    story.holds("a", "0@6/1", "0@7/1").holds("c").commits()
    return story


def state_lost_in_all_vaults() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    story.forms().exits("b", -9, step=9).holds("a").holds("b").commits()
    return story


def state_never_captured() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=1).holds("a", "0@1/1", ever=False).holds("b").commits()
    return story


def state_banned() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7).holds("a", "0@6/1", "0@7/1").holds("b", "1@6/1", "1@7/1").commits()
    story.forms().raises("b", "ValueError", "loss is nan", step=8).bans(7, 1)
    story.holds("a", "0@6/1", "0@7/1").holds("b", "1@6/1", "1@7/1").commits()
    return story


def state_not_finite() -> Story:
    story = started(checkpointing=True)
    story.raises("b", "ValueError", "loss is nan", step=7)
    story.holds("a", "0@6/1", "0@7/1").holds("b", "1@6/1", "1@7/1", spoilt="1@7/1").commits()
    return story


def state_of_another_topology() -> Story:
    story = Story(min_nodes=2, checkpointing=True)
    files = "0@100/1 1@100/1 2@100/1 3@100/1"
    story.joins("a", "b").holds("a", files=files, nodes=4).holds("b", files=files, nodes=4).decides()
    return story


def state_told_too_late() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.exits("b", -9, step=7).holds("b", "0@6/1", "1@6/1").waits()
    story.waits(silent=frozenset("c"))
    story.commits(silent=frozenset("c"), overdue=frozenset("a"))
    return story


def state_told_by_an_earlier_incarnation() -> Story:
    story = started(checkpointing=True)
    story.joins("b").holds("a", "0@7/1")
    story.holds("b", "1@7/1", incarnation="b.1").waits()
    story.holds("b", "1@7/1").commits()
    return story


def state_told_in_an_earlier_generation() -> Story:
    story = started(checkpointing=True)
    story.exits("b", -9, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    story.forms().exits("b", -9, step=9).waits()
    return story


def state_told_before_the_group_formed() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.exits("a", -9, step=7)
    story.holds("a", "0@7/1").holds("b", "1@7/1").holds("c").commits()
    story.holds("a", "0@7/1").holds("b", "1@7/1").holds("c")
    story.forms().exits("a", -9, step=12).waits()
    return story


def state_of_a_drained_node() -> Story:
    story = started(checkpointing=True)
    story.operator("drain", "b").waits()
    story.joins("c").waits()
    story.stands("a", reach=7).stands("b", reach=6).waits()
    story.stands("b", 7).stands("a", 7).waits()
    story.holds("a", "0@7/1").holds("b", "1@7/1").holds("c").commits()
    return story


def state_of_a_drained_node_whose_workers_do_not_stand_still() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.operator("drain", "b").stands("a", reach=7).waits()
    story.waits(unpaused=True)
    story.holds("a", "0@6/1").holds("b", "1@6/1").holds("c").commits(unpaused=True)
    return story


def state_of_a_drained_node_whose_worker_is_not_protected() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.operator("drain", "b").stands("a", reach=7, problem="rank 0 is not protected").waits()
    story.holds("a", "0@6/1").holds("b", "1@6/1").holds("c").commits()
    return story


def state_of_a_drained_node_that_fails_meanwhile() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.operator("drain", "b").stands("a", 7).stands("b", reach=7).waits()
    story.exits("a", -9, step=7).waits()
    story.holds("a", "0@7/1").holds("b", "1@6/1").holds("a", "0@7/1", "0@6/1").holds("c").commits()
    return story


def state_of_a_drained_node_that_is_readmitted_meanwhile() -> Story:
    story = started(standbys="c", checkpointing=True)
    story.operator("drain", "b").stands("a", reach=7).waits()
    story.operator("readmit", "b").waits()
    return story


def state_advances_and_the_failure_is_another() -> Story:
    story = started(checkpointing=True, no_progress_limit=2)
    story.raises("b", "ValueError", "bad luck").holds("a", "0@7/1").holds("b", "1@7/1").commits(generation_ms=9000)
    story.forms().raises("b", "ValueError", "bad luck").holds("a", "0@9/2").holds("b", "1@9/2").commits()
    story.forms().raises("b", "ValueError", "bad luck").holds("a", "0@9/2").holds("b", "1@9/2").commits()
    return story


def state_is_restored_and_the_step_stays_too_large() -> Story:
    oom = ("torch.OutOfMemoryError", "CUDA out of memory")
    story = started(checkpointing=True)
    story.raises("b", *oom, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    story.forms().raises("b", *oom, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    story.forms().raises("b", *oom, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    return story


STORIES: tuple[Callable[[], Story], ...] = tuple(
    value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("test_")
)


@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.__name__)
def test_decision(story: Callable[[], Story], golden: Callable[[str, str], None]) -> None:
    golden(story.__name__, story().transcript())
