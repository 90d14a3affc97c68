"""Worker processes with real processes: held, watched, stopped, cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmres.errors import ConfigError
from lmres.rendezvous.edge.workers import patch, proctree
from lmres.rendezvous.edge.workers.guardian import RESTARTS, Guardian
from lmres.rendezvous.edge.workers.process import FDS_VARIABLE, STATUS_LOST
from lmres.rendezvous.edge.workers.progress import LAYOUT, MAGIC, VERSION, ProgressPage
from lmres.rendezvous.edge.workers.reports import LINE_BYTES, ReportReader
from lmres.rendezvous.edge.workers.stop import KILL_S, stop_workers
from tests.contract.workers_kit import (
    BOUND_S,
    PYTHON,
    SLEEPER,
    Watched,
    gone,
    read_line,
    read_when_there,
    until,
    wait_gone,
)

# Writes its pid for the test to find. The file appears whole.
TELL = """
import os, signal, sys, time
def tell(path, text):
    with open(path + '.new', 'w') as file: file.write(str(text))
    os.rename(path + '.new', path)
"""
# Acts on SIGTERM after FLUSH seconds by writing a file.
FLUSHER = (
    TELL
    + """
def flush(*_):
    time.sleep(float(sys.argv[2]))
    tell(sys.argv[1] + '.flushed', 'flushed')
    sys.exit(0)
signal.signal(signal.SIGTERM, flush)
tell(sys.argv[1], os.getpid())
while True: time.sleep(600)
"""
)
# Leaves a process that has lost its parent and the session; then sleeps, or exits at once.
DETACHER = (
    TELL
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(sys.argv[1], os.getpid())
        while True: time.sleep(600)
    os._exit(0)
os.wait()
if sys.argv[2] == 'stay':
    while True: time.sleep(600)
"""
)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def stubborn(tmp_path: Path) -> tuple[str, str]:
    return TELL + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(sys.argv[1], os.getpid())\nwhile True: time.sleep(600)"
    ), str(tmp_path / "stubborn")


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


# -- held exit statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_status_is_held_until_the_gate_opens(watched: Watched, status: int) -> None:
    watched.open = False
    worker = watched.python(f"raise SystemExit({status})")
    seen, seen_status, seen_ms = watched.exit()
    assert (seen, seen_status) == (worker, status)
    assert abs(time.monotonic_ns() // 1_000_000 - seen_ms) < BOUND_S * 1000
    assert worker.poll() is None
    assert worker.exit_status() == status
    os.killpg(worker.pid, 0)  # the zombie keeps its group, so torch's killpg hits nobody else
    watched.open = True
    assert worker.poll() == status
    assert worker.poll() == worker.returncode == worker.exit_status() == status
    with pytest.raises(ProcessLookupError):
        os.killpg(worker.pid, 0)


def test_a_signal_is_a_negative_status(watched: Watched) -> None:
    worker = watched.python("import os; os.kill(os.getpid(), 9)")
    assert watched.exit()[1] == -9
    assert worker.poll() == -9


def test_wait_waits_whatever_the_gate_says(watched: Watched) -> None:
    watched.open = False
    worker = watched.python(SLEEPER)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.05)
    assert worker.exit_status() is None
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait(BOUND_S) == -9
    assert worker.poll() == -9
    assert watched.exit()[1] == -9


def test_without_pidfd_nothing_changes_but_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    watched = Watched()
    try:
        watched.open = False
        worker = watched.python("raise SystemExit(4)")
        assert worker.pidfd == -1
        assert watched.exit()[1] == 4
        assert worker.poll() is None
        assert worker.wait(BOUND_S) == 4
        sleeper = watched.python(SLEEPER)
        assert stop_workers([sleeper], 5.0).stopped == (sleeper.pid,)
    finally:
        watched.close()


def test_a_status_that_somebody_else_took_is_no_success(watched: Watched) -> None:
    watched.monitor.close()  # nobody looks before the thief
    worker = watched.python("pass")
    os.waitpid(worker.pid, 0)
    assert worker.exit_status() == STATUS_LOST
    assert worker.poll() == STATUS_LOST


def test_start_errors_are_popens_own_and_leak_nothing(watched: Watched) -> None:
    before = descriptors()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            watched.launch("/does/not/exist")
    assert descriptors() == before


# -- the monitor -------------------------------------------------------------------------------------------------------

REPORTER = f"""
import os, sys
report, page = map(int, os.environ['{FDS_VARIABLE}'].split(','))
for line in eval(sys.argv[1]): os.write(report, line)
os._exit(7)
"""


