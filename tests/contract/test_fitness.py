"""A node's health as its agent tells it: the record for the protocol, and the events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmres.policy import Health
from lmres.rendezvous.edge.fitness import Fitness
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.scout.edge import health as watching
from lmres.scout.health import Memory
from tests.contract.test_crew import ME, eventually


class Events:
    def __init__(self) -> None:
        self.all: list[tuple[str, int, dict[str, Any]]] = []

    def emit(self, event: str, generation: int, **fields: Any) -> None:
        self.all.append((event, generation, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, _, fields in self.all if event == name]


class Patient:
    def __init__(self, folder: Path) -> None:
        self.events = Events()
        self.pokes = 0
        self.has_workers = False
        self.sick = folder / "sick"
        self.fitness = Fitness(
            Health(interval_s=0.1, command=f"test ! -e {self.sick} || {{ cat {self.sick}; exit 1; }}"),
            run_id="r",
            me=lambda: ME,
            state_dir=folder,
            guardian=Guardian(token="t" * 16, timeout_s=30, on_problem=lambda text: None),
            events=self.events,  # type: ignore[arg-type]
            generation=lambda: 4,
            has_workers=lambda: self.has_workers,
            poke=self.poke,
        )

    def poke(self) -> None:
        self.pokes += 1


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    made = Patient(tmp_path)
    yield made
    made.fitness.close()


def test_fit_from_the_start_and_the_checks_are_told(patient: Patient) -> None:
    assert patient.fitness.record.fit, "until something else is known"
    patient.fitness.start()
    record = patient.fitness.record
    assert (record.node_id, record.incarnation, record.fit, record.reason) == (ME.node_id, ME.incarnation, True, "")
    (armed,) = patient.events.named("protection_armed")
    assert armed["adapter"] == "health" and {"command", "disk", "memory", "network"} <= set(armed["parts"])
    assert patient.events.all[0][1] == 4
    assert patient.pokes == 0


def test_unfit_and_fit_again(patient: Patient) -> None:
    patient.sick.write_text("ECC\n")
    patient.fitness.start()
    assert (patient.fitness.record.fit, patient.fitness.record.reason) == (False, "command: ECC")
    patient.sick.unlink()
    eventually(lambda: patient.fitness.record.fit)
    assert patient.pokes == 2


def test_a_failure_of_the_watch_is_told_once_and_armed_again_with_the_next_generation(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitness, events = patient.fitness, patient.events
    fitness.start()
    fitness.follow(4)

    def broken(self: Any, readings: Any, now_ms: int) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(watching.Judge, "take", broken)
        eventually(lambda: events.named("protection_off"))
        eventually(lambda: not fitness._watch._thread.is_alive())  # type: ignore[union-attr]
    fitness.follow(4)
    assert events.named("protection_off") == [
        {"adapter": "health", "parts": ["health"], "reason": "RuntimeError('planted')"}
    ]
    assert fitness.record.fit
    fitness.follow(5)
    eventually(lambda: len(events.named("protection_armed")) == 2)
    patient.sick.write_text("ECC\n")
    eventually(lambda: not fitness.record.fit)


def test_little_memory_while_workers_run_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    low = Memory(total=100 << 30, available=1 << 20)
    monkeypatch.setattr(watching.readers, "read_memory", lambda: low)
    patient.has_workers = True
    patient.fitness.start()
    eventually(lambda: patient.events.named("health_warning"))
    assert patient.fitness.record.fit and patient.events.named("health_warning")[0]["check"] == "memory"
    patient.has_workers = False
    eventually(lambda: not patient.fitness.record.fit)
    assert patient.fitness.record.reason.startswith("memory: ")


def test_a_number_that_moves_is_no_news(patient: Patient) -> None:
    patient.sick.write_text("$(date)\n")
    patient.fitness.start()
    first = patient.fitness.record
    for number in range(4):
        patient.sick.write_text(f"{number} errors\n")
        time.sleep(0.15)
    assert patient.fitness.record == first and patient.pokes == 1
