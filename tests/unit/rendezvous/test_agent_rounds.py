"""Rounds against one store, cut off wherever it hurts. The simulator does the same at random; these name the cases."""

from typing import Any

import pytest

from lmres.policy import Recovery
from lmres.ports import DeletePrefix, Range, Txn
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.rounds import Leave
from lmres.rendezvous.state import Evidence, Gone, Hold, Member, Plan, StopRequest
from tests.unit.rendezvous.kit import INTERVAL, KEYS, TIMEOUT, Node, let, put, running


def stored(engine: Engine) -> dict[str, str]:
    reads = engine.apply(Txn(success=(Range(prefix=KEYS.base),))).reads[0]
    return {e.key: e.value for e in reads}


def evidence(node: Node, *, generation: int, weight: Any = "primary", status: int = -9) -> Evidence:
    me = node.agent.me
    cause = Cause(
        failure_class="process_crash",
        node_id=me.node_id,
        incarnation=me.incarnation,
        host=me.host,
        detail="killed by SIGKILL",
        rank=0,
        exit_status=status,
    )
    return Evidence(
        generation=generation,
        reporter=me.node_id,
        incarnation=me.incarnation,
        weight=weight,
        cause=cause,
        boot_id=me.boot_id,
        at_ms=node.now_ms,
    )


def head(node: Node) -> Plan:
    plan = node.agent.view.head()
    assert plan is not None
    return plan


def test_two_agents_form_a_group() -> None:
    engine = Engine()
    a, b = Node(engine, "a"), Node(engine, "b")
    assert a.round().standing == "standby"
    assert "1 of 2 nodes" in a.round().waiting_for
    b.round()
    let(a, b, ms=1000)
    assert (a.outcome.slot, b.outcome.slot) == (0, 1)
    assert a.outcome.formed == b.outcome.formed
    assert a.outcome.formed.master_address == "addr-a"
    assert not a.outcome.formed.generation > 1


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("requests", range(1, 7))
def test_a_round_cut_off_anywhere_is_just_run_again(requests: int, answered: bool) -> None:
    engine = Engine()
    a, b = Node(engine, "a"), Node(engine, "b")
    for _ in range(12):
        for node in (a, b):
            node.now_ms += 250
            node.cut(requests, answered=answered)
    let(a, b, ms=2000)
    assert head(a) == head(b)
    assert head(a).generation == 1
    assert {a.outcome.slot, b.outcome.slot} == {0, 1}
    assert len([k for k in stored(engine) if "/member/" in k]) == 2
    assert a.outcome.formed is not None


def test_workers_of_an_older_plan_are_stopped_before_ready_is_said() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, ms=1000)
    assert head(b).generation == 2
    assert b.outcome.stop_workers
    assert KEYS.ready(2, "b") not in stored(engine)
    b.returns()
    b.round()
    assert KEYS.ready(2, "b") in stored(engine)
    assert b.outcome.formed is None
    a.returns()
    let(a, b, ms=500)
    assert b.outcome.formed is not None
    assert not a.outcome.formed.generation < 2


def test_only_the_charged_node_pays_even_if_it_missed_a_plan() -> None:
    engine = Engine()
    a, b, c, d = running(engine, "a", "b", standbys=("c", "d"))
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, c, d, ms=200, step_ms=50)
    assert head(c).charged == ("a",)
    put(engine, KEYS.gone("b"), Gone(node_id="b", incarnation="b.1", how="lost", reason="quiet", by="c"))
    let(c, d, ms=1000)  # a is slow: it has not seen generation 2 start
    assert head(c).generation == 3
    assert a.round().charged
    assert a.outcome.stop_workers
    a.see(waiting=False, workers_alive=True, workers_generation=3)
    assert not a.round().charged


def test_a_silent_node_is_lost_after_the_timeout_and_not_before() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    let(a, c, ms=TIMEOUT - INTERVAL)
    assert head(a).generation == 1
    let(a, c, ms=2 * INTERVAL)
    assert head(a).generation == 2
    assert head(a).active_map() == {"0": "a", "1": "c"}
    assert b.round().stop_workers
    assert b.outcome.standing == "joining"
    b.returns()
    assert b.round().standing == "standby"
    assert b.agent.me.incarnation == "b.2"