def test_reports_come_before_the_exit_and_junk_is_passed_over(watched: Watched) -> None:
    lines = [b'{"kind": "a"}\nnot json\n[1]\n', b"x" * (LINE_BYTES + 10) + b'\n{"kind": "b"}\n{"kind": "torn']
    worker = watched.python(REPORTER, repr(lines))
    assert watched.exit()[:2] == (worker, 7)
    assert watched.order == ["a", "b", "exit"]
    assert watched.errors.empty()


@pytest.mark.parametrize("size", [61, 1000, 10**6])
def test_a_report_reader_finds_the_same_however_the_bytes_arrive(size: int) -> None:
    data = b'{"n": 1}\n' + b"y" * (3 * LINE_BYTES) + b'\n{"n": 2}\n' + b"[" * 50_000 + b'\n{"n": 3}\n'
    reader = ReportReader()
    found = [m for at in range(0, len(data), size) for m in reader.feed(data[at : at + size])]
    assert found == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert reader.junk


def test_environment_generation_and_place(tmp_path: Path) -> None:
    watched = Watched(prepare_env=lambda env: {**env, "PREPARED": env["LMRES_GENERATION"]})
    try:
        watched.monitor.set_generation(5, {"LMRES_GENERATION": "5", "RANK": "never"})
        script = TELL + "tell(sys.argv[1], [os.environ['PREPARED'], os.getsid(0) == os.getpid()])"
        worker = watched.python(script, str(tmp_path / "said"), env={"RANK": "3"})
        assert read_when_there(tmp_path / "said") == "['5', True]"
        assert (worker.place.generation, worker.place.rank, worker.place.local_rank) == (5, 3, 0)
        watched.exit()
        assert watched.monitor.workers(5) == (worker,)
        assert worker.wait(BOUND_S) == 0
        watched.monitor.set_generation(6, {})
        assert watched.monitor.workers() == ()
        until(lambda: worker.pidfd == -1, "the descriptors of a reaped worker are given back")
        assert worker.exit_status() == 0
        assert worker.progress.read() == (0, 0)
    finally:
        watched.close()


def test_an_error_in_a_callback_reaches_the_owner() -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    watched = Watched(on_exit=broken)
    try:
        worker = watched.python("pass")
        assert isinstance(watched.errors.get(timeout=BOUND_S), ZeroDivisionError)
        assert worker.wait(BOUND_S) == 0
    finally:
        watched.close()


def test_many_workers_and_generations_leave_no_descriptor(watched: Watched) -> None:
    before = descriptors()
    for generation in range(3):
        watched.monitor.set_generation(generation, {})
        workers = [watched.launch("/bin/true") for _ in range(4)]
        for _ in workers:
            watched.exit()
        for worker in workers:
            assert worker.wait(BOUND_S) == 0
    watched.monitor.set_generation(9, {})
    until(lambda: descriptors() == before, "all descriptors are given back")


def test_the_progress_page_is_read_while_and_after_it_is_written() -> None:
    page = ProgressPage()
    assert page.read() == (0, 0)
    os.pwrite(page.fd, LAYOUT.pack(MAGIC, VERSION, 1, 12, 345, 6), 0)
    assert page.read() == (12, 345)
    os.ftruncate(page.fd, 0)
    assert page.read() == (12, 345)
    page.close()
    assert page.read() == (12, 345)


# -- the patch ---------------------------------------------------------------------------------------------------------


