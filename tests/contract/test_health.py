"""What is read of this very host, the site's command, and the watch over both."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lmres.policy import Health
from lmres.scout.edge import health as watching
from lmres.scout.edge import readers
from lmres.scout.edge.gpus import Gpus
from lmres.scout.edge.health import HealthWatch, Host, look_once
from lmres.scout.edge.readers import CannotRead, KernelLog
from lmres.scout.edge.site_command import SiteCommand
from lmres.scout.health import Gpu, Said, Verdict

BOUND_S = 20.0


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come")


# -- readers ----------------------------------------------------------------------------------------------------------


def test_this_hosts_memory_is_what_others_say() -> None:
    found, other = readers.read_memory(), psutil.virtual_memory()
    assert found.total == other.total
    assert abs(found.available - other.available) < other.total / 4


def test_this_hosts_disk(tmp_path: Path) -> None:
    found = readers.read_disk(tmp_path)
    assert 0 < found.free <= found.total and not found.read_only
    with pytest.raises(CannotRead, match="missing"):
        readers.read_disk(tmp_path / "missing")


def test_loopback_carries_its_address() -> None:
    found = readers.read_network(7, "127.0.0.1")
    assert (found.interface, found.up, found.carrier is not False) == ("lo", True, True)
    assert readers.read_network(7, "192.0.2.77").interface == ""


def test_an_interface_from_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "eth0"
    (folder / "statistics").mkdir(parents=True)
    for name, text in {"flags": "0x1003\n", "carrier": "0\n", "statistics/rx_errors": "3\n"}.items():
        (folder / name).write_text(text)
    for name, count in {"tx_errors": 4, "rx_packets": 10, "tx_packets": 20, "rx_dropped": 5, "tx_dropped": 6}.items():
        (folder / "statistics" / name).write_text(f"{count}\n")
    found = readers.read_network(0, "10.0.0.1", tmp_path, addresses=lambda: iter([("eth0:1", "10.0.0.1")]))
    assert (found.up, found.carrier, found.packets, found.errors, found.drops) == (True, False, 30, 7, 11)
    (folder / "flags").write_text("0x1002\n")
    (folder / "carrier").unlink()
    found = readers.read_network(0, "10.0.0.1", tmp_path, addresses=lambda: iter([("eth0", "10.0.0.1")]))
    assert (found.up, found.carrier) == (False, None)


def test_heat_from_the_cores_files(tmp_path: Path) -> None:
    for core, count in enumerate((3, 9)):
        folder = tmp_path / f"cpu{core}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{count}\n")
        (folder / "core_throttle_total_time_ms").write_text(f"{count * 10}\n")
    found = readers.read_cpu(5, tmp_path)
    assert (found.hot_ms, found.hot_events) == (90, 9)
    assert readers.read_cpu(5, tmp_path / "none").hot_ms is None


def test_the_kernels_log(tmp_path: Path) -> None:
    try:
        log = KernelLog()
    except CannotRead as error:
        pytest.skip(str(error))
    assert log.lines() == [], "only what is new"
    mark = f"lmres test {time.monotonic_ns()}"
    try:
        Path("/dev/kmsg").write_text(f"<7>{mark}\n")
    except OSError:
        pytest.skip("it may be read only")
    assert mark in until(log.lines)
    log.close()
    with pytest.raises(CannotRead):
        KernelLog(tmp_path / "missing")


def test_both_clocks_go_on_alike() -> None:
    first = readers.read_clock()
    time.sleep(0.05)
    second = readers.read_clock()
    gone = second.monotonic_ms - first.monotonic_ms
    assert gone >= 40
    assert abs((second.wall_ms - first.wall_ms) - gone) < 1_000


# -- devices ----------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml(SimpleNamespace):
    """Answers as NVML does. ``lost``: devices that do not answer any more."""

    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
    NVMLError = NvmlError

    def __init__(self, count: int) -> None:
        super().__init__(count=count, lost=set(), links={0: 1, 1: 0})

    def nvmlInit(self) -> None:
        if self.count < 0:
            raise NvmlError(9)

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return int(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}abc"

    def nvmlDeviceGetName(self, device: int) -> str:
        return "H200"

    def nvmlDeviceGetTotalEccErrors(self, device: int, kind: int, counter: int) -> int:
        if device == 1:
            raise NvmlError(3)
        return 0

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        if link not in self.links:
            raise NvmlError(2)
        return int(self.links[link])

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 40

    # An older package has no nvmlDeviceGetTemperatureThreshold.


def test_devices_as_nvml_shows_them() -> None:
    nvml = Nvml(2)
    gpus = Gpus(nvml, {})
    want = {"name": "H200", "links_up": (0,), "celsius": 40, "slowdown_celsius": None}
    assert gpus.read() == (Gpu(index=0, uncorrected=0, **want), Gpu(index=1, uncorrected=None, **want))
    nvml.lost.add(1)
    assert gpus.read()[1] == Gpu(index=1, lost="error 15")


@pytest.mark.parametrize(
    ("visible", "indices"), [("1", [1]), ("1,0", [1, 0]), ("GPU-1", [1]), ("0,7", [0]), ("GPU-0abc,GPU-2", [0, 2])]
)
def test_only_visible_devices(visible: str, indices: list[int]) -> None:
    gpus = Gpus(Nvml(3), {"CUDA_VISIBLE_DEVICES": visible})
    assert [g.index for g in gpus.read()] == indices


def test_no_devices_are_nothing_to_look_at() -> None:
    for nvml, environ in ((Nvml(0), {}), (Nvml(2), {"CUDA_VISIBLE_DEVICES": ""}), (Nvml(-1), {})):
        with pytest.raises(CannotRead):
            Gpus(nvml, environ)


# -- the site's command -----------------------------------------------------------------------------------------------


def run(command: str, timeout_s: float = BOUND_S, **more: Any) -> Any:
    return SiteCommand(command, timeout_s=timeout_s, **more).run()


def test_exit_code_and_first_line() -> None:
    end = run("echo; echo link 2 down >&2; echo more; exit 4")
    assert (end.code, end.problem) == (4, "")
    assert end.line.strip().startswith("link 2 down")
    assert run("exit 0").code == 0
    assert run('echo "$LMRES_NODE_ID"', env={"LMRES_NODE_ID": "n7"}).line == "n7\n"


def test_what_can_not_be_started_says_nothing() -> None:
    assert "127" in run("/no/such/program").problem
    assert "signal 9" in run("kill -9 $$").problem


def test_much_output_is_read_and_dropped() -> None:
    end = run("head -c 3000000 /dev/zero | tr '\\0' 'x'; exit 1")
    assert (end.code, len(end.line)) == (1, 4096)


def test_one_that_hangs_is_ended_whole(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"echo $$ > {pids}; trap '' TERM; (setsid sleep 60 & echo $! >> {pids}; wait)"
    began = time.monotonic()
    end = run(command, timeout_s=1.0)
    assert "did not end within 1 s" in end.problem
    assert time.monotonic() - began < BOUND_S
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_one_that_leaves_a_child_with_the_pipe_does_not_hold_us() -> None:
    began = time.monotonic()
    assert run("sleep 60 & echo on").line == "on\n"
    assert time.monotonic() - began < BOUND_S


def test_the_guardian_is_told_of_its_process() -> None:
    seen: list[tuple[str, int]] = []
    run("exit 0", on_spawn=lambda pid: seen.append(("spawn", pid)), on_gone=lambda pid: seen.append(("gone", pid)))
    assert [name for name, _ in seen] == ["spawn", "gone"] and seen[0][1] == seen[1][1]


# -- the watch --------------------------------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.armed: list[tuple[tuple[str, ...], str]] = []
        self.changes: list[Verdict] = []
        self.said: list[Said] = []
        self.off: list[str] = []

    def watch(self, settings: Health, folder: Path) -> HealthWatch:
        return HealthWatch(
            settings,
            Host(folder=folder, address=lambda: "127.0.0.1"),
            on_armed=lambda checks, reason: self.armed.append((checks, reason)),
            on_change=self.changes.append,
            on_said=self.said.append,
            on_off=self.off.append,
        )


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("lmres-health")])


def test_one_look_at_this_host(tmp_path: Path) -> None:
    found = {r.check: r for r in look_once(Health(), Host(folder=tmp_path, address=lambda: "127.0.0.1"), apart_s=0.05)}
    assert set(found) == {"clock", "kernel", "memory", "disk", "cpu", "network", "gpu"}
    assert {found[name].status for name in ("memory", "disk", "network")} == {"fit"}, found
    assert all(r.found for r in found.values())


def test_a_file_that_the_command_reads_turns_the_host_unfit_and_fit_again(tmp_path: Path, seen: Seen) -> None:
    sick = tmp_path / "sick"
    command = f"test ! -e {sick} || {{ cat {sick}; exit 1; }}"
    watch = seen.watch(Health(interval_s=0.1, checks=("memory",), command=command), tmp_path)
    watch.start()
    assert watch.verdict.fit and seen.armed[0][0] == ("clock", "command", "kernel", "memory")
    sick.write_text("fan 3 stands still\n")
    until(lambda: seen.changes)
    assert seen.changes == [Verdict(fit=False, reason="command: fan 3 stands still")]
    sick.unlink()
    until(lambda: len(seen.changes) == 2)
    watch.close()
    assert seen.changes[1] == Verdict() and not seen.off and not seen.said


def test_unfit_before_the_start_returns(tmp_path: Path, seen: Seen) -> None:
    watch = seen.watch(Health(interval_s=60, checks=("disk",), command="sleep 0.3; echo broken; exit 1"), tmp_path)
    watch.start()
    assert watch.verdict == Verdict(fit=False, reason="command: broken")
    watch.close()


def test_a_command_that_hangs_holds_nothing_up_and_is_said_once(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "FIRST_S", 0.3)
    monkeypatch.setattr(watching, "LEAST_TIMEOUT_S", 0.5)
    watch = seen.watch(Health(interval_s=0.1, checks=("memory",), command="sleep 60"), tmp_path)
    began = time.monotonic()
    watch.start(0.3)
    assert time.monotonic() - began < BOUND_S and watch.verdict.fit
    until(lambda: seen.said)
    time.sleep(1.5)
    watch.close()
    assert [(s.check, s.kind) for s in seen.said] == [("command", "skipped")]
    assert seen.changes == [] and "did not end within 0.5 s" in seen.said[0].text
    until(lambda: not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE])


def test_a_check_that_never_answers_is_skipped_and_others_go_on(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def stuck(path: Path) -> Any:
        released.wait(BOUND_S)
        raise CannotRead("released")

    monkeypatch.setattr(watching, "FIRST_S", 0.2)
    monkeypatch.setattr(watching, "LEAST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(readers, "read_disk", stuck)
    watch = seen.watch(Health(interval_s=0.1, checks=("memory", "disk")), tmp_path)
    watch.start()
    until(lambda: seen.said)
    assert seen.said == [Said(check="disk", kind="skipped", text="it has not answered for 0.5 s")]
    released.set()
    watch.close()


def test_a_watch_that_fails_says_so_once_and_is_tried_again(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, readings: Any, now_ms: int) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(watching.Judge, "take", broken)
        watch = seen.watch(Health(interval_s=0.1, checks=("memory",)), tmp_path)
        watch.start()
        until(lambda: seen.off)
        until(lambda: not [t for t in threading.enumerate() if t.name == "lmres-health"])
    assert seen.off == ["RuntimeError('planted')"] and watch.verdict.fit
    assert watch.rearm() and not watch.rearm()
    until(lambda: len(seen.armed) == 2)
    watch.close()
    assert len(seen.off) == 1


def test_a_poke_is_a_round_now(tmp_path: Path, seen: Seen) -> None:
    sick = tmp_path / "sick"
    watch = seen.watch(Health(interval_s=60, checks=(), command=f"test ! -e {sick}"), tmp_path)
    watch.start()
    sick.write_text("")
    watch.poke()
    until(lambda: seen.changes)
    watch.close()
    assert not seen.changes[0].fit


def test_a_watch_costs_little(tmp_path: Path, seen: Seen) -> None:
    watch = seen.watch(Health(interval_s=0.1), tmp_path)
    watch.start()
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(2.0)
    share = (time.process_time() - cpu) / (time.monotonic() - began) * 0.1 / 5.0
    watch.close()
    assert share < 0.01, f"{share:.2%} of a core at 5 s"


def test_closing_ends_the_command(tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FIRST_S", 0.2)
    note = tmp_path / "pid"
    watch = seen.watch(Health(interval_s=0.1, checks=(), command=f"echo $$ > {note}; exec sleep 60"), tmp_path)
    watch.start(0.2)
    pid = int(until(lambda: note.exists() and note.read_text()))
    watch.close()
    until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def test_closing_leaves_nothing_of_the_command_even_in_the_first_round(tmp_path: Path, seen: Seen) -> None:
    pids = tmp_path / "pids"
    command = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 60' & sleep 0.3; echo $$ >> {pids}; sleep 60"
    watch = seen.watch(Health(interval_s=60, checks=("disk",), command=command), tmp_path)
    watch.start(0.0)
    found = until(lambda: pids.exists() and len(pids.read_text().split()) == 2 and pids.read_text().split())
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 5.0
    gone = [not psutil.pid_exists(int(p)) or psutil.Process(int(p)).status() == psutil.STATUS_ZOMBIE for p in found]
    assert gone == [True, True]
    assert seen.armed == [] and seen.off == []


def test_what_the_command_left_in_the_background_ends_with_the_watch(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = SiteCommand(f"setsid sh -c 'echo $$ > {note}; exec sleep 60' & sleep 0.5", timeout_s=BOUND_S)
    assert command.run().code == 0
    pid = int(until(lambda: note.exists() and note.read_text()))
    assert psutil.pid_exists(pid)
    command.close()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert command.run().problem == "the agent ends"


def test_a_watch_that_can_not_have_a_thread_is_off_and_tried_again(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watch = seen.watch(Health(interval_s=60, checks=("memory",)), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        watch.start()
        assert watch.rearm()
    assert seen.off == ['RuntimeError("can\'t start new thread")'] * 2 and watch.verdict.fit
    assert watch.rearm()
    until(lambda: seen.armed)
    watch.close()
