"""``decide`` for any small set of records, sensible or not: it never raises, does not depend on the order in which
records were read, and a plan that follows keeps the rules."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Observed, decide
from lmres.rendezvous.plan import ActiveNode, Cause, Plan, Quarantined, Streak, Strike
from lmres.rendezvous.state import (
    Done,
    Evidence,
    Finished,
    Formed,
    Gone,
    Hold,
    Member,
    Ready,
    RunConfig,
    StopRequest,
    View,
)

KEYS = Keys(run="p")
NODES = st.sampled_from("abcde")
INCARNATIONS = st.sampled_from((1, 2))
SETS = st.frozensets(NODES, max_size=3)


def name(node: str, number: int) -> str:
    return f"{node}.{number}"


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, Any]:
    low = draw(st.integers(1, 3))
    return KEYS.config, RunConfig(
        min_nodes=low,
        max_nodes=low + draw(st.integers(0, 2)),
        local_world_size=1,
        role="r",
        heartbeat_interval_ms=500,
        heartbeat_timeout_ms=5000,
        policy=None,
        written_by="a",
        version="1",
    )


@st.composite
def members(draw: st.DrawFn) -> tuple[str, Any]:
    node = draw(NODES)
    return KEYS.member(node), Member(
        node_id=node,
        incarnation=name(node, draw(INCARNATIONS)),
        address="::1",
        host="h",
        boot_id="boot",
        pid=1,
        pid_start=1,
        failure_domain=draw(st.sampled_from("xy")),
    )


@st.composite
def gone(draw: st.DrawFn) -> tuple[str, Any]:
    node = draw(NODES)
    how = draw(st.sampled_from(("left", "lost", "refused")))
    return KEYS.gone(node), Gone(
        node_id=node,
        incarnation=name(node, draw(INCARNATIONS)),
        how=how,
        reason="r",
        by="x",
        planned=draw(st.booleans()),
    )


@st.composite
def holds(draw: st.DrawFn) -> tuple[str, Any]:
    node = draw(NODES)
    kind = draw(st.sampled_from(("drain", "readmit")))
    return KEYS.hold(node), Hold(node_id=node, kind=kind, generation=draw(st.integers(0, 3)), reason="r")


@st.composite
def causes(draw: st.DrawFn) -> Cause:
    node = draw(NODES)
    return Cause(
        failure_class=draw(st.sampled_from(("process_crash", "user_exception", "unknown", "node_unhealthy"))),
        node_id=node,
        incarnation=name(node, draw(INCARNATIONS)),
        host="h",
        detail="d",
        rank=draw(st.none() | st.integers(0, 3)),
        exit_status=draw(st.none() | st.sampled_from((-9, 1))),
        step=draw(st.none() | st.integers(0, 2)),
    )


@st.composite
def evidence(draw: st.DrawFn) -> tuple[str, Any]:
    reporter, generation, number = draw(NODES), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    record = Evidence(
        generation=generation,
        reporter=reporter,
        incarnation=name(reporter, 1),
        weight=draw(st.sampled_from(("primary", "ambiguous", "secondary"))),
        cause=draw(causes()),
        boot_id=draw(st.sampled_from(("", "boot"))),
        at_ms=draw(st.integers(0, 5)),
        fit=draw(st.booleans()),
    )
    return KEYS.evidence(generation, reporter, number), record


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, Any]:
    generation = draw(st.integers(1, 3))
    nodes = draw(st.lists(NODES, unique=True, min_size=1, max_size=3))
    active = tuple(ActiveNode(slot=i, node_id=n, incarnation=name(n, draw(INCARNATIONS))) for i, n in enumerate(nodes))
    return KEYS.plan(generation), Plan(
        plan_id="p",
        generation=generation,
        from_generation=generation - 1,
        action=draw(st.sampled_from(("start", "restart", "replace", "replace", "stop"))),
        failure_class="none",
        active=active,
        standby=(),
        quarantined=tuple(Quarantined(node_id=n, generation=generation, reason="r") for n in draw(SETS)),
        reason="r",
        recovery_source={},
        dismissed=dict.fromkeys(draw(SETS), "r"),
        strikes=tuple(Strike(node_id=n, at_run_ms=0) for n in draw(SETS)),
        streak=Streak(signature="unknown | several workers, no clear cause | step None", count=draw(st.integers(0, 3))),
        exit_code=draw(st.none() | st.just(1)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, Any]:
    node, generation = draw(NODES), draw(st.integers(1, 3))
    incarnation = name(node, draw(INCARNATIONS))
    if draw(st.booleans()):
        return KEYS.done(generation, node), Done(generation=generation, node_id=node, incarnation=incarnation)
    record = Ready(
        generation=generation,
        node_id=node,
        incarnation=incarnation,
        address="::1",
        master_port=1,
        restarts_left=draw(st.none() | st.integers(0, 1)),
    )
    return KEYS.ready(generation, node), record


OTHERS = st.sampled_from(
    (
        (KEYS.stop, StopRequest(reason="r")),
        (KEYS.formed(1), Formed(generation=1, master_address="::1", master_port=1)),
        (KEYS.finished, Finished(outcome="failed", exit_code=1, reason="r", generation=1)),
        (KEYS.plan(4), "junk"),
        (KEYS.member("a"), "junk"),
        (KEYS.hold("a"), "junk"),
    )
)
RECORDS = st.lists(
    members() | members() | gone() | holds() | evidence() | evidence() | plans() | plans() | steps() | OTHERS,
    max_size=14,
)
POLICIES = st.builds(
    Recovery,
    node_strikes=st.integers(1, 2),
    no_progress_limit=st.integers(1, 3),
    on_no_standby=st.sampled_from(("wait", "fail")),
)
OBSERVED = st.builds(
    Observed,
    unconfirmed=SETS,
    silent=SETS,
    late=SETS,
    generation_ms=st.sampled_from((0, 10**6)),
    wait_over=st.booleans(),
)


def view_of(entries: list[Entry]) -> View:
    view = View(keys=KEYS)
    view.apply(entries, len(entries) + 1)
    return view


def entries_of(config: tuple[str, Any], records: list[tuple[str, Any]]) -> list[Entry]:
    """As a store would hold them: each key once, with its last text."""
    found: dict[str, Entry] = {}
    for revision, (key, record) in enumerate([config, *records], start=1):
        value = record if isinstance(record, str) else encode(record)
        found[key] = Entry(key=key, value=value, create_revision=revision, mod_revision=revision)
    return list(found.values())


@settings(max_examples=400)
@given(configs(), RECORDS, POLICIES, OBSERVED, st.randoms(use_true_random=False))
def test_decide(config: Any, records: Any, policy: Recovery, observed: Observed, shuffled: Any) -> None:
    entries = entries_of(config, records)
    view = view_of(entries)
    decision = decide(view, policy, observed)
    assert decision == decide(view, policy, observed)
    shuffled.shuffle(entries)
    assert decision == decide(view_of(entries), policy, observed)
    if isinstance(decision, Commit):
        check_plan(view, decision.plan)


def check_plan(view: View, plan: Plan) -> None:
    head = view.head()
    if head is None:
        assert plan.action == "start"
        return
    assert plan.generation == head.generation + 1
    assert plan.reason
    if plan.action == "stop":
        assert plan.exit_code in (1, 75, 76)
        assert plan.active == head.active
        return
    assert plan.exit_code is None
    active = {n.node_id for n in plan.active}
    aside = {q.node_id for q in plan.quarantined}
    assert len(plan.active) == len(head.active)
    assert not set(plan.standby) & (active | aside | plan.dismissed.keys())
    assert set(plan.charged) <= active
    assert len(plan.charged) <= 1
    for node in plan.active:
        assert view.is_live(node.node_id, node.incarnation)
    changed = [(old, new) for old, new in zip(head.active, plan.active, strict=True) if old != new]
    assert bool(changed) == (plan.action == "replace")
    for old, new in changed:
        assert not view.is_live(old.node_id, old.incarnation) or old.node_id in aside | plan.dismissed.keys()
        assert new.node_id not in {n.node_id for n in head.active} or new.node_id == old.node_id
        assert view.quarantine_reason(new.node_id) is None
    assert replace(plan, plan_id="") != plan
