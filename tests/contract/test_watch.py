"""What a real worker notes on its page, read from outside: phases, collectives, waiting, stacks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmres.rendezvous.edge.workers.stacks import read_stacks
from lmres.scout.sighting import MAX_STACK_LINES, GroupSight
from tests.contract.resume_kit import Nursery, Trial
from tests.contract.watch_kit import Two, Worker
from tests.contract.workers_kit import until

BOUND_S = 60.0
SLEEP_S = 0.4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    made = Two(tmp_path_factory.mktemp("two"))
    try:
        made.do("sync")
        made.do("ddp", 1)
        yield made
    finally:
        made.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def group(worker: Worker, name: str = "0") -> GroupSight:
    return next(g for g in worker.view().groups if g.name == name)


# -- collectives -------------------------------------------------------------------------------------------------------


def test_the_worker_says_that_it_is_watched(two: Two) -> None:
    for worker in two.workers:
        said = worker.report("watch")
        assert said["armed"] is True
        assert said["signal"] == signal.SIGRTMAX - 3
        view = worker.view()
        assert view.armed
        assert view.pid == worker.pid
        assert group(worker).ranks == (0, 1)


def test_buckets_of_ddp_are_counted(two: Two) -> None:
    two.do("ddp", 3)
    before = [worker.entered("0") for worker in two.workers]
    two.do("ddp", 2)
    after = [worker.entered("0") for worker in two.workers]
    assert before[0] == before[1]
    assert after[0] == after[1] == before[0] + 2, "one bucket in each step"
    assert [(m.op, m.shape) for m in group(two[0]).recent[-2:]] == [("allreduce", "float32[420]")] * 2
    counted = [[(m.number, m.op, m.shape) for m in group(worker).recent if m.number] for worker in two.workers]
    assert counted[0] == counted[1]
    view = two[0].view()
    assert view.step >= 5
    assert group(two[0]).recent[-1].step == view.step - 1, "noted before the step was done"
    assert view.phase == "user"


def test_fully_sharded_ones_are_counted(two: Two) -> None:
    before = two[0].entered()
    two.do("fsdp")
    assert two[0].entered() == two[1].entered() > before
    assert {"allgather_base", "reduce_scatter_base"} <= {m.op for g in two[0].view().groups for m in g.recent}


def test_operations_and_shapes(two: Two) -> None:
    two.do("many")
    marks = [m for m in group(two[0]).recent if m.number][-9:]
    shapes = {(m.op, m.shape) for m in marks}
    assert shapes >= {
        ("allgather", "float32[2]"), ("broadcast", "float64[7]"), ("reduce", "float32[2, 2]"),
        ("gather", "float32[6]"), ("alltoall_base", "float32"), ("allreduce", "float32[2]"),
    }  # fmt: skip
    assert {"barrier", "monitored_barrier"} <= {m.op for m in marks}
    assert [m.number for m in marks] == list(range(marks[0].number, marks[0].number + 9))
    assert {(m.op, m.shape) for m in [m for m in group(two[1]).recent if m.number][-9:]} == shapes


def test_what_is_known_to_be_over(two: Two) -> None:
    two.do("sync")
    for worker in two.workers:
        assert group(worker).left == group(worker).entered


def test_sending_does_not_count(two: Two) -> None:
    before = group(two[0])
    two.do("send")
    after = group(two[0])
    assert after.entered == before.entered
    marks = [m for m in after.recent if m.number == 0]
    assert {(m.op, m.shape) for m in marks} == {("send", "float32[9]"), ("send", "float32[2]"), ("recv", "float32[2]")}


def test_groups_by_name(two: Two) -> None:
    names = two.do("groups")
    assert names[0] == names[1]
    for worker in two.workers:
        found = group(worker, names[0])
        assert (found.ranks, found.entered) == ((0, 1), 1)
        assert len(worker.view().groups) <= 4, "a group of one is not listed"


def test_a_stopped_rank_has_entered_one_less(two: Two) -> None:
    two.do("sync")
    before = group(two[0]).entered
    os.kill(two[1].pid, signal.SIGSTOP)
    try:
        for worker in two.workers:
            worker.tell("sync")
        until(lambda: group(two[0]).entered == before + 1, "rank 0 has entered", BOUND_S)
        until(lambda: two[0].view().phase == "collective", "rank 0 waits")
        assert group(two[0]).left == before
        assert group(two[1]).entered == before
        assert two[1].view().phase == "user"
        said = two[1].report("watch")
        assert read_stacks(two[1].pid, said["signal"], said["stacks_fd"], 0.5) == ()
        assert any(line.endswith(" all_reduce") for line in stacks(two[0]))
    finally:
        os.kill(two[1].pid, signal.SIGCONT)
    for worker in two.workers:
        worker.answer()
    assert group(two[0]).entered == group(two[1]).entered == before + 1


@pytest.mark.parametrize("how", ["sync", "ddp 1"])
def test_waiting_for_others_is_told_apart(two: Two, how: str) -> None:
    two.do("ddp", 1)
    before = [worker.view().collective_ns for worker in two.workers]
    two.do(how, SLEEP_S)
    waited = [(w.view().collective_ns - b) / 1e9 for w, b in zip(two.workers, before, strict=True)]
    assert waited[0] > SLEEP_S * 0.8
    assert waited[1] < waited[0] - SLEEP_S * 0.5


def test_a_compiled_collective_is_counted(two: Two) -> None:
    before = two[0].entered()
    assert two.do("compiled_collective") == [[3.0] * 11] * 2
    assert two[0].entered() == two[1].entered() == before + 1


# -- phases ------------------------------------------------------------------------------------------------------------


def test_it_starts_until_the_first_forward(one: Worker, tmp_path: Path) -> None:
    one.report("watch")
    one.do("workers")
    assert one.view().phase == "start"
    one.do("ddp")
    assert one.view().phase == "user"


@pytest.mark.parametrize(
    ("command", "phase"),
    [
        ("load", "loader"), ("save", "checkpoint_io"), ("save_elsewhere", "checkpoint_io"), ("forward", "forward"),
        ("backward", "backward"), ("step", "optimizer"), ("user", "user"),
    ],
)  # fmt: skip
def test_phases_while_it_is_blocked(two: Two, tmp_path: Path, command: str, phase: str) -> None:
    worker = two[0]
    gate = tmp_path / "gate"
    began = time.monotonic_ns()
    before = worker.view()
    worker.tell(command, gate)
    until(lambda: any(line.endswith(" wait_for") for line in stacks(worker)), "it is blocked", BOUND_S)
    view = worker.view()
    assert view.phase == phase
    if phase != "user":
        assert began < view.phase_ns <= view.event_ns < time.monotonic_ns()
    time.sleep(0.05)
    assert worker.view() == view
    gate.write_text("")
    worker.answer()
    after = worker.view()
    assert after.phase == "user"
    spent_ns = {"loader": after.loader_ns - before.loader_ns, "checkpoint_io": after.io_ns - before.io_ns}
    for name, nanoseconds in spent_ns.items():
        assert (nanoseconds > 50_000_000) == (name == phase)


def test_files_of_safetensors(two: Two, tmp_path: Path) -> None:
    before = two[0].view()
    assert two[0].do("safetensors", tmp_path / "file") == ["a"]
    assert two[0].view().io_ns > before.io_ns


def test_a_mark_of_progress(two: Two) -> None:
    before = two[0].view()
    two[0].do("mark")
    after = two[0].view()
    assert after.event_count == before.event_count + 1
    assert after.event_ns > before.event_ns


# -- stacks ------------------------------------------------------------------------------------------------------------


def stacks(worker: Worker) -> tuple[str, ...]:
    said = worker.report("watch")
    return read_stacks(worker.pid, said["signal"], said["stacks_fd"], 0.5)


def test_stacks_of_one_that_keeps_the_lock(two: Two) -> None:
    worker = two[1]
    worker.tell("spin")
    found = until(
        lambda: (lines := stacks(worker)) and any(line.endswith(" spin") for line in lines) and lines, "it spins", 30
    )
    page = worker.page()
    assert len(found) <= MAX_STACK_LINES
    spot = next(i for i, line in enumerate(found) if line.endswith(" spin"))
    assert re.fullmatch(r".*watched\.py:\d+ spin", found[spot])
    assert re.fullmatch(r".*watched\.py:\d+ <module>", found[spot - 1]), "outermost first"
    assert worker.page() == page, "nothing is noted while it spins"
    worker.answer()
    assert worker.do("mark") is None, "and it goes on"


def test_descriptors_taken_away(one: Worker, tmp_path: Path) -> None:
    said = one.report("watch")
    assert said["stacks_fd"] > 256
    one.do("close_all", 256)
    assert stacks(one)
    one.do("close_all", 4096)
    assert stacks(one) == ()
    theirs = tmp_path / "theirs"
    one.do("open_files", theirs)
    assert theirs.samefile(f"/proc/{one.pid}/fd/{said['stacks_fd']}")
    assert stacks(one) == ()
    assert theirs.read_bytes() == b""
    assert one.do("ddp")


def test_a_taken_signal_is_left_alone(tmp_path: Path) -> None:
    number = signal.SIGRTMAX - 3
    worker = Worker(tmp_path, before=f"import signal; signal.signal({number}, lambda *_: print('theirs'));")
    try:
        said = worker.report("watch")
        assert (said["armed"], said["signal"], said["stacks_fd"]) == (True, 0, -1)
        assert read_stacks(worker.pid, said["signal"], said["stacks_fd"], 0.5) == ()
    finally:
        worker.close()


def test_no_stacks_of_strangers() -> None:
    assert read_stacks(os.getpid(), signal.SIGRTMAX - 3, 0, 0.1) == ()
    assert read_stacks(2**22 + 1, signal.SIGRTMAX - 3, 0, 0.1) == ()


# -- whatever may go wrong ---------------------------------------------------------------------------------------------


def test_a_forked_child_writes_nothing(one: Worker) -> None:
    said = one.report("watch")
    one.do("ddp")
    file = Path(f"/proc/{one.pid}/fd/{said['stacks_fd']}")
    page = one.page()
    assert one.do("fork", said["signal"]) == -said["signal"], "its signal is the default one again"
    assert file.stat().st_size == 0
    assert one.page() == page
    assert one.do("workers") == 4
    assert stacks(one)


def test_nothing_is_computed_differently(tmp_path: Path) -> None:
    answers = []
    for watched in (None, ""):
        worker = Worker(tmp_path, watched=watched)
        answers.append((worker.do("ddp", 5), worker.do("compiled")))
        assert worker.reports("watch") if watched is not None else not worker.reports("watch")
        assert worker.end() == 0
        worker.close()
    assert answers[0][0] == answers[1][0]
    (plain, frames, breaks), (watched_too, more, same) = answers[0][1], answers[1][1]
    assert (watched_too, same) == (plain, breaks)
    assert more["total"] - more["ok"] == frames["total"] - frames["ok"], "no frame more is given up"


def test_nothing_is_computed_differently_in_a_group(tmp_path: Path) -> None:
    answers = []
    for watched in (None, ""):
        pair = Two(tmp_path, watched=watched)
        answers.append([pair.do("ddp", 5), pair.do("compiled_collective")])
        pair.close()
    assert answers[0] == answers[1]


def test_settings_that_are_none(tmp_path: Path) -> None:
    worker = Worker(tmp_path, watched='{"stacks_signal": "nine"}')
    try:
        assert worker.do("ddp")
        said = worker.reports("watch")
        assert len(said) == 1
        assert said[0]["armed"] is False
        assert "nine" in said[0]["reason"]
        assert not worker.view().armed
    finally:
        worker.close()


def test_a_mark_that_fails_ends_the_watch_only(tmp_path: Path) -> None:
    answers = []
    for command in ("ddp", "sabotage"):
        worker = Worker(tmp_path)
        found = worker.do(command)
        answers.append(found[1] if command == "ddp" else found)
        said = worker.reports("watch")
        worker.close()
    assert answers[0] == answers[1]
    assert [r["armed"] for r in said] == [True, False]
    assert "struct.error" in said[1]["reason"] or "error" in said[1]["reason"]


def test_exceptions_of_the_programs_handlers_reach_it(one: Worker) -> None:
    assert one.do("handler") == 300
    assert [r["armed"] for r in one.reports("watch")] == [True]
    one.do("ddp")
    assert one.view().phase == "user"


# -- beside the capture of the training state --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("name", ["epochs.py", "averages.py", "loaders.py persistent"])
def test_it_comes_back_to_its_step_watched(nursery: Nursery, tmp_path: Path, name: str, order: str) -> None:
    ranks = 1 if " " in name else 2
    trial = Trial(nursery, tmp_path, *name.split(), ranks=ranks)
    _, *watched = trial.is_exact(5, env={"KIT_WATCHED": order})
    for life in watched:
        for rank in range(ranks):
            said, last = (note[1] for note in life.notes[rank] if note[0] == "watch")
            assert said["armed"] is True
            assert last["marks"] > 50
            assert len(last["left"]) == 1