def test_a_heartbeat_in_the_last_moment_saves() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    a.now_ms += TIMEOUT - INTERVAL
    let(a, ms=INTERVAL)
    steps = a.begin()
    a.now_ms += TIMEOUT
    result = engine.apply(next(steps))
    b.round()
    while True:
        try:
            result = engine.apply(steps.send(result))
        except StopIteration:
            break
    assert KEYS.gone("b") not in stored(engine)


def test_an_observer_that_could_not_look_blames_nobody() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    a.round(after_ms=60_000)
    assert KEYS.gone("b") not in stored(engine)
    b.round(after_ms=60_000)
    let(a, b, ms=TIMEOUT)
    assert head(a).generation == 1


def test_all_stopped_and_continued() -> None:
    engine = Engine()
    nodes = running(engine, "a", "b", "c")
    for node in nodes:
        node.now_ms += 3_600_000
    let(*nodes, ms=2 * TIMEOUT)
    assert head(nodes[0]).generation == 1


def test_waiting_for_a_standby_ends_after_join_timeout() -> None:
    engine = Engine()
    a, _ = running(engine, "a", "b")
    let(a, ms=TIMEOUT + 1000)
    assert "waiting for a standby" in a.outcome.waiting_for and a.outcome.alert
    let(a, ms=20_500)
    assert a.outcome.end is not None
    assert a.outcome.end.exit_code == 75
    assert head(a).action == "stop"


def test_a_wait_that_has_ended_does_not_count_towards_the_next() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, ms=500)
    a.returns()
    let(a, b, ms=12_000)
    assert "was not ready" in a.outcome.waiting_for
    b.returns()
    let(a, b, ms=500)
    assert a.outcome.formed is not None
    a.starts()
    b.starts()
    let(a, b, ms=20_000)
    let(a, ms=TIMEOUT + 1_000)
    assert "waiting for a standby" in a.outcome.waiting_for
    assert a.outcome.end is None


def test_time_in_which_an_agent_was_stopped_is_no_waiting() -> None:
    engine = Engine()
    a = Node(engine, "a")
    let(a, ms=1_000)
    a.round(after_ms=3_600_000)
    assert a.outcome.end is None


def test_no_group_within_join_timeout() -> None:
    engine = Engine()
    a = Node(engine, "a")
    let(a, ms=20_500)
    assert a.outcome.end is not None
    assert a.outcome.end.exit_code == 75


def test_a_second_agent_with_the_same_name_is_refused() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    other = Node(engine, "a", process="other", min_nodes=2, max_nodes=3)
    let(a, b, other, ms=1500)
    assert other.outcome.end.exit_code == 64
    assert "in use by a live agent" in other.outcome.end.reason
    assert "host-a" in other.outcome.end.reason
    assert a.outcome.end is None
    assert head(a).generation == 1


def test_a_restarted_agent_takes_its_name_and_slot_at_once() -> None:
    engine = Engine()
    _, b, c = running(engine, "a", "b", standbys=("c",))
    again = Node(engine, "a", process="again", dead=lambda member: member.node_id == "a", max_nodes=4)
    again.round()
    let(again, b, c, ms=1000)
    assert head(b).active[0].incarnation == "again.1"
    assert head(b).active[1].node_id == "b"


def test_an_agent_whose_name_was_taken_while_it_was_stopped_ends() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    other = Node(engine, "a", process="other", min_nodes=2, max_nodes=3)
    let(b, other, ms=TIMEOUT + 1500)
    assert other.outcome.standing in ("standby", "active")
    before = stored(engine)
    a.see(faults=(evidence(a, generation=1),))
    assert a.round().end.exit_code == 64
    assert a.outcome.stop_workers
    a.see(leave=Leave(reason="bye", planned=False), workers_alive=False)
    a.round()
    assert stored(engine) == before, "a displaced agent writes nothing"


