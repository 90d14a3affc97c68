"""What workers are doing, asked for after an alarm or a doubtful failure: rounds of agents around one store."""

from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.looking import LOOK_MS
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.state import Evidence
from lmres.scout.sighting import GroupSight, OpMark, Sighting, WorkerSight
from tests.unit.rendezvous.kit import Node, let, running

WATCH_MS = 1_500


def sees(node: Node, rank: int, *, alarm: bool, entered: int = 10, phase: str = "collective") -> None:
    before = node.inputs.get("sighting")
    mark = OpMark(number=entered, op="allreduce", shape="", step=5)
    waits = phase == "collective"
    group = GroupSight(name="0", ranks=(0, 1, 2), entered=entered, left=entered - waits, recent=(mark,))
    worker = WorkerSight(
        rank=rank,
        local_rank=0,
        pid=1,
        step=5,
        phase=phase,  # type: ignore[arg-type]
        phase_ms=9_000,
        quiet_ms=9_000,
        groups=(group,),
        timeout_ms=WATCH_MS,
    )
    sighting = Sighting(
        generation=1,
        node_id=node.name,
        incarnation="",
        number=1 + (before.number if before is not None else 0),
        alarm=alarm,
        timeout_ms=WATCH_MS,
        workers=(worker,),
    )
    node.see(sighting=sighting)


def finds(node: Node, *, reaction: str, weight: str = "primary") -> None:
    me, before = node.agent.me, node.inputs.get("faults", ())
    cause = Cause(
        failure_class="unknown", node_id=me.node_id, incarnation=me.incarnation, host=me.host, detail="found", rank=0
    )
    found = Evidence(
        generation=1,
        reporter=me.node_id,
        incarnation=me.incarnation,
        weight=weight,  # type: ignore[arg-type]
        cause=cause,
        boot_id=me.boot_id,
        at_ms=node.now_ms,
        reaction=reaction,  # type: ignore[arg-type]
    )
    node.see(faults=(*before, found))


def generation(node: Node) -> int:
    head = node.agent.view.head()
    return head.generation if head is not None else 0


def test_everybody_is_asked_once_and_nobody_twice() -> None:
    a, b, c = running(Engine(), "a", "b", "c", watched=True)
    sees(a, 0, alarm=True)
    let(a, b, c, ms=250)
    assert (a.outcome.look, b.outcome.look, c.outcome.look) == (None, 1, 1)
    sees(b, 1, alarm=False)
    let(b, a, c, ms=250)
    assert (b.outcome.look, c.outcome.look) == (None, 1)
    sees(c, 2, alarm=False, entered=9, phase="user")
    let(c, a, b, ms=1_000)
    assert generation(a) == 2
    assert a.agent.view.head().cause.node_id == "c"


def test_an_alarm_that_is_withdrawn_is_forgotten() -> None:
    a, b, c = running(Engine(), "a", "b", "c", watched=True)
    sees(a, 0, alarm=True)
    let(a, b, c, ms=500)
    sees(a, 0, alarm=False, entered=12)
    let(a, b, c, ms=LOOK_MS + 1_000)
    assert generation(a) == 1 and b.outcome.look is None
    sees(a, 0, alarm=True, entered=20)
    let(a, b, c, ms=500)
    assert b.outcome.look == 1, "and the time to answer begins anew"
    assert generation(a) == 1


def test_who_does_not_look_is_not_waited_for_though_alarms_are_raised_again_and_again() -> None:
    """The plan listens for a while before it is written: meanwhile nobody may be waited for again."""
    a, b, c = running(Engine(), "a", "b", "c", watched=True)
    for _ in range(6):
        sees(a, 0, alarm=True)
        sees(b, 1, alarm=True)
        let(a, b, c, ms=WATCH_MS)
        if generation(a) > 1:
            break
    assert generation(a) == 2
    assert "not heard: c" in a.agent.view.head().reason


def test_a_doubtful_failure_waits_for_those_who_have_not_been_heard_since_not_since_an_earlier_finding() -> None:
    a, b, c = running(Engine(), "a", "b", "c")
    finds(a, reaction="report")
    let(a, b, c, ms=1_000)
    finds(a, reaction="recover", weight="secondary")
    let(a, b, ms=1_000)
    assert generation(a) == 1 and "not yet heard from: c" in a.outcome.waiting_for
    let(a, b, c, ms=1_000)
    assert generation(a) == 2
