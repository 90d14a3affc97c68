"""Who keeps connections to whom, what a break says, and what the rounds make of notes."""

import itertools

import pytest

from lmres.ports import Range, Txn
from lmres.rendezvous.codec import decode
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.parting import Answer, Break, neighbours, speaks_of_death
from lmres.rendezvous.rounds import Broken
from lmres.rendezvous.state import Gone, Member, Parted
from tests.unit.rendezvous.kit import INTERVAL, KEYS, TIMEOUT, Node, let, put, running


def member(name: str, *, port: int = 7000) -> Member:
    return Member(
        node_id=name,
        incarnation=f"{name}.1",
        address="10.0.0.1",
        host=name,
        boot_id=name,
        pid=1,
        pid_start=1,
        failure_domain=name,
        pulse_port=port,
    )


def ring(names: str, *, deaf: str = "") -> dict[str, str]:
    members = [member(n, port=0 if n in deaf else 7000) for n in names]
    return {m.node_id: "".join(n.node_id for n in neighbours(members, m)) for m in members}


def broken(name: str, number: int = 1) -> Broken:
    return Broken(node_id=name, incarnation=f"{name}.1", number=number)


def notes(engine: Engine) -> list[Parted]:
    reads = engine.apply(Txn(success=(Range(prefix=f"{KEYS.reg}parted/"),))).reads[0]
    return [decode(Parted, e.value) for e in reads]


def loss(node: Node, name: str) -> Gone | None:
    return node.agent.view.gone(name)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", {"a": ""}),
        ("ab", {"a": "b", "b": "a"}),
        ("abc", {"a": "bc", "b": "ca", "c": "ab"}),
        ("dbeac", {"a": "bc", "b": "cd", "c": "de", "d": "ea", "e": "ab"}),
    ],
)
def test_the_next_two_in_the_ring(names: str, expected: dict[str, str]) -> None:
    assert ring(names) == expected


def test_who_does_not_listen_is_passed_over_and_calls_others() -> None:
    assert ring("abcd", deaf="b") == {"a": "cd", "b": "cd", "c": "da", "d": "ac"}


def test_who_is_not_registered_has_no_neighbours() -> None:
    assert neighbours([member("a"), member("b")], member("c")) == ()


def test_every_member_of_a_larger_ring_has_four_witnesses_in_any_order_of_names() -> None:
    for order in itertools.permutations("abcde"):
        calls = ring("".join(order))
        for name in order:
            assert len({n for n in calls if name in calls[n]} | set(calls[name])) == 4


def test_only_what_is_closed_or_refused_counts() -> None:
    told = {(how, answer) for how in Break for answer in Answer if speaks_of_death(how, answer)}
    assert told == {(Break.CLOSED, Answer.REFUSED), (Break.SILENT, Answer.REFUSED), (Break.CLOSED, Answer.NONE)}


def test_two_witnesses_find_a_dead_node_long_before_the_timeout() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    for node in (a, c):
        node.see(broken=(broken("b"),))
    let(a, c, ms=2 * INTERVAL)
    gone = loss(a, "b")
    assert gone is not None and gone.how == "lost"
    assert gone.witnesses == ("a", "c")
    assert gone.reason.startswith("connections to it closed (seen by a, c) and no heartbeat for ")
    assert gone.quiet_ms is not None and INTERVAL <= gone.quiet_ms < TIMEOUT
    plan = a.agent.view.head()
    assert plan is not None and plan.active_map() == {"0": "a", "1": "c"}
    b.round(after_ms=2 * INTERVAL)
    assert b.outcome is not None and b.outcome.stop_workers, "whoever was declared lost and lives stops its workers"


def test_the_round_is_due_when_the_loss_can_be_found() -> None:
    engine = Engine()
    a, _, c = running(engine, "a", "b", standbys=("c",))
    for node in (a, c, a):
        node.see(broken=(broken("b"),)).round(after_ms=5)
    assert a.outcome is not None and a.outcome.next_ms <= INTERVAL
    a.round(after_ms=INTERVAL - 6)
    assert loss(a, "b") is None and a.outcome.next_ms < INTERVAL
    a.round(after_ms=a.outcome.next_ms)
    a.round(after_ms=a.outcome.next_ms)
    assert loss(a, "b") is not None