def test_a_late_write_of_a_displaced_agent_does_not_count() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    a.see(succeeded=1)
    steps = a.begin()
    late = steps.send(engine.apply(next(steps)))
    other = Node(engine, "a", process="other", min_nodes=2, max_nodes=3)
    let(b, other, ms=TIMEOUT + 1500)
    before = stored(engine)
    assert not engine.apply(late).succeeded
    assert stored(engine) == before


def test_more_agents_than_max() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    c, d = Node(engine, "c", max_nodes=3), Node(engine, "d", max_nodes=3)
    let(a, b, c, d, ms=2000)
    assert c.outcome.standing == "standby"
    assert d.outcome.end.exit_code == 64
    assert "takes 3 agents at most" in d.outcome.end.reason
    assert "a, b, c" in d.outcome.end.reason


def test_a_spare_beyond_max_stays_while_those_before_it_may_be_dead() -> None:
    engine = Engine()
    a, _, _ = running(engine, "a", "b", standbys=("c",), max_nodes=3)
    d = Node(engine, "d", max_nodes=3)
    let(a, d, ms=TIMEOUT + 1500)  # b and c have died
    assert d.outcome.end is None
    assert head(a).active_map() == {"0": "a", "1": "d"}


@pytest.mark.parametrize("field", ["min_nodes", "max_nodes", "policy"])
def test_agents_that_do_not_agree_are_refused(field: str) -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    values = {"min_nodes": 2, "max_nodes": 3, "policy": None}
    values[field] = '{"schema_version":1}' if field == "policy" else 9
    c = Node(engine, "c", **values)
    let(a, b, c, ms=1500)
    assert c.outcome.end.exit_code == 64
    assert KEYS.member("c") not in stored(engine)


def test_a_configuration_that_nobody_holds_any_more_is_replaced() -> None:
    engine = Engine()
    running(engine, "a", "b")
    c = Node(engine, "c", min_nodes=1, max_nodes=1)
    let(c, ms=TIMEOUT + 2000)  # a and b were killed
    assert c.outcome.end is None
    assert c.outcome.standing == "active"
    assert head(c).generation == 1


def test_success_of_all_and_the_end() -> None:
    engine = Engine()
    a, b, c = nodes = running(engine, "a", "b", standbys=("c",))
    a.see(succeeded=1, workers_alive=False)
    let(*nodes, ms=1000)
    assert all(n.outcome.end is None for n in nodes)
    b.see(succeeded=1, workers_alive=False)
    let(*nodes, ms=500)
    assert [n.outcome.end.exit_code for n in nodes] == [0, 0, 0]
    assert all(n.outcome.end.run_over for n in nodes)
    for node in nodes:
        node.see(leave=Leave(reason="over", planned=True)).round()
        assert bool(stored(engine)) == (node is not c), "the last one out leaves nothing"


def test_the_last_one_out_does_not_wipe_a_newcomer() -> None:
    engine = Engine()
    a = Node(engine, "a")
    a.round()
    a.see(leave=Leave(reason="SIGTERM", planned=True))
    steps = a.begin()
    result = engine.apply(next(steps))
    wipe = steps.send(result)
    assert any(isinstance(op, DeletePrefix) for op in wipe.success)
    b = Node(engine, "b")
    b.round()
    assert not engine.apply(wipe).succeeded
    assert b.round(after_ms=INTERVAL).standing == "standby"


def test_a_newcomer_does_not_register_in_records_that_were_wiped() -> None:
    engine = Engine()
    a, b = Node(engine, "a"), Node(engine, "b")
    a.round()
    steps = b.begin()
    register = steps.send(engine.apply(next(steps)))
    a.see(leave=Leave(reason="SIGTERM", planned=True)).round()
    assert stored(engine) == {}
    with pytest.raises(StopIteration):
        steps.send(engine.apply(register))
    assert stored(engine) == {}
    b.round(after_ms=INTERVAL)
    assert {KEYS.config, KEYS.member("b")} <= stored(engine).keys()


def test_leaving_takes_back_a_registration_whose_answer_was_lost() -> None:
    engine = Engine()
    a, b = Node(engine, "a"), Node(engine, "b")
    a.round()
    b.cut(2, answered=False)
    assert KEYS.member("b") in stored(engine)
    b.see(leave=Leave(reason="SIGTERM", planned=True)).round()
    assert KEYS.gone("b") in stored(engine)


