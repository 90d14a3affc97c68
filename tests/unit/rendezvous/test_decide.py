"""Single rules of ``decide``; whole stories with their reasons are under ``tests/golden``."""

import pytest

from lmres.rendezvous.decide import Commit, Finish, Observed, Wait, decide
from lmres.rendezvous.plan import Cause
from tests.golden.story import Story, started

BROKEN = ("ConnectionResetError", "[Errno 104] Connection reset by peer")


def unhealthy(story: Story, node: str) -> Cause:
    return Cause(
        failure_class="node_unhealthy",
        node_id=node,
        incarnation=story.incarnation(node),
        host=f"host-{node}",
        detail="disk is full",
    )


def test_nothing_without_configuration() -> None:
    story = Story()
    story.view.stored.clear()
    assert isinstance(story.decides(), Wait)


def test_the_first_to_register_are_active() -> None:
    story = Story(min_nodes=2).joins("c", "a", "b")
    plan = story.commits()
    assert plan.active_map() == {"0": "c", "1": "a"}
    assert plan.standby == ("b",)


def test_a_finished_run_decides_nothing() -> None:
    story = started(standbys="c").goes("a").ends("succeeded")
    assert isinstance(story.decides(), Wait)


def test_success_needs_the_incarnations_of_the_plan() -> None:
    story = started()
    story.succeeds("a", "b")
    assert isinstance(story.decides(), Finish)
    other = started()
    other.joins("b")  # the agent was started anew: what the new one says is not about the plan's node
    other.succeeds("a", "b")
    assert not isinstance(other.decides(), Finish)


def test_only_the_first_cause_is_charged() -> None:
    story = started()
    story.exits("a", -9, step=3).exits("b", -9, step=3)
    assert story.commits().charged == ("a",)


def test_a_replaced_node_is_not_charged() -> None:
    story = started(standbys="c", node_strikes=1)
    plan = story.exits("a", -9, step=3).commits()
    assert plan.charged == ()
    assert [q.node_id for q in plan.quarantined] == ["a"]
    assert plan.active_map() == {"0": "c", "1": "b"}


def test_an_exception_of_the_program_is_no_strike() -> None:
    story = started(standbys="c", node_strikes=1)
    plan = story.raises("a", "ValueError", "loss is nan", step=3).commits()
    assert plan.strikes == ()
    assert plan.active_map() == {"0": "a", "1": "b"}
    assert plan.charged == ("a",)


def test_old_strikes_are_forgotten_on_the_clock_of_the_run() -> None:
    story = started(standbys="c", strikes_window_s=60.0)
    story.exits("b", -9, step=3).commits(generation_ms=1_000)
    plan = story.forms().exits("b", -9, step=9).commits(generation_ms=61_001)
    assert plan.run_ms == 62_001
    assert len(plan.strikes) == 1
    assert plan.action == "restart"


@pytest.mark.parametrize("unconfirmed", ["b", "bc"])
def test_no_blame_before_the_others_are_heard_from(unconfirmed: str) -> None:
    story = started(nodes="abc", standbys="d").exits("a", 1)
    assert "not yet heard from" in story.waits(unconfirmed=frozenset(unconfirmed)).reason


def test_a_drained_node_must_be_heard_from_too() -> None:
    story = started(nodes="abc", standbys="d").operator("drain", "c").exits("a", 1)
    story.waits(unconfirmed=frozenset("c"))


def test_a_primary_witness_need_not_wait() -> None:
    story = started(nodes="abc").exits("a", -9)
    assert story.commits(unconfirmed=frozenset("bc")).charged == ("a",)


def test_broken_connections_evict_and_charge_nobody() -> None:
    story = started(standbys="c", node_strikes=1).raises("a", *BROKEN, step=1).raises("b", *BROKEN, step=1)
    plan = story.commits()
    assert (plan.verdict, plan.charged, plan.strikes, plan.quarantined, plan.dismissed) == (
        "inconclusive",
        (),
        (),
        (),
        {},
    )
    assert plan.active_map() == {"0": "a", "1": "b"}


def test_ambiguous_exits_on_two_nodes_are_not_clear() -> None:
    story = started(standbys="c", node_strikes=1).exits("a", 1, step=3).exits("b", 1, step=3)
    plan = story.commits()
    assert plan.verdict == "inconclusive"
    assert plan.strikes == ()
    assert plan.quarantined == ()


def test_an_unfit_node_leaves_at_once_and_stays_aside() -> None:
    story = started(standbys="c")
    story.sees("a", unhealthy(story, "a"), weight="primary", fit=False)
    plan = story.commits()
    assert plan.active_map() == {"0": "c", "1": "b"}
    assert [q.node_id for q in plan.quarantined] == ["a"]
    assert plan.charged == ()


def test_hard_vacancies_are_filled_before_soft_ones() -> None:
    story = started(nodes="abc", standbys="d").operator("drain", "a").goes("c")
    plan = story.commits()
    assert plan.active_map() == {"0": "a", "1": "b", "2": "d"}
    assert "a keeps slot 0 for want of a standby" in plan.reason


def test_a_node_never_holds_two_slots() -> None:
    story = started(nodes="ab")
    story.goes("a").joins("a")
    assert story.commits().active_map() == {"0": "a", "1": "b"}


def test_spares_of_another_failure_domain_come_first() -> None:
    story = Story(min_nodes=2)
    story.joins("a", domain="rack1").joins("b", domain="rack2")
    story.joins("c", domain="rack1").joins("d", domain="rack3")
    story.commits()
    story.forms().goes("a")
    assert story.commits().active_map() == {"0": "d", "1": "b"}


