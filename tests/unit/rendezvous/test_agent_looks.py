"""What workers are doing, asked for after an alarm or a doubtful failure: rounds of agents around one store."""

from dataclasses import replace

from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.looking import LOOK_MS
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.state import Evidence, Health
from lmres.scout.sighting import GroupSight, OpMark, Sighting, WorkerSight
from tests.unit.rendezvous.kit import Node, let, running

WATCH_MS = 1_500


def sees(
    node: Node, rank: int, *, alarm: bool, entered: int = 10, phase: str = "collective", quiet_ms: int = 9_000
) -> None:
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
        phase_ms=quiet_ms,
        quiet_ms=quiet_ms,
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


def test_an_unfit_node_is_told_once_for_each_reason() -> None:
    a, b = running(Engine(), "a", "b")
    events: list[str] = []
    for reason in ("gpu: lost", "gpu: lost", "", "gpu: lost", "disk: full; gpu: lost"):
        b.see(health=Health(node_id="", incarnation="", fit=not reason, reason=reason))
        events += _events(b, a)
    assert events == ["node_unhealthy"] * 2


def test_the_cause_of_a_plan_is_told_once_though_it_names_a_node_and_no_rank() -> None:
    a, b, c = running(Engine(), "a", "b", "c")
    me = b.agent.me
    cause = Cause(failure_class="hang", node_id="b", incarnation=me.incarnation, host=me.host, detail="found")
    for failure_class in ("hang", "node_unhealthy"):
        before = generation(a)
        evidence = Evidence(
            generation=before,
            reporter="b",
            incarnation=me.incarnation,
            weight="primary",
            cause=replace(cause, failure_class=failure_class),
            boot_id=me.boot_id,
            at_ms=b.now_ms,
        )
        b.see(faults=(*b.inputs.get("faults", ()), evidence))
        told = _events(b, a, c)
        assert generation(a) == before + 1 and told == [failure_class]


def test_what_is_excused_is_never_told_as_a_hang() -> None:
    """A plan for another reason came while one was still within its own time."""
    a, b, c = running(Engine(), "a", "b", "c", watched=True)
    sees(a, 0, alarm=True, quiet_ms=1_600)
    sees(c, 2, alarm=False, entered=9, phase="checkpoint_io", quiet_ms=100)
    sees(b, 1, alarm=False, quiet_ms=1_600)
    told = _events(a, b, c)
    assert generation(a) == 1 and told == []
    finds(b, reaction="recover")
    told = _events(b, a, c)
    assert generation(a) == 2 and told == ["unknown"]


def _events(*nodes: Node, ms: int = 2_000) -> list[str]:
    """The classes of failures that the second of these tells meanwhile."""
    told = []
    for _ in range(0, ms, 250):
        for node in nodes:
            notes = node.round(after_ms=250).notes
            told += [n.fields["failure_class"] for n in notes if n.event == "fault_detected" and node is nodes[1]]
    return told
