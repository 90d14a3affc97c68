"""The workers of a node as the protocol sees them: late starts, held exits, junk reports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lmres.rendezvous.edge.crew import MAX_ALIKE, Crew
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.plan import Cause
from lmres.rendezvous.state import Member

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
ME = Member(
    node_id="n", incarnation="i", address="127.0.0.1", host="h", boot_id="b", pid=1, pid_start=1, failure_domain="n"
)


class Harness:
    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.notes: list[dict[str, Any]] = []
        self.changed = threading.Event()
        self.guardian = Guardian(token="t" * 16, timeout_s=30, on_problem=lambda text: None)
        self.crew = Crew(
            token=f"token-{time.monotonic_ns()}",
            me=lambda: ME,
            grace_s=2.0,
            attach=False,
            guardian=self.guardian,
            warm=None,
            on_change=self.changed.set,
            on_note=lambda worker, message: self.notes.append(message),
            on_error=self.errors.append,
            on_start=lambda: None,
        )
        self.crew.monitor.start()

    def launch(self, command: list[str], local_rank: int = 0) -> Any:
        return self.crew.monitor.launch(command, {"RANK": str(local_rank)}, local_rank=local_rank)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.crew.stop()
    made.crew.join_stop(10)
    made.crew.close()
    assert made.errors == []


def eventually(condition: Callable[[], object], bound_s: float = 20.0) -> None:
    end = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_workers_that_torch_starts_after_the_stop_are_stopped_too(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(1, 3, {})
    first = harness.launch(SLEEPER, 0)
    crew.stop(generation=1)
    eventually(lambda: first.exit_status() is not None and not crew.alive)
    late = [harness.launch(SLEEPER, rank) for rank in (1, 2)]
    eventually(lambda: all(w.exit_status() is not None for w in late) and not crew.alive)
    assert crew.faults == ()


def test_a_stop_before_any_start_counts(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(1, 1, {})
    crew.stop()
    late = harness.launch(SLEEPER)
    eventually(lambda: late.exit_status() is not None and not crew.alive)


def test_a_stop_for_an_older_generation_spares_the_new_workers(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(2, 1, {})
    worker = harness.launch(SLEEPER)
    crew.stop(generation=1)
    time.sleep(0.2)
    assert worker.exit_status() is None


def test_exits_are_held_and_become_evidence(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(1, 2, {})
    bad = harness.launch([sys.executable, "-S", "-c", "import sys; sys.exit(3)"], 0)
    good = harness.launch([sys.executable, "-S", "-c", "pass"], 1)
    eventually(lambda: bad.exit_status() == 3 and good.exit_status() == 0 and crew.faults)
    assert bad.poll() is None and good.poll() is None
    cause = crew.faults[0].cause
    assert (cause.rank, cause.exit_status, cause.failure_class) == (0, 3, "process_crash")
    assert crew.succeeded == 0
    crew.open_gate()
    assert bad.poll() == 3 and good.poll() == 0


def test_success_is_shown_only_when_the_run_has_succeeded(harness: Harness) -> None:
    crew = harness.crew
    crew.begin(4, 1, {})
    worker = harness.launch([sys.executable, "-S", "-c", "pass"])
    eventually(lambda: crew.succeeded == 4)
    assert worker.poll() is None
    crew.show_success()
    assert worker.poll() == 0


def test_junk_on_the_report_channel_harms_nobody(harness: Harness) -> None:
    program = (
        "import os; fd = int(os.environ['LMRES_WORKER_FDS'].split(',')[0])\n"
        "for line in (b'{\"kind\": \"first_step\", \"step\": NaN}', b'\\xff\\x00', b'[]', b'{\"kind\": 7}',\n"
        '             b\'{"kind": "exception", "type": 5, "message": null, "last_lines": 3}\'):\n'
        "    os.write(fd, line + b'\\n')\n"
    )
    harness.crew.begin(1, 1, {})
    worker = harness.launch([sys.executable, "-S", "-c", program])
    eventually(lambda: worker.exit_status() == 0 and len(harness.notes) == 2)
    assert harness.crew.faults[0].cause.exception is not None


def test_many_reports_of_one_kind_leave_room_for_others(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    crew = harness.crew
    crew.begin(1, 1, {})
    cause = Cause(failure_class="unknown", node_id="n", incarnation="i", host="h", detail="noise", rank=0, pid=1)
    for _ in range(MAX_ALIKE + 5):
        crew.add_evidence(cause, "secondary", 0)
    assert len(crew.faults) == MAX_ALIKE
    assert [r.getMessage() for r in caplog.records if "not told any more" in r.getMessage()] == [
        f"found {MAX_ALIKE} times in this generation, and not told any more: {cause.headline()}"
    ]
    crew.add_evidence(replace(cause, failure_class="process_crash"), "primary", 0)
    crew.add_evidence(replace(cause, rank=1, pid=2), "secondary", 0)
    assert len(crew.faults) == MAX_ALIKE + 2
    crew.begin(2, 1, {})
    crew.add_evidence(cause, "secondary", 0)
    assert len(crew.faults) == MAX_ALIKE + 3


def test_a_watch_that_fails_in_the_worker_is_remembered_until_the_next_generation(harness: Harness) -> None:
    program = (
        "import os; fd = int(os.environ['LMRES_WORKER_FDS'].split(',')[0])\n"
        'os.write(fd, b\'{"kind": "watch", "armed": false, "reason": "no such thing"}\\n\')\n'
    )
    harness.crew.begin(1, 1, {})
    worker = harness.launch([sys.executable, "-S", "-c", program])
    eventually(lambda: harness.crew.watch_off)
    assert harness.crew.watch_off == {worker.pid: "no such thing"}
    assert harness.crew.watch_told == {worker.pid}
    eventually(lambda: worker.exit_status() is not None)
    harness.crew.begin(2, 1, {})
    assert harness.crew.watch_off == {}
