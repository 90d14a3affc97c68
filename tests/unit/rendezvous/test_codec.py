"""Records to text and back."""

import json
from dataclasses import fields
from typing import Any

import pytest

from lmres.errors import RecordError
from lmres.gemini.inventory import Copy, Holdings, Part
from lmres.rendezvous import state
from lmres.rendezvous.codec import decode, encode, to_plain
from lmres.rendezvous.plan import ActiveNode, Cause, ExceptionInfo, Plan, Quarantined, Streak, Strike
from lmres.scout.sighting import GroupSight, OpMark, Sighting, WorkerSight

CAUSE = Cause(
    failure_class="user_exception",
    node_id="b",
    incarnation="b.1",
    host="host-b",
    detail="ValueError: zu groß \U0001f600 \udc80",
    rank=1,
    exit_status=1,
    exception=ExceptionInfo(type_name="ValueError", message="zu groß", last_lines=("a", "b")),
    step=41,
)
PLAN = Plan(
    plan_id="g2-x",
    generation=2,
    from_generation=1,
    action="replace",
    failure_class="user_exception",
    active=(ActiveNode(slot=0, node_id="a", incarnation="a.1"), ActiveNode(slot=1, node_id="c", incarnation="c.1")),
    standby=("d",),
    quarantined=(Quarantined(node_id="b", generation=2, reason="struck"),),
    reason="because",
    recovery_source={"0": "none", "1": "none"},
    cause=CAUSE,
    charged=("b",),
    dismissed={"b": "no restarts"},
    strikes=(Strike(node_id="b", at_run_ms=5),),
    streak=Streak(signature="s", count=2),
    run_ms=99,
)
RECORDS: tuple[Any, ...] = (
    PLAN,
    state.RunConfig(
        min_nodes=2,
        max_nodes=3,
        local_world_size=1,
        role="r",
        heartbeat_interval_ms=500,
        heartbeat_timeout_ms=5000,
        policy=None,
        written_by="a",
        version="1",
    ),
    state.Member(
        node_id="a",
        incarnation="a.1",
        address="::1",
        host="h",
        boot_id="b",
        pid=1,
        pid_start=2,
        failure_domain="rack",
    ),
    state.Door(node_id="a", incarnation="a.1"),
    state.Lease(incarnation="a.1", counter=3, step=None),
    state.Gone(node_id="a", incarnation="a.1", how="lost", reason="quiet", by="b"),
    state.Hold(node_id="a", kind="drain", generation=3, reason="m"),
    state.StopRequest(reason="enough"),
    state.Evidence(
        generation=2, reporter="b", incarnation="b.1", weight="primary", cause=CAUSE, boot_id="x", at_ms=7, fit=False
    ),
    state.Ready(generation=2, node_id="a", incarnation="a.1", address="::1", master_port=1, restarts_left=None),
    state.Formed(generation=2, master_address="::1", master_port=1),
    state.Done(generation=2, node_id="a", incarnation="a.1"),
    state.Recovered(generation=2, node_id="a", cause="c", phases={"detect_s": 0.25, "stop_s": None}),
    state.Finished(outcome="succeeded", exit_code=0, reason="r", generation=2),
    state.Banned(step=5, origin=2, reason="not finite"),
    state.Parted(node_id="b", incarnation="i", by="a", by_incarnation="j", number=2, back=True),
    state.Health(node_id="a", incarnation="a.1", fit=False, reason="no link"),
    state.Paused(generation=2, node_id="a", incarnation="a.1", reach=8, step=7),
    Sighting(
        generation=2,
        node_id="a",
        incarnation="a.1",
        number=1,
        alarm=True,
        timeout_ms=3000,
        workers=(
            WorkerSight(
                rank=0,
                local_rank=0,
                pid=7,
                step=5,
                phase="backward",
                phase_ms=3100,
                quiet_ms=3100,
                groups=(
                    GroupSight(
                        name="0",
                        ranks=(0, 1),
                        entered=4,
                        left=3,
                        recent=(OpMark(number=4, op="allreduce", shape="float32[8]", step=5),),
                    ),
                ),
                stack=("train.py:7 main",),
            ),
        ),
    ),
    Holdings(
        node_id="a",
        incarnation="a.1",
        generation=2,
        address="::1",
        port=4000,
        copies=(
            Copy(
                rank=0,
                step=5,
                origin=2,
                shared=Part(digest="0" * 32, length=7),
                own=Part(digest="1" * 32, length=8),
                log=Part(digest="2" * 32, length=0),
                has=("shared", "log"),
                place="memory",
                finite=True,
                trust="unverified",
                topology="1 ranks as 1 nodes of 1",
            ),
        ),
        ever=True,
    ),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_round_trip(record: Any) -> None:
    text = encode(record)
    assert "\n" not in text
    assert decode(type(record), text) == record
    assert encode(decode(type(record), text)) == text


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_every_prefix_of_a_record_is_refused(record: Any) -> None:
    text = encode(record)
    for length in range(len(text)):
        with pytest.raises(RecordError):
            decode(type(record), text[:length])


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_another_kind_is_refused(record: Any) -> None:
    for other in RECORDS:
        if type(other) is not type(record):
            with pytest.raises(RecordError):
                decode(type(record), encode(other))


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_unknown_fields_are_ignored_and_missing_ones_named(record: Any) -> None:
    body = json.loads(encode(record))
    assert decode(type(record), json.dumps({**body, "of_a_newer_version": [1, {}]})) == record
    required = next(f.name for f in fields(record) if f.name in body)
    del body[required]
    with pytest.raises(RecordError, match=required):
        decode(type(record), json.dumps(body))


def broken(record: object, **changes: Any) -> str:
    return json.dumps({**json.loads(encode(record)), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": "2"},
        {"generation": 2.0},
        {"generation": True},
        {"generation": None},
        {"generation": 7},
        {"action": "explode"},
        {"action": 1},
        {"active": {}},
        {"active": [{"slot": 1, "node_id": "a", "incarnation": "a"}]},
        {"active": [[]]},
        {"standby": ["a", 1]},
        {"dismissed": ["a"]},
        {"dismissed": {"a": 1}},
        {"cause": {}},
        {"cause": []},
        {"exit_code": "1"},
    ],
    ids=repr,
)
def test_wrong_values_in_a_plan_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        decode(Plan, broken(PLAN, **changes))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 400, "1" + "0" * 5000])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = encode(state.Recovered(generation=1, node_id="a", cause="c", phases={"detect_s": 7.25}))
    with pytest.raises(RecordError):
        decode(state.Recovered, text.replace("7.25", number))


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '"x"', "{", "\x00", "{}", '{"record":7}', '{"record":"Door"}'])
def test_junk_is_refused(text: str) -> None:
    with pytest.raises(RecordError):
        decode(state.Door, text)


@pytest.mark.parametrize("depth", [50, 500, 5_000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    with pytest.raises(RecordError):
        decode(state.Door, deep)
    with pytest.raises(RecordError):
        decode(state.Door, '{"record":"Door","node_id":' + deep + ',"incarnation":"a"}')


def test_messages_stay_short() -> None:
    with pytest.raises(RecordError) as caught:
        decode(state.Door, '{"record":"Door","incarnation":"a","node_id":[' + "1," * 100_000 + "1]}")
    assert len(str(caught.value)) < 300


def test_plain_values_for_people() -> None:
    plain = to_plain(PLAN)
    assert plain["cause"]["exception"]["last_lines"] == ["a", "b"]
    assert json.loads(json.dumps(plain)) == plain