def test_a_new_run_on_old_records() -> None:
    """Two agents of a requeued job meet the records of a run that is over; neither takes the other for an old one."""
    engine = Engine()
    a, b = running(engine, "a", "b")
    put(engine, KEYS.stop, StopRequest(reason="enough"))
    let(a, b, ms=500)
    assert a.outcome.end.exit_code == 1
    c = Node(engine, "c", min_nodes=2, max_nodes=3)
    d = Node(engine, "d", min_nodes=2, max_nodes=3)
    let(c, d, ms=TIMEOUT + 3000)
    assert (c.outcome.standing, d.outcome.standing) == ("active", "active")
    assert head(c).generation == 1


def test_a_run_that_is_over_turns_newcomers_away_while_somebody_is_there() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    put(engine, KEYS.stop, StopRequest(reason="enough"))
    a.round(after_ms=INTERVAL)
    d = Node(engine, "d", min_nodes=2, max_nodes=4)
    d.round()
    b.cut(1)  # a heartbeat of one that does not know yet
    d.round(after_ms=INTERVAL)
    assert d.outcome.end is not None
    assert d.outcome.end.exit_code == 1
    assert "over already" in d.outcome.end.reason
    assert c.round().end.exit_code == 1


def test_the_store_that_lost_its_records_is_noticed() -> None:
    a, b = running(Engine(), "a", "b")
    fresh = Engine()
    a.engine = b.engine = fresh
    assert a.round().end.exit_code == 75
    assert a.outcome.stop_workers
    b.engine = Engine()
    for number in range(200):
        put(b.engine, f"/other/{number}", "x")
    assert b.round().end.exit_code == 75


def test_who_was_given_up_does_not_come_back_into_another_run() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    put(engine, KEYS.gone("b"), Gone(node_id="b", incarnation="b.1", how="lost", reason="quiet", by="a"))
    b.round()
    assert b.outcome.standing == "joining"
    engine.apply(Txn(success=(DeletePrefix(prefix=KEYS.base),)))
    Node(engine, "z").round()
    b.returns()
    assert b.round(after_ms=INTERVAL).end.exit_code == 75
    assert a.round().end.exit_code == 75


def test_a_drained_node_is_parked_and_can_be_readmitted() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    put(engine, KEYS.hold("b"), Hold(node_id="b", kind="drain", generation=1, reason="repair"))
    let(a, b, c, ms=500)
    assert b.outcome.standing == "quarantined"
    put(engine, KEYS.hold("b"), Hold(node_id="b", kind="readmit", generation=2, reason="repaired"))
    let(a, b, c, ms=500)
    assert b.outcome.standing == "standby"
    assert head(a).generation == 2


def test_a_quarantined_agent_exits_if_the_policy_says_so() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",), recovery=Recovery(quarantined="exit"))
    put(engine, KEYS.hold("b"), Hold(node_id="b", kind="drain", generation=1, reason="repair"))
    let(a, b, c, ms=500)
    assert b.outcome.end.exit_code == 69
    assert a.outcome.end is None


def test_a_dismissed_agent_ends_even_if_it_missed_the_plan() -> None:
    engine = Engine()
    a, b, c, d = running(engine, "a", "b", standbys=("c", "d"))
    ready = a.agent.view.ready(1)["a"]
    put(
        engine,
        KEYS.ready(1, "a"),
        type(ready)(**{f: getattr(ready, f) for f in ready.__slots__} | {"restarts_left": 0}),
    )
    a.see(faults=(evidence(a, generation=1),))
    a.cut(2)
    let(b, c, d, ms=1000)
    assert head(b).dismissed.keys() == {"a"}
    put(engine, KEYS.gone("b"), Gone(node_id="b", incarnation="b.1", how="lost", reason="quiet", by="c"))
    let(c, d, ms=1000)
    assert head(c).generation == 3
    assert a.round().end.exit_code == 1


def test_a_node_that_never_gets_ready_is_put_aside() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, c, ms=500)
    a.returns()
    let(a, b, c, ms=9_000)  # b's workers can not be stopped
    assert head(a).generation == 3
    assert head(a).active_map() == {"0": "a", "1": "c"}
    assert [q.node_id for q in head(a).quarantined] == ["b"]