def test_torch_starts_its_workers_through_the_monitor(watched: Watched, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def handler() -> Any:
        return SubprocessHandler(
            "/bin/sh", ("-c", "echo out; exit 5"), {"RANK": "2"}, str(tmp_path / "out"), None, 1, None
        )

    patch.install(watched.monitor)
    patch.install(watched.monitor)
    try:
        other = Watched()
        with pytest.raises(RuntimeError, match="another agent"):
            patch.install(other.monitor)
        other.close()
        watched.open = False
        made = handler()
        worker, status, _ = watched.exit()
        assert (made.proc, status) == (worker, 5)
        assert (worker.place.rank, worker.place.local_rank) == (2, 1)
        assert made.proc.poll() is None
        made.close(signal.SIGKILL)  # torch kills the group of what it believes to run
        watched.open = True
        assert made.proc.poll() == 5
        assert (tmp_path / "out").read_text() == "out\n"
    finally:
        patch.uninstall(watched.monitor)
    plain = handler()
    assert type(plain.proc) is subprocess.Popen
    assert plain.proc.wait(BOUND_S) == 5


def test_another_shape_of_torch_is_refused(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    monkeypatch.setattr(SubprocessHandler, "_popen", lambda self, args, env, cwd: None)
    with pytest.raises(ConfigError, match=r"'self', 'args', 'env', 'cwd'"):
        patch.install(watched.monitor)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flush_s", "grace_s", "kept"), [(0.5, 20.0, True), (20.0, 0.5, False)])
def test_a_flush_is_kept_or_lost_exactly_as_configured(
    watched: Watched, tmp_path: Path, flush_s: float, grace_s: float, kept: bool
) -> None:
    path = tmp_path / "worker"
    worker = watched.python(FLUSHER, str(path), str(flush_s))
    read_when_there(path)
    begun = time.monotonic()
    report = stop_workers([worker], grace_s)
    took_s = time.monotonic() - begun
    assert (tmp_path / "worker.flushed").exists() is kept
    assert report.unkillable == ()
    if kept:
        assert (report.stopped, report.killed) == ((worker.pid,), ())
        assert flush_s <= took_s < grace_s
    else:
        assert (report.stopped, report.killed) == ((), (worker.pid,))
        assert grace_s <= took_s < grace_s + 5
    assert worker.poll() == (0 if kept else -9)


def test_a_stopped_worker_can_act_on_sigterm(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "worker"
    worker = watched.python(FLUSHER, str(path), "0")
    read_when_there(path)
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: proctree.read_process(worker.pid).state == "T", "the worker is stopped")  # type: ignore[union-attr]
    assert stop_workers([worker], BOUND_S).stopped == (worker.pid,)
    assert (tmp_path / "worker.flushed").exists()


def test_all_workers_share_one_grace(watched: Watched, tmp_path: Path) -> None:
    script, path = stubborn(tmp_path)
    workers = [watched.python(script, f"{path}{n}") for n in range(3)]
    for n in range(3):
        read_when_there(Path(f"{path}{n}"))
    begun = time.monotonic()
    report = stop_workers(workers, 1.0)
    assert 1.0 <= time.monotonic() - begun < 1.0 + 5.0
    assert report.killed == tuple(sorted(worker.pid for worker in workers))


@pytest.mark.parametrize("how", ["stay", "leave"])
def test_what_left_the_session_and_its_parent_is_found(watched: Watched, tmp_path: Path, how: str) -> None:
    path = tmp_path / "orphan"
    worker = watched.python(DETACHER, str(path), how)
    orphan = int(read_when_there(path))
    if how == "leave":
        watched.exit()
    report = stop_workers([worker], 0.3)
    assert report.stopped == (worker.pid,)
    assert report.killed == (orphan,)
    assert gone(orphan)


def test_a_child_that_flushes_has_the_grace_too(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "child"
    worker = watched.launch("/bin/sh", "-c", '"$@" & wait', "sh", *PYTHON, FLUSHER, str(path), "0.5")
    child = int(read_when_there(path))
    report = stop_workers([worker], BOUND_S)
    assert report.stopped == (worker.pid,)
    assert report.killed == ()
    assert (tmp_path / "child.flushed").exists()
    assert gone(child)


def test_a_spared_process_is_left_alone(watched: Watched) -> None:
    spared, worker = watched.python(SLEEPER), watched.python(SLEEPER)
    report = stop_workers([worker], BOUND_S, spare=[spared.pid])
    assert report.stopped == (worker.pid,)
    assert spared.exit_status() is None


class Unkillable:
    """A handle behind which nothing ever ends."""

    pid = 2**22 + 1  # above the kernel's largest pid
    token = ""
    started_ticks = 1

    def exit_status(self) -> int | None:
        return None


def test_what_can_not_be_killed_is_reported_in_bounded_time(watched: Watched) -> None:
    worker = watched.python(SLEEPER)
    begun = time.monotonic()
    report = stop_workers([Unkillable(), worker], 0.2)
    assert time.monotonic() - begun < 0.2 + KILL_S + BOUND_S
    assert report.stopped == (worker.pid,)
    assert report.unkillable == (Unkillable.pid,)


def test_a_stranger_with_a_workers_pid_is_not_touched() -> None:
    stranger = subprocess.Popen([*PYTHON, SLEEPER], stdout=subprocess.PIPE, start_new_session=True)
    try:
        read_line(stranger.stdout)

        class Reused:
            pid, token, started_ticks = stranger.pid, "", 1

            def exit_status(self) -> int | None:
                return 1

        report = stop_workers([Reused()], 0.1)
        assert report.killed == ()
        found = proctree.read_process(stranger.pid)
        assert found is not None
        found.started += 1
        assert not proctree.send_signal(found, signal.SIGKILL)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.communicate()


# -- the agent's death -------------------------------------------------------------------------------------------------

# An agent: starts one worker with a guardian, tells the pids, and pulses until told to end.
AGENT = """
import os, sys, time
from lmres.rendezvous.edge.workers.guardian import Guardian
from tests.contract.workers_kit import PYTHON, Watched
timeout_s, script, path = float(sys.argv[1]), sys.argv[2], sys.argv[3]
watched = Watched()
guardian = None
if timeout_s:
    guardian = Guardian(token=watched.monitor.token, timeout_s=timeout_s, on_problem=print)
    guardian.start()
worker = watched.python(script, path, 'stay')
if guardian: guardian.register(worker.pid)
while not os.path.exists(path): time.sleep(0.01)
print(worker.pid, guardian.pid if guardian else 0, flush=True)
while True:
    if guardian:
        guardian.pulse()
        fenced_s = guardian.take_fenced()
        if fenced_s is not None: print('fenced', fenced_s, worker.exit_status(), flush=True)
    time.sleep(0.05)
"""
TOLD_SLEEPER = TELL + "tell(sys.argv[1], os.getpid())\nwhile True: time.sleep(600)"


class Agent:
    def __init__(self, timeout_s: float, script: str, path: Path) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(timeout_s), script, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
            start_new_session=True,
        )
        worker, guardian = read_line(self.process.stdout).split()
        self.worker, self.guardian = int(worker), int(guardian)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=BOUND_S)


def test_a_worker_dies_with_its_agent(tmp_path: Path) -> None:
    agent = Agent(0, TOLD_SLEEPER, tmp_path / "told")
    agent.kill()
    wait_gone(agent.worker)


def test_the_guardian_cleans_up_after_a_killed_agent_and_ends(tmp_path: Path) -> None:
    agent = Agent(60.0, DETACHER, tmp_path / "orphan")
    orphan = int((tmp_path / "orphan").read_text())
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(agent.guardian, signum)
    agent.kill()
    for pid in (agent.worker, orphan, agent.guardian):
        wait_gone(pid)


def test_the_workers_of_a_frozen_agent_are_fenced_and_it_is_told(tmp_path: Path) -> None:
    agent = Agent(1.0, DETACHER, tmp_path / "orphan")
    orphan = int((tmp_path / "orphan").read_text())
    try:
        os.kill(agent.process.pid, signal.SIGSTOP)
        wait_gone(agent.worker)
        wait_gone(orphan)
        assert not gone(agent.guardian)
        os.kill(agent.process.pid, signal.SIGCONT)
        word, seconds, status = read_line(agent.process.stdout).split()
        assert (word, status) == ("fenced", "-9")
        assert float(seconds) >= 1.0
    finally:
        agent.kill()
    wait_gone(agent.guardian)


def test_a_guardian_that_was_frozen_itself_fences_nobody(tmp_path: Path) -> None:
    timeout_s = 2.0
    agent = Agent(timeout_s, TOLD_SLEEPER, tmp_path / "told")
    try:
        # Both are frozen for longer than the timeout, as in a suspended machine; the guardian wakes first.
        os.kill(agent.guardian, signal.SIGSTOP)
        os.kill(agent.process.pid, signal.SIGSTOP)
        time.sleep(timeout_s + 0.5)
        os.kill(agent.guardian, signal.SIGCONT)
        time.sleep(0.3)  # several of its turns
        os.kill(agent.process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert not gone(agent.worker)
    finally:
        agent.kill()
    wait_gone(agent.worker)


def test_a_dismissed_guardian_touches_nothing(watched: Watched) -> None:
    worker = watched.python(SLEEPER)
    problems: list[str] = []
    guardian = Guardian(token=worker.token, timeout_s=60.0, on_problem=problems.append)
    guardian.start()
    pid = guardian.pid
    assert pid is not None
    guardian.register(worker.pid)
    guardian.pulse()
    guardian.close()
    guardian.close()
    assert gone(pid)
    assert worker.exit_status() is None
    assert problems == []


def test_a_dead_guardian_is_replaced_a_few_times(watched: Watched) -> None:
    worker = watched.python(SLEEPER)
    problems: list[str] = []
    guardian = Guardian(token=worker.token, timeout_s=60.0, on_problem=problems.append)
    guardian.start()
    guardian.register(worker.pid)
    for _ in range(RESTARTS + 1):
        pid = guardian.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        guardian.pulse()
    assert len(problems) == RESTARTS + 1
    assert guardian.pid is None
    guardian.pulse()
    guardian.register(worker.pid)
    guardian.unregister(worker.pid)
    guardian.close()
    assert worker.exit_status() is None
