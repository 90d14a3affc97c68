"""What the vaults hold, told before a plan that starts workers: rounds of agents around one store."""

from collections.abc import Iterable
from typing import Any

import pytest

from lmres.gemini.inventory import Holdings
from lmres.ports import Put, Range, Txn
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.resume import TELL_MS, Checkpointing, told
from lmres.rendezvous.state import Banned, Evidence, Hold, Ready, StopRequest
from tests.unit.rendezvous.kit import INTERVAL, KEYS, TIMEOUT, Node, let, put

ON = Checkpointing(enabled=True)


def nodes_of(engine: Engine, names: str, **config: Any) -> list[Node]:
    values = {"min_nodes": 2, "max_nodes": len(names) + 1, "checkpointing": ON, **config}
    return [Node(engine, n, **values) for n in names]


def tell(node: Node) -> None:
    """As the edge: the vault is frozen when that is asked for."""
    assert node.outcome is not None
    if node.outcome.freeze is not None:
        node.see(holdings=Holdings(node_id=node.name, incarnation="told by the vault", generation=node.outcome.freeze))


def let_tell(nodes: Iterable[Node], *, ms: int, deaf: str = "") -> None:
    nodes = list(nodes)
    for _ in range(0, ms, 250):
        for node in nodes:
            node.round(after_ms=250)
            if node.name not in deaf:
                tell(node)


def running(engine: Engine, names: str) -> list[Node]:
    nodes = nodes_of(engine, names)
    let_tell(nodes, ms=2500)
    for node in nodes[:2]:
        node.starts()
        node.see(holdings=None)
    let_tell(nodes, ms=500)
    return nodes


def crash(node: Node) -> None:
    me = node.agent.me
    cause = Cause(
        failure_class="process_crash",
        node_id=me.node_id,
        incarnation=me.incarnation,
        host=me.host,
        detail="killed by SIGKILL",
        rank=0,
        exit_status=-9,
    )
    fault = Evidence(
        generation=node.agent.view.head().generation,
        reporter=me.node_id,
        incarnation=me.incarnation,
        weight="primary",
        cause=cause,
        boot_id=me.boot_id,
        at_ms=node.now_ms,
    )
    node.see(faults=(fault,))


def generation(node: Node) -> int:
    head = node.agent.view.head()
    return head.generation if head is not None else 0


def order_of(engine: Engine, *prefixes: str) -> list[str]:
    """Under which of these the store was written, in order."""
    found = [(e.create_revision, p) for p in prefixes for e in engine.apply(Txn(success=(Range(prefix=p),))).reads[0]]
    return [p for _, p in sorted(found)]


def test_the_start_waits_until_all_have_told() -> None:
    engine = Engine()
    a, b = nodes_of(engine, "ab")
    let(a, b, ms=1000)
    assert a.outcome.freeze == b.outcome.freeze == 0
    assert "not yet told what state they hold: a, b" in a.outcome.waiting_for
    let_tell([a, b], ms=1500)
    assert generation(a) == 1 and a.outcome.formed is not None


def test_nothing_is_asked_where_states_are_not_kept() -> None:
    engine = Engine()
    a, b = nodes_of(engine, "ab", checkpointing=Checkpointing())
    a.round()
    assert a.outcome.freeze is None
    let(a, b, ms=1500)
    assert generation(a) == 1


def test_a_failure_freezes_every_vault() -> None:
    engine = Engine()
    a, b, c = running(engine, "abc")
    assert a.outcome.freeze is b.outcome.freeze is c.outcome.freeze is None
    crash(b)
    let(b, a, c, ms=250)
    assert a.outcome.freeze == b.outcome.freeze == c.outcome.freeze == 1
    let(a, b, c, ms=2000)
    assert generation(a) == 1
    let_tell([a, b, c], ms=1500)
    assert generation(a) == 2 and a.outcome.freeze is None


def test_what_was_told_bears_the_incarnation_that_stands() -> None:
    engine = Engine()
    a, b = nodes_of(engine, "ab")
    let_tell([a, b], ms=1500)
    assert {n: h.incarnation for n, (_, h) in a.agent.view.holdings().items()} == {"a": "a.1", "b": "b.1"}


