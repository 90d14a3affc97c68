"""Agents that ask their workers to stand still: who is asked, when, for how long, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest

from lmres.rendezvous.agent import VAIN_MS
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.pausing import NEXT_BOUNDARY, PAUSE_MS
from lmres.rendezvous.state import Health, Hold, Paused
from tests.unit.rendezvous.kit import KEYS, Node, let, put
from tests.unit.rendezvous.test_agent_holdings import crash, let_tell, running, tell


@pytest.fixture
def engine() -> Engine:
    return Engine()


def group(engine: Engine) -> list[Node]:
    """Two active nodes and a standby that keep states; the group runs its first generation."""
    return running(engine, "abc")


def drain(engine: Engine, name: str, kind: Any = "drain") -> None:
    put(engine, KEYS.hold(name), Hold(node_id=name, kind=kind, generation=1, reason="test"))


def stands(node: Node, reach: int, step: int | None = None, **more: Any) -> None:
    node.see(paused=Paused(generation=1, node_id="", incarnation="", reach=reach, step=step, **more))


def asked(*nodes: Node) -> list[int | None]:
    return [node.outcome.pause if node.outcome is not None else None for node in nodes]


def test_nobody_is_asked_while_all_is_well(engine: Engine) -> None:
    a, b, c = group(engine)
    assert asked(a, b, c) == [None, None, None]


def test_both_moves(engine: Engine) -> None:
    a, b, c = group(engine)
    drain(engine, "b")
    let(a, b, c, ms=250)
    assert asked(a, b) == [NEXT_BOUNDARY, NEXT_BOUNDARY]
    stands(a, 9)
    let(a, b, ms=250)
    assert asked(a, b) == [NEXT_BOUNDARY, NEXT_BOUNDARY]
    stands(b, 8)
    let(b, a, b, ms=250)
    assert asked(a, b) == [9, 9]
    stands(a, 9, 9)
    stands(b, 9, 9)
    let(a, b, ms=250)
    let(a, b, ms=250)
    assert [n.outcome.freeze for n in (a, b) if n.outcome is not None] == [1, 1]
    assert asked(a, b) == [9, 9], "they stand until they are stopped"
    let_tell((a, b, c), ms=2_000)
    plan = a.agent.view.head()
    assert plan is not None and plan.active_map() == {"0": "a", "1": "c"}


def test_an_unfit_host_is_a_reason_too(engine: Engine) -> None:
    a, b, c = group(engine)
    b.see(health=Health(node_id="", incarnation="", fit=False, reason="gpu: lost"))
    let(b, a, b, ms=500)
    assert asked(a, b) == [NEXT_BOUNDARY, NEXT_BOUNDARY]
    b.see(health=Health(node_id="", incarnation="", fit=True))
    let(b, a, b, ms=500)
    assert asked(a, b) == [None, None], "fit again: they go on"
    assert c.outcome is not None


def test_a_wish_that_is_withdrawn_lets_them_go_on(engine: Engine) -> None:
    a, b, _ = group(engine)
    drain(engine, "b")
    let(a, b, ms=250)
    drain(engine, "b", "readmit")
    let(a, b, ms=250)
    assert asked(a, b) == [None, None]


def test_the_wait_is_bounded(engine: Engine) -> None:
    a, b, c = group(engine)
    drain(engine, "b")
    let(a, b, c, ms=PAUSE_MS - 500)
    assert [n.outcome.freeze for n in (a, b) if n.outcome is not None] == [None, None]
    let(a, b, c, ms=1_000)
    assert [n.outcome.freeze for n in (a, b) if n.outcome is not None] == [1, 1]


def test_a_worker_that_can_not_ends_the_wait_at_once(engine: Engine) -> None:
    a, b, c = group(engine)
    drain(engine, "b")
    let(a, b, c, ms=250)
    stands(a, 9, problem="rank 0 is not protected")
    let(a, b, c, a, ms=250)
    assert a.outcome is not None and a.outcome.freeze == 1
    assert asked(a, b) == [None, None]


def test_what_was_told_of_an_older_generation_is_not_sent(engine: Engine) -> None:
    a, b, _ = group(engine)
    a.see(paused=Paused(generation=7, node_id="", incarnation="", reach=3))
    let(a, b, ms=500)
    assert a.agent.view.paused(7) == a.agent.view.paused(1) == {}


def test_a_replacement_that_would_lose_all_is_given_up_and_left_for_a_while(engine: Engine) -> None:
    a, b, c = group(engine)
    for node in (a, b):
        node.see(step=9)
        stands(node, 9, problem="rank 0 is not protected")
    b.see(health=Health(node_id="", incarnation="", fit=False, reason="gpu: lost"))
    frozen: list[bool] = []
    for _ in range(0, VAIN_MS - 10_000, 250):
        for node in (b, a, c):
            outcome = node.round(after_ms=250)
            tell(node)
            if outcome.freeze is None:
                node.see(holdings=None)  # as the edge, when the vault is thawed
        frozen += [n.outcome is not None and n.outcome.freeze is not None for n in (a, b, c)]
    plan = a.agent.view.head()
    assert plan is not None and plan.generation == 1
    assert True in frozen, "the vaults were asked"
    assert True not in frozen[30:], "once, and not over and over"
    assert a.outcome is not None and "training goes on" in a.outcome.waiting_for
    crash(b)
    let(b, a, ms=250)
    assert a.outcome.freeze == 1 and "not yet told what state they hold: a, b" in a.outcome.waiting_for