def test_slot_0_that_never_gets_ready_is_put_aside_too() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    b.see(faults=(evidence(b, generation=1),))
    let(a, b, c, ms=500)
    b.returns()
    let(a, b, c, ms=9_000)
    assert head(b).active_map() == {"0": "c", "1": "b"}


def test_an_outage_while_forming_puts_nobody_aside() -> None:
    engine = Engine()
    a, b, c = nodes = running(engine, "a", "b", standbys=("c",))
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, c, ms=500)
    for node in nodes:
        node.now_ms += 60_000
    let(a, b, c, ms=1000)
    assert head(a).generation == 2
    assert head(a).quarantined == ()


def test_own_registration_torn_is_written_again() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    put(engine, KEYS.member("a"), "{torn")
    let(a, b, ms=500)
    assert a.outcome.end is None
    assert head(b).generation == 1
    assert '"a.1"' in stored(engine)[KEYS.member("a")]


def test_own_registration_torn_is_written_again_also_if_the_first_try_is_lost() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    put(engine, KEYS.member("a"), "{torn")
    a.now_ms += 250
    a.cut(1)  # it has read what stands there, and can not write
    let(a, b, ms=500)
    assert a.outcome.end is None
    assert '"a.1"' in stored(engine)[KEYS.member("a")]


def test_a_torn_registration_of_another_is_not_taken_over() -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    put(engine, KEYS.member("a"), "{torn")
    other = Node(engine, "a", process="other", min_nodes=2, max_nodes=3)
    other.round()
    assert "can not be read" in other.outcome.waiting_for
    let(a, b, other, ms=1500)
    assert other.outcome.end.exit_code == 64
    assert a.outcome.end is None


@pytest.mark.parametrize("text", ["", "{", '{"record":"Plan"}', "null"])
def test_a_torn_plan_is_written_again_as_it_was(text: str) -> None:
    engine = Engine()
    a, b = running(engine, "a", "b")
    before = stored(engine)[KEYS.plan(1)]
    put(engine, KEYS.plan(1), text)
    let(a, b, ms=500)
    assert stored(engine)[KEYS.plan(1)] == before


@pytest.mark.parametrize("text", ["", "{", '{"record":"Plan"}', "null"])
def test_garbage_in_the_next_plans_place_is_replaced(text: str) -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    put(engine, KEYS.plan(2), text)
    a.see(faults=(evidence(a, generation=1),))
    let(a, b, c, ms=500)
    assert head(b).generation == 2
    assert head(b).charged == ("a",)


def test_a_broken_connection_waits_for_signs_of_life() -> None:
    engine = Engine()
    a, b, c, d = running(engine, "a", "b", "c", standbys=("d",))
    a.see(faults=(evidence(a, generation=1, weight="secondary"),))
    let(a, b, d, ms=1500)  # c has died
    assert head(a).generation == 1
    assert "not yet heard from: c" in a.outcome.waiting_for
    let(a, b, d, ms=TIMEOUT)
    assert head(a).failure_class == "node_lost"
    assert head(a).active_map() == {"0": "a", "1": "b", "2": "d"}
    assert c.round().stop_workers


def test_events_are_told_once() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    a.see(faults=(evidence(a, generation=1),))
    told: list[str] = []
    for _ in range(10):
        for node in (a, b, c):
            outcome = node.round(after_ms=100)
            if node is b:
                told += [n.event for n in outcome.notes]
    assert told == ["fault_detected", "plan_committed"]


def test_a_member_is_only_its_own_process() -> None:
    """``process_is_dead`` is asked about the holder of the name and nobody else."""
    engine = Engine()
    a, b = running(engine, "a", "b")
    asked: list[Member] = []

    def dead(member: Member) -> bool:
        asked.append(member)
        return False

    again = Node(engine, "b", process="again", dead=dead, min_nodes=2, max_nodes=3)
    let(a, again, ms=500)
    assert {m.node_id for m in asked} == {"b"}
    assert b.round().end is None