def test_who_beats_and_does_not_tell_is_left_out_after_a_while() -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    crash(b)
    let_tell([b, a], ms=TELL_MS - 1500, deaf="b")
    assert generation(a) == 1 and "hold: b" in a.outcome.waiting_for
    let_tell([b, a], ms=3500, deaf="b")
    assert generation(a) == 2
    assert "without word from b" in a.agent.view.head().reason


def test_a_stopped_store_costs_nobody_his_time_to_tell() -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    crash(b)
    let_tell([b, a], ms=2000, deaf="b")
    for node in (a, b):
        node.now_ms += 5 * TELL_MS  # nobody could look
    let_tell([b, a], ms=1000, deaf="b")
    assert generation(a) == 1


def test_a_silent_standby_is_not_waited_for() -> None:
    engine = Engine()
    a, b, _ = running(engine, "abc")
    let_tell([a, b], ms=3 * INTERVAL)
    crash(b)
    let_tell([b, a], ms=750)
    assert 4 * INTERVAL < TIMEOUT and generation(a) == 2
    assert "without word from c" in a.agent.view.head().reason


def test_a_silent_active_node_is_waited_for_until_it_is_lost() -> None:
    engine = Engine()
    a, _, c = running(engine, "abc")
    let_tell([a, c], ms=3 * INTERVAL)
    crash(a)
    let_tell([a, c], ms=750)
    assert generation(a) == 1 and "hold: b" in a.outcome.waiting_for
    let_tell([a, c], ms=TIMEOUT)
    assert generation(a) == 2 and a.agent.view.head().active_map() == {"0": "a", "1": "c"}


def test_a_state_is_banned_before_the_failure_is_heard_of() -> None:
    engine = Engine()
    _, b = running(engine, "ab")
    crash(b)
    b.see(banned=(Banned(step=7, origin=1, reason="not finite"),))
    for requests in range(1, 8):
        b.now_ms += 100
        b.cut(requests)
        wrote = order_of(engine, f"{KEYS.reg}banned/", f"{KEYS.reg}evidence/")
        assert wrote in ([], [f"{KEYS.reg}banned/"], [f"{KEYS.reg}banned/", f"{KEYS.reg}evidence/"])
    assert len(wrote) == 2


def test_told_before_the_group_formed_is_told_again() -> None:
    engine = Engine()
    a, b = nodes_of(engine, "ab")
    let_tell([a, b], ms=1500)
    early = Holdings(node_id="a", incarnation="a.1", generation=1)
    a.see(holdings=early)
    put(engine, KEYS.holdings("a"), early)
    formed = a.agent.view.mod_revision(KEYS.formed(1))
    a.round(after_ms=250)
    assert a.agent.view.mod_revision(KEYS.holdings("a")) > formed > 0


def test_the_operators_stop_freezes_nothing() -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    put(engine, KEYS.stop, StopRequest(reason="enough"))
    let_tell([a, b], ms=1000)
    assert a.outcome.end is not None and a.outcome.freeze is None


def test_torn_holdings_are_written_again() -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    crash(b)
    let_tell([b], ms=250)
    let_tell([a], ms=250, deaf="a")
    tell(a)
    put(engine, KEYS.holdings("b"), "{")
    let_tell([b, a], ms=1500)
    assert generation(a) == 2


@pytest.mark.parametrize("requests", range(1, 8))
def test_a_round_cut_anywhere_still_gets_there(requests: int) -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    crash(b)
    let_tell([b, a], ms=500, deaf="ab")
    tell(a)
    tell(b)
    b.now_ms += 250
    b.cut(requests, answered=False)
    let_tell([b, a], ms=1500)
    assert generation(a) == 2