def test_a_dismissed_node_is_no_standby_until_it_comes_anew() -> None:
    story = Story(min_nodes=2).joins("a", "b", "c")
    story.commits()
    story.forms(restarts_left={"b": 0}).exits("b", -9, step=1)
    assert story.commits().dismissed.keys() == {"b"}
    story.forms().goes("a")
    story.waits()
    story.joins("b")
    assert story.commits().active_map() == {"0": "b", "1": "c"}


def test_a_streak_is_broken_by_another_failure() -> None:
    story = started(no_progress_limit=2)
    story.raises("a", "ValueError", "x", step=5).commits()
    story.forms().raises("a", "KeyError", "y", step=5).commits()
    plan = story.forms().raises("a", "ValueError", "x", step=5).commits()
    assert plan.action == "restart"
    assert plan.streak.count == 1


def test_numbers_in_a_message_do_not_hide_that_it_is_the_same() -> None:
    story = started(no_progress_limit=2)
    story.raises("a", "RuntimeError", "DataLoader worker (pid 4711) died", step=5).commits()
    plan = story.forms().raises("a", "RuntimeError", "DataLoader worker (pid 4712) died", step=5).commits()
    assert (plan.action, plan.exit_code) == ("stop", 76)


def test_a_kill_signal_at_an_unknown_step_is_no_repetition() -> None:
    story = started(no_progress_limit=2, node_strikes=9)
    for _ in range(4):
        assert story.exits("a", -9).commits().action == "restart"
        story.forms()


def test_readmission_older_than_the_quarantine_does_not_count() -> None:
    story = started(standbys="c", node_strikes=1)
    story.operator("readmit", "b")
    story.exits("b", -9, step=1).commits()
    assert story.view.quarantine_reason("b") is not None


def test_stop_request_wins_over_a_failure() -> None:
    story = started(standbys="c").goes("a").operator_stops()
    plan = story.commits()
    assert (plan.action, plan.exit_code) == ("stop", 1)


def test_the_same_records_give_the_same_plan_id() -> None:
    first = started(standbys="c").goes("a").commits()
    again = started(standbys="c").goes("a").commits()
    assert first == again
    assert first.plan_id.startswith("g2-")


def test_settling() -> None:
    def settle(story: Story) -> str:
        decision = story.decides()
        assert isinstance(decision, Commit)
        return decision.settle

    assert settle(started(standbys="c").goes("a")) == "now"
    assert settle(started().exits("a", -9)) == "brief"
    assert settle(started().exits("a", 1)) == "window"
    assert settle(started().goes("a").joins("c")) == "window"
    assert settle(started().goes("a").joins("a")) == "now"


def test_observation_of_strangers_is_harmless() -> None:
    story = started()
    observed = Observed(unconfirmed=frozenset({"x"}), silent=frozenset({"y"}), late=frozenset({"z"}))
    assert isinstance(decide(story.view, story.policy, observed), Wait)


def test_a_node_that_is_late_freezes_nothing_while_it_may_still_become_ready() -> None:
    story = started(checkpointing=True)
    story.exits("a", -9, step=7).holds("a", "0@7/1").holds("b", "1@7/1").commits()
    assert not story.waits(late=frozenset("b")).freeze
    story.joins("c")
    assert story.waits(late=frozenset("b")).freeze


def test_a_lost_node_freezes_the_others_even_if_no_standby_is_there() -> None:
    story = started(checkpointing=True).goes("a")
    assert story.waits().untold == ("b",)
    story.holds("b", "0@7/1", "1@7/1")
    wait = story.waits()
    assert wait.for_standby and wait.freeze


def test_where_no_state_is_kept_nothing_is_waited_for() -> None:
    plan = started().exits("a", -9, step=7).commits()
    assert (plan.recovery_step, plan.recovery_source, plan.trust) == (0, {"0": "none", "1": "none"}, "none")


def test_a_failing_run_ends_also_where_states_are_kept() -> None:
    story = started(checkpointing=True, no_progress_limit=2)
    for _ in range(2):
        story.raises("b", "ValueError", "bad sample", step=8).holds("a", "0@7/1").holds("b", "1@7/1")
        plan = story.commits()
        if plan.action == "stop":
            break
        story.forms()
    assert plan.exit_code == 76


def test_origins_rise_above_those_of_an_earlier_run() -> None:
    story = Story(min_nodes=2, checkpointing=True).joins("a", "b")
    story.holds("a", files="0@100/9 1@100/9").holds("b")
    assert story.commits().origin == 10
    story.forms().exits("a", -9, step=101).holds("a", "0@101/10").holds("b", "1@101/10")
    plan = story.commits()
    assert (plan.generation, plan.origin, plan.recovery_origin) == (2, 11, 10)


def test_a_silent_standby_that_is_to_be_used_must_tell() -> None:
    story = started(standbys="c", checkpointing=True).goes("b")
    story.holds("a", "0@7/1", "1@7/1")
    assert story.waits(silent=frozenset("c")).untold == ("c",)


def test_no_run_ends_while_a_silent_standby_may_have_the_state() -> None:
    story = started(standbys="cd", checkpointing=True).goes("b")
    story.holds("a", "0@7/1").holds("c")
    assert story.waits(silent=frozenset("d")).untold == ("d",)
    story.holds("d", "1@7/1")
    assert story.commits().recovery_step == 7


def test_at_the_start_silent_nodes_are_waited_for() -> None:
    story = Story(min_nodes=2, checkpointing=True).joins("a", "b").holds("a")
    assert story.waits(silent=frozenset("b")).untold == ("b",)
