"""Commands that look at a run and speak to it: from records in a memory store, and from files of events."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmres.cli import hold, incidents, observer, status, stop
from lmres.cli.heartbeats import Heartbeat, watch_heartbeats
from lmres.cli.hold import Held, hold_node
from lmres.cli.incident_events import choose_run, incidents_of_events, read_events
from lmres.cli.incident_records import incidents_of_run
from lmres.cli.main import main
from lmres.cli.observer import Beat, NoSuchRun, Observer
from lmres.cli.run_selection import RunSelection, add_run_options, select_run
from lmres.cli.run_view import recovery_policy, run_state
from lmres.cli.status import render_status, status_value
from lmres.cli.text import clean, table
from lmres.errors import ConfigError, StoreUnavailable
from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Put, Txn, TxnResult
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Observed, decide
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.memory import MemoryStore
from lmres.rendezvous.notes import fault_note, plan_note
from lmres.rendezvous.plan import ActiveNode, Cause, ExceptionInfo, Plan, Quarantined, Strike
from lmres.rendezvous.state import (
    Done,
    Evidence,
    Finished,
    Formed,
    Gone,
    Hold,
    Lease,
    Member,
    Ready,
    Recovered,
    RunConfig,
    StopRequest,
)

Captured = pytest.CaptureFixture[str]
KEYS = Keys(run="demo")
TCP = RunSelection(endpoint="h:1", store_type="tcp", run_id="demo", keys=KEYS, host="h", port=1)
EVIL = "evil\x1b[2J\r\n\u202e\x07"
CRASH = Cause(
    failure_class="process_crash",
    node_id="b",
    incarnation="b1",
    host="host-b",
    detail="killed by SIGKILL",
    rank=1,
    local_rank=0,
    pid=77,
    exit_status=-9,
    step=12,
)


class Run:
    """A run of nodes in a memory store, with the first MIN of them in generation 1."""

    def __init__(self, *nodes: str, active: int = 2, policy: str | None = '{"recovery": {}}', maximum: int = 4) -> None:
        self.store = MemoryStore()
        self.observer = Observer(TCP, self.store)
        config = RunConfig(
            min_nodes=active,
            max_nodes=maximum,
            local_world_size=1,
            role="default",
            heartbeat_interval_ms=500,
            heartbeat_timeout_ms=5000,
            policy=policy,
            written_by="a",
            version="0",
        )
        self.put(KEYS.config, config)
        for node in nodes:
            self.join(node)
        if len(nodes) >= active:
            self.plan(self.first_plan(nodes[:active], nodes[active:]))
            self.form(1)

    def put(self, key: str, record: object) -> None:
        self.raw(key, encode(record))

    def raw(self, key: str, text: str) -> None:
        self.store.transact(Txn(success=(Put(key=key, value=text),)), timeout_ms=1)

    def join(self, node: str, incarnation: str = "", host: str = "") -> None:
        member = Member(
            node_id=node,
            incarnation=incarnation or f"{node}1",
            address="10.0.0.1",
            host=host or f"host-{node}",
            boot_id="boot",
            pid=7,
            pid_start=1,
            failure_domain=node,
        )
        self.put(KEYS.member(node), member)
        self.put(KEYS.lease(node), Lease(incarnation=member.incarnation, counter=1, step=12))

    def first_plan(self, active: tuple[str, ...], standby: tuple[str, ...]) -> Plan:
        return Plan(
            plan_id="g1-first",
            generation=1,
            from_generation=0,
            action="start",
            failure_class="none",
            active=tuple(ActiveNode(slot=i, node_id=n, incarnation=f"{n}1") for i, n in enumerate(active)),
            standby=standby,
            quarantined=(),
            reason="all have joined",
            recovery_source={},
            dismissed={},
        )

    def plan(self, plan: Plan) -> None:
        self.put(KEYS.plan(plan.generation), plan)

    def form(self, generation: int) -> None:
        self.put(KEYS.formed(generation), Formed(generation=generation, master_address="x", master_port=1))

    def fail(self, cause: Cause = CRASH, weight: Any = "primary", reporter: str = "b", at_ms: int = 1000) -> None:
        head = self.observer.read().view.head()
        assert head is not None
        evidence = Evidence(
            generation=head.generation,
            reporter=reporter,
            incarnation=f"{reporter}1",
            weight=weight,
            cause=cause,
            boot_id="boot",
            at_ms=at_ms,
        )
        self.put(KEYS.evidence(head.generation, reporter, at_ms), evidence)

    def settle(self) -> Plan:
        """Commits what the agents would decide now, and forms it."""
        view = self.observer.read().view
        decision = decide(view, recovery_policy(view.config), Observed())
        assert isinstance(decision, Commit), decision
        self.plan(decision.plan)
        self.form(decision.plan.generation)
        return decision.plan

    def recovered(self, generation: int, node: str, total_s: float) -> None:
        phases = {"detect_s": 0.1, "decide_s": 0.2, "first_step_s": 1.0, "restore_s": None, "total_s": total_s}
        self.put(
            KEYS.recovered(generation, node), Recovered(generation=generation, node_id=node, cause="x", phases=phases)
        )

    def status(self, beats: dict[str, Heartbeat] | None = None) -> dict[str, Any]:
        value = status_value(TCP, self.observer.read(), beats or {})
        text = render_status(value, 100)
        assert max(map(len, text.splitlines())) <= 100 and text.replace("\n", "").isprintable(), text
        return json.loads(json.dumps(value))  # type: ignore[no-any-return]

    def roles(self) -> dict[str, str]:
        return {n["node_id"]: n["role"] for n in self.status()["nodes"]}

    def incidents(self) -> list[Any]:
        found = incidents_of_run(self.observer.read().view)
        value = {"run_id": "demo", "unreadable": []}
        for listed in (True, False):
            text = incidents.render(value, found, listed=listed, width=100)
            assert max(map(len, text.splitlines())) <= 100 and text.replace("\n", "").isprintable(), text
        return found

    def drain(self, node: str) -> Held:
        return hold_node(self.observer, node, "drain", "disk")

    def readmit(self, node: str) -> Held:
        return hold_node(self.observer, node, "readmit", "new disk")


# -- which run --------------------------------------------------------------------------------------------------------


def select(*argv: str, **env: str) -> RunSelection:
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    return select_run(parser.parse_args(argv), env)


def test_a_run_is_selected_as_torchrun_does() -> None:
    found = select("--rdzv-endpoint", "h:1", "--rdzv-id", "a/b")
    assert (found.host, found.port, found.store_type, found.keys.run) == ("h", 1, "tcp", "a%2Fb")
    conf = "store_type=file, timeout=3,policy=/x=y"
    found = select(PET_RDZV_ENDPOINT="/x/y", PET_RDZV_CONF=conf, PET_RDZV_ID="r")
    assert (found.path, found.store_type, found.run_id) == ("/x/y", "file", "r")
    assert select("--rdzv-endpoint=h:1", "--store-type=tcp", PET_RDZV_CONF=conf).store_type == "tcp"
    assert select("--rdzv-endpoint=h:1").run_id == "none"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ((), "--rdzv-endpoint"),
        (("--rdzv-endpoint=h:x",), "port"),
        (("--rdzv-endpoint=h:1", "--store-type=flie"), "did you mean 'file'"),
        (("--rdzv-endpoint=h:1", "--store-type=etcd"), "not available"),
        (("--rdzv-endpoint=h:1", "--rdzv-conf=store_type"), "KEY=VALUE"),
        (("--rdzv-endpoint=h:1", "--rdzv-id=a\nb"), "--rdzv-id"),
    ],
)
def test_a_bad_selection(argv: tuple[str, ...], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        select(*argv)


@pytest.fixture
def foreign() -> Iterator[str]:
    """A service that is none of ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-other\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize("command", [["status"], ["incidents"], ["drain", "a"], ["readmit", "a"], ["stop"]])