def test_a_large_run_freezes_those_that_do_not_decide() -> None:
    engine = Engine()
    nodes = nodes_of(engine, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", min_nodes=34)
    let_tell(nodes, ms=3000)
    assert generation(nodes[0]) == 1
    far = next(n for n in nodes if n.agent.ledger.observer_index() is None)
    for node in nodes[:34]:
        node.starts()
        node.see(holdings=None)
    let_tell(nodes, ms=500)
    crash(far)
    let_tell(nodes, ms=250)
    assert {n.outcome.freeze for n in nodes if n.agent.ledger.observer_index() is None} == {1}
    let_tell(nodes, ms=1500)
    assert generation(far) == 2


def test_newcomers_of_no_use_do_not_put_off_the_end_of_a_wait_for_a_standby() -> None:
    engine = Engine()
    a, _ = running(engine, "ab")
    put(engine, KEYS.hold("c"), Hold(node_id="c", kind="drain", generation=1, reason="broken"))
    let_tell([a], ms=15_000)
    assert "waiting for a standby" in a.outcome.waiting_for
    c = Node(engine, "c", min_nodes=2, max_nodes=3, checkpointing=ON)
    c.now_ms = a.now_ms
    let_tell([a, c], ms=5_000, deaf="c")
    assert "hold: c" in a.outcome.waiting_for
    let_tell([a, c], ms=8_000, deaf="c")
    assert a.outcome.end is not None and a.outcome.end.exit_code == 75


def test_who_comes_late_says_where_its_vault_is_and_is_still_asked_what_it_holds() -> None:
    engine = Engine()
    a, b = running(engine, "ab")
    c = Node(engine, "c", min_nodes=2, max_nodes=3, checkpointing=ON)
    c.now_ms = a.now_ms
    c.see(holdings=Holdings(node_id="c", incarnation="?", generation=0, address="addr-c", port=7))
    let(a, b, c, ms=500)
    held = a.agent.view.holdings()["c"][1]
    assert (held.incarnation, held.address, held.port, held.copies) == ("c.1", "addr-c", 7, ())
    crash(b)
    let_tell([a, b], ms=750)
    assert generation(a) == 1 and "hold: c" in a.outcome.waiting_for
    let_tell([a, b, c], ms=1500)
    assert generation(a) == 2


def test_what_is_told_while_the_group_forms_does_not_count_as_told_after_it() -> None:
    engine = Engine()
    a, b = nodes_of(engine, "ab")
    b.see(waiting=False)  # so that the group does not form by itself
    let_tell([a, b], ms=1500)
    assert generation(b) == 1
    b.see(holdings=Holdings(node_id="b", incarnation="b.1", generation=1))
    put(engine, KEYS.ready(1, "b"), Ready(generation=1, **_ready(b)))
    steps = b.begin()
    txn = next(steps)
    while not any(isinstance(op, Put) and op.key == KEYS.holdings("b") for op in txn.success):
        txn = steps.send(engine.apply(txn))
    a.round(after_ms=250)
    a.round(after_ms=250)
    assert a.outcome.formed is not None
    assert not engine.apply(txn).succeeded


def _ready(node: Node) -> dict[str, Any]:
    return {
        "node_id": node.name,
        "incarnation": node.agent.me.incarnation,
        "address": node.agent.me.address,
        "master_port": 29500,
        "restarts_left": 3,
    }


def said_by(node: Node, asked: Node) -> Holdings:
    """What ``node`` knows of the newest words of another."""
    return node.agent.view.holdings()[asked.name][1]


def held_before_forming(engine: Engine) -> list[Node]:
    """Generation 2 has a plan, and all have said what they hold, because it had to be replaced too; it has not."""
    a, b = running(engine, "ab")
    crash(b)
    let_tell([b, a], ms=1500)
    assert generation(a) == 2
    for node in (a, b):
        node.see(holdings=Holdings(node_id=node.name, incarnation="told by the vault", generation=2, port=1))
    let(a, b, a, ms=250)
    assert said_by(a, b).generation == 2 and a.agent.view.formed(2) is None
    return [a, b]


def test_what_was_held_before_a_group_formed_is_not_said_again_unless_it_is_asked_for() -> None:
    engine = Engine()
    a, b = held_before_forming(engine)
    for node in (a, b):
        node.returns()
    let(a, b, ms=1000)
    assert a.agent.view.formed(2) is not None and a.outcome.freeze is None
    assert told(a.agent.view, 2) == ()


def test_what_was_held_before_workers_were_started_is_taken_back() -> None:
    engine = Engine()
    a, b = held_before_forming(engine)
    for node in (a, b):
        node.returns()
    let(a, b, ms=1000)
    for node in (a, b):
        node.starts()
        node.see(holdings=None)
    let(a, b, ms=500)
    assert said_by(a, b) == Holdings(node_id="b", incarnation="b.1", generation=0, port=1)