def test_one_witness_does_not_do_where_another_could_speak() -> None:
    a, _, c = running(Engine(), "a", "b", standbys=("c",))
    a.see(broken=(broken("b"),))
    let(a, c, ms=TIMEOUT - 2 * INTERVAL)
    assert loss(a, "b") is None
    let(a, c, ms=3 * INTERVAL)
    gone = loss(a, "b")
    assert gone is not None and not gone.witnesses


def test_who_beats_is_not_lost_whatever_breaks() -> None:
    a, b, c = running(Engine(), "a", "b", standbys=("c",))
    for node in (a, c):
        node.see(broken=(broken("b"),))
    let(a, b, c, ms=3 * TIMEOUT)
    assert loss(a, "b") is None
    let(a, c, ms=TIMEOUT - 2 * INTERVAL)  # it stops now: the old notes say nothing about that
    assert loss(a, "b") is None


def test_a_heartbeat_in_the_last_moment_saves() -> None:
    engine = Engine()
    a, b, c = running(engine, "a", "b", standbys=("c",))
    for node in (a, c):
        node.see(broken=(broken("b"),)).round(after_ms=10)
    c.now_ms = b.now_ms = a.now_ms = a.now_ms + 3 * INTERVAL // 2
    a.agent.ledger.leases.observe((), a.now_ms - INTERVAL)  # it has looked all the time
    steps = a.begin()
    txn = next(steps)
    result = engine.apply(txn)
    b.round()
    try:
        while True:
            result = engine.apply(steps.send(result))
    except StopIteration:
        pass
    a.round(after_ms=10)
    assert loss(a, "b") is None


def test_a_note_is_written_once_and_taken_back() -> None:
    engine = Engine()
    a, b, _ = running(engine, "a", "b", standbys=("c",))
    assert notes(engine) == []
    a.see(broken=(broken("b"),))
    before = engine.apply(Txn(success=(Range(prefix=KEYS.reg),))).revision
    a.round(after_ms=10)
    assert [(p.node_id, p.by, p.back) for p in notes(engine)] == [("b", "a", False)]
    for _ in range(3):
        a.round(after_ms=10)
    assert notes(engine)[0].number == 1
    a.see(broken=()).round(after_ms=10)
    assert [(p.node_id, p.by, p.back) for p in notes(engine)] == [("b", "a", True)]
    a.see(broken=(broken("b", 2),)).round(after_ms=10)
    assert [(p.number, p.back) for p in notes(engine)] == [(2, False)]
    b.round(after_ms=10)
    assert engine.apply(Txn(success=(Range(prefix=KEYS.reg),))).revision > before


@pytest.mark.parametrize("answered", [True, False])
def test_a_note_whose_answer_was_lost_is_taken_back_too(answered: bool) -> None:
    engine = Engine()
    a, _, _ = running(engine, "a", "b", standbys=("c",))
    a.see(broken=(broken("b"),)).now_ms += 10
    a.cut(2, answered=answered)
    a.see(broken=()).round(after_ms=10)
    assert all(p.back for p in notes(engine))


def test_nothing_is_noted_of_those_who_left_or_are_not_known() -> None:
    engine = Engine()
    a, b, _ = running(engine, "a", "b", standbys=("c",))
    put(engine, KEYS.gone("b"), Gone(node_id="b", incarnation="b.1", how="left", reason="told", by="b", planned=True))
    stranger = Broken(node_id="x", incarnation="x.1", number=2)
    earlier = Broken(node_id="c", incarnation="c.0", number=3)
    a.see(broken=(broken("b"), stranger, earlier)).round(after_ms=10)
    assert notes(engine) == []
    assert b is not a


def test_a_forged_note_about_oneself_or_under_anothers_key_does_not_count() -> None:
    engine = Engine()
    a, _, c = running(engine, "a", "b", standbys=("c",))
    made = {"node_id": "b", "incarnation": "b.1", "number": 1}
    put(engine, KEYS.parted("b", "b"), Parted(by="b", by_incarnation="b.1", **made))
    put(engine, KEYS.parted("b", "x"), Parted(by="c", by_incarnation="c.1", **made))
    put(engine, KEYS.parted("b", "y"), Parted(by="y", by_incarnation="y.1", **made))
    put(engine, KEYS.parted("b", "z"), '{"record":"Parted"}')
    a.see(broken=(broken("b"),))
    let(a, c, ms=TIMEOUT - 2 * INTERVAL)
    assert loss(a, "b") is None
