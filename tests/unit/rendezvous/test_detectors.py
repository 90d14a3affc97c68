"""What the vault has found is judged by the thread that the records belong to, and never ends it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lmres.policy import Policy
from lmres.rendezvous import corruption
from lmres.rendezvous.edge.detectors import Detectors
from lmres.rendezvous.plan import Cause

OUTCOME: Any = SimpleNamespace(plan=None, look=None, slot=0)
PLAN = SimpleNamespace(generation=3, origin=3, from_generation=2)
FOUND = {"check": "state", "origin": 3, "then": 0}


class Bench:
    def __init__(self) -> None:
        self.evidence: list[tuple[Cause, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.pokes = 0
        view = SimpleNamespace(head=lambda: PLAN, plans_after=lambda generation: (), member=lambda node_id: None)
        agent = SimpleNamespace(view=view, me=None, ledger=SimpleNamespace(leases=None))
        crew = SimpleNamespace(
            generation=3, add_evidence=lambda cause, weight, at_ms, **more: self.evidence.append((cause, more))
        )
        events = SimpleNamespace(
            emit=lambda event, generation, **fields: self.events.append({"event": event, **fields})
        )
        made: Any = {"agent": agent, "crew": crew, "guardian": None, "events": events, "state_dir": None}
        self.detectors = Detectors(Policy(), on=False, run_id="r", local_world_size=1, poke=self.poke, **made)

    def poke(self) -> None:
        self.pokes += 1


def test_a_finding_waits_for_the_control_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, threads = Bench(), []

    def charges(found: Any, **more: Any) -> tuple[corruption.Charge, ...]:
        threads.append(threading.current_thread())
        cause = Cause(failure_class="silent_corruption", node_id="b", incarnation="i", host="h", detail="differs")
        return (corruption.Charge(cause=cause, reaction="report", attributed=True),)

    monkeypatch.setattr(corruption, "charges", charges)
    vault = threading.Thread(target=lambda: bench.detectors.accuse(FOUND))
    vault.start()
    vault.join()
    assert bench.pokes == 1 and bench.evidence == [] and threads == []
    bench.detectors.follow(OUTCOME)
    bench.detectors.follow(OUTCOME)
    assert threads == [threading.current_thread()] and len(bench.evidence) == 1


def test_one_of_a_generation_that_is_over_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(corruption, "charges", lambda found, **more: pytest.fail("not asked"))
    bench.detectors.accuse({**FOUND, "origin": 2})
    bench.detectors.follow(OUTCOME)
    assert bench.evidence == [] and bench.events == []


def test_one_that_can_not_be_judged_is_told_once() -> None:
    bench = Bench()
    for _ in range(2):
        bench.detectors.accuse({"nothing": "of use"})
        bench.detectors.follow(OUTCOME)
    assert [(e["event"], e["parts"]) for e in bench.events] == [("protection_off", ["corruption"])]
