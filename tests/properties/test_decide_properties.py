"""``decide`` for any small set of records, sensible or not: it never raises, does not depend on the order in which
records were read, and a plan that follows keeps the rules."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.gemini.inventory import Copy, Holdings, Part, topology_text
from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Observed, decide
from lmres.rendezvous.plan import ActiveNode, Cause, Plan, Quarantined, Streak, Strike
from lmres.rendezvous.resume import Checkpointing, told
from lmres.rendezvous.state import (
    Banned,
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


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    rank, step, origin = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Copy(
        rank=rank,
        step=step,
        origin=origin,
        shared=Part(digest=f"{step}{origin}0".zfill(32), length=1),
        own=Part(digest=f"{step}{origin}1{rank}".zfill(32), length=1),
        log=Part(digest=f"{step}{origin}2{rank}".zfill(32), length=1),
        has=draw(st.sampled_from((("shared", "own", "log"), ("shared", "own", "log"), ("own",)))),
        place=draw(st.sampled_from(("memory", "durable"))),
        finite=draw(st.sampled_from((True, True, True, False))),
        trust="unverified",
        topology=topology_text(nodes=draw(st.integers(1, 3)), local_world_size=1),
    )


@st.composite
def holdings(draw: st.DrawFn) -> tuple[str, Any]:
    node = draw(NODES)
    held = tuple(draw(st.lists(copies(), max_size=5)))
    return KEYS.holdings(node), Holdings(
        node_id=node,
        incarnation=name(node, draw(INCARNATIONS)),
        generation=draw(st.integers(0, 3)),
        address="::1",
        port=1,
        copies=held,
        ever=draw(st.booleans()),
    )


OTHERS = st.sampled_from(
    (
        (KEYS.stop, StopRequest(reason="r")),
        (KEYS.formed(1), Formed(generation=1, master_address="::1", master_port=1)),
        (KEYS.finished, Finished(outcome="failed", exit_code=1, reason="r", generation=1)),
        (KEYS.banned(1, 1), Banned(step=1, origin=1, reason="r")),
        (KEYS.holdings("a"), "junk"),
        (KEYS.plan(4), "junk"),
        (KEYS.member("a"), "junk"),
        (KEYS.hold("a"), "junk"),
    )
)
_OFTEN = members() | gone() | evidence() | plans() | holdings()
RECORDS = st.lists(_OFTEN | _OFTEN | members() | holds() | steps() | OTHERS, max_size=16)
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
    overdue=st.one_of(SETS, st.just(frozenset("abcde"))),
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
@given(configs(), RECORDS, POLICIES, OBSERVED, st.booleans(), st.randoms(use_true_random=False))
def test_decide(config: Any, records: Any, policy: Recovery, observed: Observed, keeps: bool, shuffled: Any) -> None:
    entries, keeping = entries_of(config, records), Checkpointing(enabled=keeps)
    view = view_of(entries)
    decision = decide(view, policy, observed, keeping)
    assert decision == decide(view, policy, observed, keeping)
    shuffled.shuffle(entries)
    assert decision == decide(view_of(entries), policy, observed, keeping)
    if isinstance(decision, Commit):
        check_plan(view, decision.plan)
        check_state(view, decision.plan, observed, keeps)


def check_state(view: View, plan: Plan, observed: Observed, keeps: bool) -> None:
    """A plan that starts workers names a step that is there, once everybody has told."""
    head = view.head()
    assert plan.origin > (head.origin if head is not None else 0)
    if plan.action == "stop":
        return
    if not keeps:
        assert (plan.recovery_step, plan.recovery_origin, set(plan.recovery_source.values())) == (0, 0, {"none"})
        return
    generation = head.generation if head is not None else 0
    held = told(view, generation)
    missing = {m.node_id for m in view.live_members()} - {h.node_id for h in held}
    assert missing <= observed.overdue | observed.silent
    assert all(h.generation == generation and view.is_live(h.node_id, h.incarnation) for h in held)
    assert all(c.origin < plan.origin for h in held for c in h.copies)
    if plan.recovery_step == 0:
        return
    key = (plan.recovery_step, plan.recovery_origin)
    there = {c.rank for h in held for c in h.copies if c.key == key}
    assert there >= set(range(len(plan.active)))
    assert key not in {(b.step, b.origin) for b in view.banned()}
    assert set(plan.recovery_source) == {str(n.slot) for n in plan.active}


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
