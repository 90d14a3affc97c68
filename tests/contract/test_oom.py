"""Processes that the kernel ends for want of memory are told from those that somebody kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmres.scout.edge.oom import GROUP, HOST, KERNEL, OomWatch
from tests.contract.test_crew import Harness, eventually

EATER = "import os\nopen({procs!r}, 'w').write(str(os.getpid()))\nx = bytearray(400 << 20)\nimport time; time.sleep(60)"
V2, V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


class Places:
    """Files as the kernel writes them."""

    def __init__(self, folder: Path, *, log: bool = False, group: bool = True) -> None:
        self.folder = folder
        (folder / "fs/g").mkdir(parents=True)
        (folder / "cgroup").write_text("0::/g\n")
        self.has_group = group
        self.happens(0, 0)
        self.log = folder / "kmsg"
        if log:
            self.log.write_text("")
        self.watch = OomWatch(log=self.log, vmstat=folder / "vmstat", membership=folder / "cgroup", root=folder / "fs")

    def happens(self, group: int, host: int, line: str = "", *, hits: int | None = None) -> None:
        if self.has_group:
            (self.folder / "fs/g/memory.events").write_text(
                f"low 0\noom {group if hits is None else hits}\noom_kill {group}\n"
            )
        (self.folder / "vmstat").write_text(f"pgfault 7\noom_kill {host}\n")
        if line:
            with self.log.open("a") as file:
                file.write(f"6,1,2,-;{line}\n")


def test_a_kill_without_a_word_of_the_kernel_is_none_of_its_own(tmp_path: Path) -> None:
    places = Places(tmp_path, log=True)
    assert places.watch.cause(7) == ""


def test_the_log_names_the_pid(tmp_path: Path) -> None:
    places = Places(tmp_path, log=True)
    places.happens(0, 1, "Out of memory: Killed process 7 (python) total-vm:9kB")
    assert places.watch.cause(8) == ""
    assert places.watch.cause(7) == HOST
    assert places.watch.cause(7) == ""


def test_the_counter_of_the_group_counts_each_once(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.happens(2, 2)
    assert [places.watch.cause(pid) for pid in (7, 8, 9)] == [GROUP, GROUP, ""]


def test_one_of_the_group_that_is_killed_for_want_of_the_hosts_memory(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.happens(1, 1, hits=0)
    assert places.watch.cause(7) == KERNEL
    places.happens(2, 2, hits=1)
    assert places.watch.cause(8) == GROUP


def test_the_limit_of_a_group_above(tmp_path: Path) -> None:
    places = Places(tmp_path)
    (tmp_path / "fs/memory.events.local").write_text("oom 0\noom_kill 0\n")
    places.watch.renew()
    places.happens(1, 1, hits=0)
    (tmp_path / "fs/memory.events.local").write_text("oom 1\noom_kill 0\n")
    assert places.watch.cause(7) == GROUP


def test_the_hosts_counter_is_for_where_nothing_else_is_told(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.happens(0, 1)
    assert places.watch.cause(7) == "", "the group's counter says that it was another"
    bare = Places(tmp_path / "bare", group=False)
    bare.happens(0, 1)
    assert [bare.watch.cause(pid) for pid in (7, 8)] == [HOST, ""]


def test_what_was_before_does_not_count(tmp_path: Path) -> None:
    places = Places(tmp_path, log=True)
    places.happens(1, 1, "Out of memory: Killed process 7 (python) total-vm:9kB")
    places.watch.renew()
    assert places.watch.cause(7) == ""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of 64 MB."""
    version = 1 if (V1 / "tasks").exists() else 2
    folder = (V1 if version == 1 else V2) / f"lmres-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(64 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    with contextlib.suppress(OSError):
        (folder / "memory.swap.max").write_text("0")
    yield folder
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)


def membership(group: Path, folder: Path) -> Path:
    file = folder / "cgroup"
    file.write_text(f"4:memory:/{group.name}\n" if group.parent == V1 else f"0::/{group.name}\n")
    return file


def test_a_process_that_the_kernel_really_ends(group: Path, tmp_path: Path) -> None:
    watch = OomWatch(membership=membership(group, tmp_path))
    eater = subprocess.Popen([sys.executable, "-S", "-c", EATER.format(procs=str(group / "cgroup.procs"))])
    assert eater.wait(30) == -signal.SIGKILL
    assert watch.cause(eater.pid) == GROUP
    watch.close()


def test_the_workers_end_is_evidence_of_it(group: Path, tmp_path: Path) -> None:
    harness = Harness()
    crew = harness.crew
    crew._oom = OomWatch(membership=membership(group, tmp_path))
    crew.begin(1, 2, {})
    eater = harness.launch([sys.executable, "-S", "-c", EATER.format(procs=str(group / "cgroup.procs"))], 0)
    eventually(lambda: crew.faults)
    other = harness.launch([sys.executable, "-S", "-c", "import time; time.sleep(60)"], 1)
    other.kill()
    eventually(lambda: len(crew.faults) == 2)
    first, second = (fault.cause for fault in crew.faults)
    assert (first.pid, first.failure_class, first.exit_status) == (eater.pid, "out_of_memory", -9)
    assert "out of memory" in first.detail
    assert (second.pid, second.failure_class, second.detail) == (other.pid, "process_crash", "killed by SIGKILL")
    crew.stop()
    crew.join_stop(10)
    crew.close()