def test_no_store_is_69_in_one_line_and_in_json(command: list[str], tmp_path: Path, capsys: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    path = tmp_path / "store"
    for where in (["--rdzv-endpoint", endpoint], ["--rdzv-endpoint", str(path), "--store-type", "file"]):
        assert main([*command, *where]) == 69
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "no store at" in err
        assert main([*command, *where, "--json"]) == 69
        out, err = capsys.readouterr()
        assert json.loads(out)["exit_code"] == 69 and err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_service_is_69(foreign: str, capsys: Captured) -> None:
    assert main(["status", "--rdzv-endpoint", foreign]) == 69
    assert "not a store of lmres" in capsys.readouterr().err


def test_usage_errors_are_one_json_value_too(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--json", "drain"])
    out, err = capsys.readouterr()
    assert caught.value.code == 64 and json.loads(out)["exit_code"] == 64 and err == ""


def test_a_store_file_is_read_and_never_made_or_kept_open(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "store"
    where = ["--rdzv-endpoint", str(path), "--store-type", "file"]
    path.touch()
    assert main(["status", *where]) == 69 and path.stat().st_size == 0
    store = FileStore(path)
    store.transact(Txn(), timeout_ms=1000)
    run = Run()
    for entry in run.store.transact(Txn(success=(observer.Range(prefix="/"),)), timeout_ms=1).reads[0]:
        store.transact(Txn(success=(Put(key=entry.key, value=entry.value),)), timeout_ms=1000)
    assert main(["status", *where, "--rdzv-id", "other"]) == 69
    assert "runs there: demo" in capsys.readouterr().err
    with Observer(select(*where, "--rdzv-id=demo")) as ours:
        assert ours.read().view.config is not None
        assert store.delete(timeout_ms=2000), "an observer must not keep the last agent from removing the store"
        with pytest.raises(NoSuchRun):
            ours.read()
    assert list(tmp_path.iterdir()) == []


def test_a_store_file_that_was_made_by_looking_at_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)  # as if it had been removed and made anew just before the look
    store.transact(Txn(), timeout_ms=1000)
    store.close()
    with Observer(select("--rdzv-endpoint", str(path), "--store-type=file")) as ours, pytest.raises(NoSuchRun):
        ours.read()
    assert not path.exists()


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_running_run() -> None:
    run = Run("a", "b", "c")
    value = run.status({"a": Heartbeat(moved=True, age_s=0.2), "b": Heartbeat(moved=False, age_s=1.25)})
    assert (value["state"], value["generation"], value["world_size"], value["standbys"]) == ("running", 1, 2, 1)
    assert run.roles() == {"a": "active", "b": "active", "c": "standby"}
    a, b, c = value["nodes"]
    assert (a["slot"], a["ranks"], a["heartbeat_age_s"], a["heartbeat_moved"], a["step"]) == (0, [0], 0.2, True, 12)
    assert b["heartbeat_moved"] is False and c["heartbeat_age_s"] is None and c["ranks"] == []
    assert value["plan"]["action"] == "start" and any("checkpoint" in line for line in value["not_covered"])
    text = render_status(value, 100)
    assert "run demo at h:1: running" in text and "> 1.2 s" in text and "active slot 1" in text


def test_states() -> None:
    run = Run("a")
    value = run.status()
    assert value["state"] == "forming" and "1 of 2 nodes have joined (a)" in value["reason"]
    assert run.roles() == {"a": "joined"}
    run = Run("a", "b")
    run.fail()
    assert run.status()["state"] == "recovering" and "killed by SIGKILL" in run.status()["reason"]
    plan = run.settle()
    assert run.status()["state"] == "running" and "no step" in run.status()["reason"]
    run.recovered(plan.generation, "a", 2.0)
    assert run.status()["reason"] == "generation 2 is running"
    run.put(KEYS.gone("b"), Gone(node_id="b", incarnation="b1", how="lost", reason="no heartbeat", by="a"))
    value = run.status()
    assert value["state"] == "waiting_for_standby" and "waiting for a standby" in value["reason"]
    assert value["nodes"][-1]["role"] == "gone" and "lost: no heartbeat" in value["nodes"][-1]["reason"]
    run.join("c")
    assert run.status()["state"] == "recovering"
    run.plan(replace(run.settle(), generation=4, from_generation=3, plan_id="g4"))
    ready = Ready(generation=4, node_id="a", incarnation="a1", address="x", master_port=1, restarts_left=0)
    run.put(KEYS.ready(4, "a"), ready)
    value = run.status()
    assert value["state"] == "recovering" and value["reason"] == "not ready yet: c"
    assert "no restarts left" in render_status(value, 100)
    run.put(KEYS.finished, Finished(outcome="succeeded", exit_code=0, reason="all ended", generation=4))
    assert run.status()["state"] == "succeeded"


def test_a_run_that_was_stopped() -> None:
    run = Run("a", "b")
    run.put(KEYS.stop, StopRequest(reason="enough"))
    assert run.status()["stop_requested"] == "enough"
    run.settle()
    value = run.status()
    assert value["state"] == "failed" and "enough" in value["reason"] and value["plan"]["exit_code"] == 1


def test_all_done_has_succeeded() -> None:
    run = Run("a", "b")
    for node in "ab":
        run.put(KEYS.done(1, node), Done(generation=1, node_id=node, incarnation=f"{node}1"))
    assert run.status()["state"] == "succeeded"


def test_what_others_wrote_is_cleaned_and_what_can_not_be_read_is_named() -> None:
    run = Run("a", "b", policy="not JSON")
    run.join("c", host=EVIL)
    run.put(KEYS.gone("c"), Gone(node_id="c", incarnation="c1", how="left", reason=EVIL, by="c"))
    run.raw(f"{KEYS.reg}member/{EVIL}", "{")
    run.raw(KEYS.lease("a"), EVIL)
    run.fail(replace(CRASH, detail=EVIL, exception=ExceptionInfo(type_name="X", message=EVIL, last_lines=(EVIL,) * 3)))
    value = run.status()  # checks that the text is printable and fits
    assert {item["key"] for item in value["unreadable"]} == {f"{KEYS.reg}member/{EVIL}", KEYS.lease("a")}
    assert value["nodes"][0]["step"] is None
    run.settle()
    (found,) = run.incidents()
    assert found.evidence[0].exception.message == EVIL
    assert "\n".join(incidents.render_timeline(found, 100)).count("| evil") == 3
    text = render_status(value, 100)
    assert "2 unreadable" in text and "evil\\x1b[2J\\r\\n\\u202e\\x07" in text


def test_numbers_that_no_run_has() -> None:
    run = Run("a", "b")
    config = run.observer.read().view.config
    assert config is not None
    run.put(KEYS.config, replace(config, local_world_size=10**300, heartbeat_interval_ms=-(10**400)))
    value = run.status()
    assert value["world_size"] is None and value["nodes"][0]["ranks"] == []
    run.fail(at_ms=10**400)
    run.fail(at_ms=5)
    run.incidents()


def test_heartbeats_are_watched_until_all_have_moved() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def read() -> dict[str, Beat]:
        return {"a": Beat(lease=None, revision=1 + int(now / 0.5)), "b": Beat(lease=None, revision=1)}

    def watch(*nodes: str) -> dict[str, Heartbeat]:
        return watch_heartbeats(read, read(), nodes=nodes, interval_s=0.5, clock=lambda: now, sleep=sleep)

    assert watch("a")["a"] == Heartbeat(moved=True, age_s=0.0) and now == pytest.approx(0.5)
    both = watch("a", "b")
    assert now == pytest.approx(1.8, abs=0.2) and both["a"].moved and both["a"].age_s < 0.5
    assert not both["b"].moved and both["b"].age_s >= 1.25


def test_the_policy_of_another_version() -> None:
    config = Run("a").observer.read().view.config
    assert config is not None

    def policy(text: str | None) -> Recovery:
        return recovery_policy(replace(config, policy=text))

    assert policy('{"recovery": {"node_strikes": 7, "new": 1}}') == Recovery(node_strikes=7)
    for text in (None, "[", "[]", "3", "{}", '{"recovery": 3}', '{"recovery": {"node_strikes": "x"}}'):
        assert policy(text) == Recovery()


# -- incidents --------------------------------------------------------------------------------------------------------


def test_an_incident_from_evidence_to_phases() -> None:
    run = Run("a", "b", "c")
    assert run.incidents() == []
    error = ExceptionInfo(type_name="torch.DistBackendError", message="closed", last_lines=("Traceback", "  closed"))
    broken = replace(
        CRASH,
        failure_class="unknown",
        node_id="a",
        rank=0,
        host="host-a",
        detail="closed",
        exit_status=1,
        exception=error,
    )
    run.fail(broken, "secondary", "a", at_ms=1500)
    run.fail(at_ms=1000)
    pending = run.incidents()[-1]
    assert (pending.id, pending.action, pending.plan_id, pending.cause) == (2, "pending", None, CRASH.headline())
    run.settle()
    run.recovered(2, "a", 2.0)
    run.recovered(2, "b", 3.5)
    (found,) = run.incidents()
    assert (found.id, found.action, found.failure_class, found.total_s) == (2, "restart", "process_crash", 3.5)
    assert found.cause == CRASH.headline() and found.charged == ("b",)
    first, second = found.evidence
    assert (first.reporter, first.first, first.at_s, first.exception.type) == ("a", False, 0.5, error.type_name)
    assert (second.reporter, second.first, second.at_s, second.exit_status) == ("b", True, 0.0, -9)
    assert [(p.node_id, p.phases["total_s"]) for p in found.phases] == [("a", 2.0), ("b", 3.5)]
    text = "\n".join(incidents.render_timeline(found, 100))
    for part in (
        "recovered in 3.50 s",
        "signal 9",
        "<- first cause",
        "slot 1: b",
        "decide",
        "max-restarts: b",
    ):
        assert part in text
    assert "restore" not in text and "Traceback" not in text, "a broken connection is an echo"


def test_a_lost_node_and_a_second_strike() -> None:
    run = Run("a", "b", "c", "d")
    run.put(KEYS.gone("b"), Gone(node_id="b", incarnation="b1", how="lost", reason="no heartbeat for 5.0 s", by="a"))
    run.settle()
    run.put(KEYS.gone("b"), Gone(node_id="b", incarnation="b2", how="left", reason="later", by="b"))
    for _ in range(2):
        run.fail(replace(CRASH, node_id="c", incarnation="c1"), reporter="c")
        run.settle()
    lost, crash, struck = run.incidents()
    assert lost.evidence[0].first and lost.evidence[0].headline.endswith("no heartbeat for 5.0 s")
    assert [(m.slot, m.before, m.after) for m in lost.moves] == [(0, "a", "a"), (1, "b", "c")]
    assert (crash.action, struck.action) == ("restart", "replace")
    assert [s.node_id for s in struck.quarantined] == ["c"] and struck.quarantined[0].reason
    text = "\n".join(incidents.render_list(run.incidents(), 100))
    assert text.count("\n") == 3 and "node_lost" in text
    assert [i.id for i in incidents.choose(run.incidents(), "3")] == [3]
    assert [i.id for i in incidents.choose(run.incidents(), "last")] == [4]
    with pytest.raises(ConfigError, match="no incident '9'; valid here: 2, 3, 4, last"):
        incidents.choose(run.incidents(), "9")


def event(name: str, at: int, time: float, node: str = "a", **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, "run_id": "demo", "node_id": node, "generation": at, **fields}


def told_by(run: Run, node: str, start: float) -> list[dict[str, Any]]:
    """What this agent writes of the run's plans and evidence."""
    lines, view = [], run.observer.read().view
    for plan in view.plans_after(0):
        note = plan_note(plan)
        lines.append(event(note.event, plan.generation, start + plan.generation, node, **note.fields))
        for e in view.evidence(plan.generation):
            note = fault_note(e.cause, e.weight, e.reporter, plan.generation)
            lines.append(event(note.event, plan.generation, start + plan.generation + 0.5, node, **note.fields))
    return lines


def write_events(folder: Path, lines: list[dict[str, Any]], tail: bytes = b"") -> Path:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_bytes(text.encode() + tail)
    return folder


def test_incidents_from_the_events_of_several_agents(tmp_path: Path, capsys: Captured) -> None:
    run = Run("a", "b", "c")
    run.fail()
    run.settle()
    phases = {"detect_s": 0.1, "total_s": 3.0, "first_step_s": None}
    done = event("recovery_completed", 2, 105.0, "a", cause="x", **phases)
    torn = b'{"time": 106.0, "event": "recovery_comp'
    one = write_events(tmp_path / "a", [*told_by(run, "a", 100.0), done], torn)
    odd = [event("fault_detected", 1, 101.0, suspects=3, evidence=["x"], detail=None), {"event": "plan_committed"}]
    two = write_events(tmp_path / "b", [*told_by(run, "b", 100.01), *odd, event("training_resumed", 2, 104.0)])
    log = read_events([one, two / "events.jsonl"])
    assert [item["key"].rsplit(" ", 1)[-1] for item in log.unreadable] == ["5", "5"]
    run_id, events = choose_run(log, None)
    (found,) = incidents_of_events(events)
    (stored,) = run.incidents()
    assert run_id == "demo"
    assert (found.id, found.action, found.cause, found.plan_id) == (2, "restart", stored.cause, stored.plan_id)
    assert [(w.reporter, w.first, w.exit_status) for w in found.evidence if w.headline] == [("b", True, -9)]
    assert found.moves == stored.moves and found.total_s == 3.0
    assert main(["incidents", "last", "--events", str(one), str(two), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["source"] == "events" and value["incidents"][0]["id"] == 2 and len(value["unreadable"]) == 2
    assert main(["incidents", "--events", str(one)]) == 0
    out = capsys.readouterr().out
    assert "recovered in 3.00 s" in out and "1 unreadable" in out and "killed by SIGKILL" in out
    assert main(["incidents", "7", "--events", str(one)]) == 64
    assert "valid here: 2" in capsys.readouterr().err
    assert main(["incidents", "--events", str(one), "--rdzv-id", "x"]) == 64
    assert main(["incidents", "--events", str(tmp_path)]) == 64


def test_events_of_an_earlier_run_with_the_same_id(tmp_path: Path) -> None:
    old, new = Run("a", "b"), Run("a", "b", "c")
    old.fail()
    old.settle()
    new.plan(replace(new.first_plan(("a", "b"), ("c",)), plan_id="g1-other"))
    folder = write_events(tmp_path / "a", [*told_by(old, "a", 100.0), *told_by(new, "a", 500.0)])
    _, events = choose_run(read_events([folder]), None)
    assert incidents_of_events(events) == []


def test_a_fault_without_a_plan_in_the_events(tmp_path: Path) -> None:
    run = Run("a", "b")
    run.fail()
    folder = write_events(tmp_path / "a", told_by(run, "a", 100.0))
    (found,) = incidents_of_events(choose_run(read_events([folder]), None)[1])
    assert (found.id, found.action) == (2, "pending")
    assert "no plan yet" in "\n".join(incidents.render_timeline(found, 100))


def test_no_events_at_all(tmp_path: Path, capsys: Captured) -> None:
    folder = write_events(tmp_path / "a", [], b"x" * 3_000_000 + b"\n{}\n")
    assert main(["incidents", "--events", str(folder)]) == 0
    assert "no incidents" in capsys.readouterr().out


# -- drain and readmit ------------------------------------------------------------------------------------------------


def test_drain_of_an_active_node_and_back() -> None:
    run = Run("a", "b", "c")
    held = run.drain("b")
    assert (held.changed, held.replaced_by, held.role_before) == (True, "c", "active") and "at once" in held.message
    assert run.roles()["b"] == "active" and not run.drain("b").changed
    plan = run.settle()
    assert plan.active_map() == {"0": "a", "1": "c"} and run.roles()["b"] == "drained"
    held = run.readmit("b")
    assert held.changed and held.role == "standby" and "a standby again" in held.message
    assert run.roles()["b"] == "standby" and not run.readmit("b").changed
    run.fail(replace(CRASH, node_id="c", incarnation="c1"), reporter="c")
    assert run.settle().quarantined == ()


def test_drain_without_a_standby_waits_and_can_be_taken_back() -> None:
    run = Run("a", "b")
    held = run.drain("b")
    assert held.replaced_by is None and "until one joins" in held.message
    assert run.status()["state"] == "running" and "training goes on" in run.status()["reason"]
    held = run.readmit("b")
    assert "keeps slot 1" in held.message and run.status()["reason"] == "generation 1 is running"


def test_drain_of_a_standby_and_of_one_that_is_gone() -> None:
    run = Run("a", "b", "c")
    assert "no slot" in run.drain("c").message and run.roles()["c"] == "drained"
    assert run.readmit("c").role == "standby"
    run.put(KEYS.gone("c"), Gone(node_id="c", incarnation="c1", how="left", reason="x", by="c"))
    assert "gone" in run.drain("c").message
    run.join("c", "c2")
    assert run.roles()["c"] == "drained"


def test_drain_before_the_run_starts() -> None:
    run = Run("a")
    assert run.drain("a").generation == 0
    run.join("b")
    run.join("c")
    assert run.settle().active_map() == {"0": "b", "1": "c"}
    assert run.readmit("a").role == "standby"


def test_a_node_quarantined_by_strikes_is_readmitted_with_a_clean_record() -> None:
    run = Run("a", "b", "c")
    for _ in range(2):
        run.fail()
        plan = run.settle()
    assert [q.node_id for q in plan.quarantined] == ["b"] and run.roles()["b"] == "quarantined"
    assert run.readmit("b").role == "standby"
    # A strike on the other node: the plan forgets the quarantine, and the node may take the slot.
    for step in (20, 30):
        run.fail(replace(CRASH, node_id="c", incarnation="c1", step=step), reporter="c")
        plan = run.settle()
    assert plan.active_map()["1"] == "b" and [q.node_id for q in plan.quarantined] == ["c"]
    run.fail()
    assert run.settle().active_map()["1"] == "b", "strikes from before the readmission do not count"


def test_a_readmission_is_not_for_a_later_quarantine() -> None:
    run = Run("a", "b", "c")
    run.drain("b")
    run.readmit("b")
    for _ in range(2):
        run.fail()
        run.settle()
    assert run.roles()["b"] == "quarantined" and run.readmit("b").role == "standby"


def test_readmit_warns_of_more_agents_than_the_run_takes() -> None:
    run = Run("a", "b", "c", maximum=3)
    run.drain("b")
    run.settle()
    run.join("d")
    assert "exit code 64: d" in run.readmit("b").message


def test_drain_of_nobody_names_the_known_ones() -> None:
    run = Run("node-1", "node-2")
    with pytest.raises(
        ConfigError, match=r"no node 'node-3' in this run; did you mean 'node-.'\? valid here: node-1, node-2"
    ):
        run.drain("node-3")
    with pytest.raises(ConfigError, match="valid here: node-1, node-2"):
        run.readmit(EVIL)


def test_a_run_that_is_over_takes_no_orders() -> None:
    run = Run("a", "b")
    run.put(KEYS.finished, Finished(outcome="succeeded", exit_code=0, reason="done", generation=1))
    with pytest.raises(NoSuchRun, match="over"):
        run.drain("a")
    assert stop.stop_run(run.observer, "x")["over"]


class Meddler:
    """A store where somebody else writes just before the first writes, and where the answer to one is lost."""

    def __init__(self, run: Run, others: list[tuple[str, object]], *, lose: int = 0) -> None:
        self.run, self.others, self.lose = run, others, lose
        self.writes = 0

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        writing = any(isinstance(op, Put) for op in txn.success)
        if writing and self.others:
            self.run.put(*self.others.pop(0))
        result = self.run.store.transact(txn, timeout_ms=timeout_ms)
        self.writes += writing and result.succeeded
        if writing and self.lose:
            self.lose -= 1
            raise StoreUnavailable("no answer")
        return result

    def close(self) -> None: ...


def test_a_hold_names_the_newest_plan_even_when_others_write() -> None:
    run = Run("a", "b", "c")
    second = replace(run.first_plan(("a", "b"), ("c",)), generation=2, from_generation=1, plan_id="g2")
    meddler = Meddler(
        run, [(KEYS.plan(2), second), (KEYS.hold("b"), Hold(node_id="b", kind="readmit", generation=2, reason=""))]
    )
    held = hold_node(Observer(TCP, meddler), "b", "drain", "x")
    assert held.generation == 2 and meddler.writes == 1
    found = run.observer.read().view.hold("b")
    assert found == Hold(node_id="b", kind="drain", generation=2, reason="x")


def test_a_lost_answer_is_read_again() -> None:
    run = Run("a", "b", "c")
    meddler = Meddler(run, [], lose=1)
    held = hold_node(Observer(TCP, meddler), "b", "drain", "x")
    assert held.changed and meddler.writes == 1


def test_writing_has_an_end() -> None:
    run = Run("a", "b", "c")
    others = [(KEYS.hold("b"), Hold(node_id="b", kind="readmit", generation=1, reason=str(i))) for i in range(99)]
    with pytest.raises(NoSuchRun, match="did not go through"):
        hold_node(Observer(TCP, Meddler(run, list(others))), "b", "drain", "x")


def test_reasons_are_one_line() -> None:
    assert hold.checked_reason(None, "d") == "d" and hold.checked_reason(" x ", "d") == "x"
    for text in ("", "a\nb", "x" * 301, "\x1b"):
        with pytest.raises(ConfigError, match="--reason"):
            hold.checked_reason(text, "d")


# -- stop -------------------------------------------------------------------------------------------------------------


def test_stop_is_idempotent_and_waits_for_the_last_agent() -> None:
    run = Run("a", "b")
    value = stop.stop_run(run.observer, "enough")
    assert value["changed"] and value["agents"] == ["a", "b"] and not value["over"]
    again = stop.stop_run(run.observer, "more")
    assert not again["changed"] and again["reason"] == "enough"
    run.settle()
    assert stop.stop_run(run.observer, "more")["over"]
    now, left = 0.0, ["a", "b"]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= 1 and left:
            node = left.pop()
            run.put(KEYS.gone(node), Gone(node_id=node, incarnation=f"{node}1", how="left", reason="", by=node))

    with pytest.raises(stop.NotEnded, match="still there: a, b"):
        stop.wait_for_end(run.observer, 0.9, clock=lambda: now, sleep=sleep)
    assert stop.wait_for_end(run.observer, 5, clock=lambda: now, sleep=sleep) < 1
    assert run_state(run.observer.read().view).name == "failed"


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", "1e9"])
def test_bad_waits(text: str, capsys: Captured) -> None:
    assert main(["stop", "--rdzv-endpoint", "h:1", "--wait", text]) == 64
    assert "--wait" in capsys.readouterr().err


# -- text -------------------------------------------------------------------------------------------------------------


def test_text_is_cleaned_and_fitted() -> None:
    assert clean("a\tb\ud800\x9b" + "x" * 500, 4) == "a\\tb\\ud800.."
    rows = [["node", "host"], ["n" * 30, "h" * 80], ["n", "h"]]
    lines = table(rows, width=60, shrink=(1,))
    assert max(map(len, lines)) == 60 and lines[1].startswith("n" * 30) and lines[1].endswith("..")
    assert [len(line) for line in table([["x" * 50, "y"]], width=20, shrink=())] == [53]


def test_quarantine_and_strikes_are_shown() -> None:
    run = Run("a", "b", "c")
    plan = replace(
        run.first_plan(("a", "b"), ()),
        generation=2,
        from_generation=1,
        quarantined=(Quarantined(node_id="c", generation=2, reason="c has had 2 process faults"),),
        strikes=(Strike(node_id="a", at_run_ms=1), Strike(node_id="a", at_run_ms=2)),
    )
    run.plan(plan)
    run.form(2)
    value = run.status()
    assert [(n["node_id"], n["role"], n["strikes"]) for n in value["nodes"]] == [
        ("a", "active", 2),
        ("b", "active", 0),
        ("c", "quarantined", 0),
    ]
    assert "c: c has had 2 process faults" in render_status(value, 100)
    assert status.COMMAND.name == "status"
