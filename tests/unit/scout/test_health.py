"""Each rule about a host's health, and how readings become a verdict."""

from __future__ import annotations

import pytest

from lmres.scout import health
from lmres.scout.health import (
    Clock,
    CommandEnd,
    Cpu,
    Disk,
    Gpu,
    Judge,
    Memory,
    Network,
    Reading,
    Said,
    Verdict,
    clock_reading,
    command_reading,
    cpu_reading,
    disk_reading,
    gpu_base,
    gpu_reading,
    memory_reading,
    network_reading,
    one_line,
)

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("total", "available", "status"),
    [
        (100 * GIB, 3 * GIB, "fit"),
        (100 * GIB, int(1.9 * GIB), "unfit"),
        (8 * GIB, 250 * MIB, "unfit"),
        (8 * GIB, 260 * MIB, "fit"),
        (2000 * GIB, 5 * GIB, "fit"),
        (2000 * GIB, 3 * GIB, "unfit"),
        (512 * MIB, 100 * MIB, "fit"),
    ],
)
def test_memory_that_is_left(total: int, available: int, status: str) -> None:
    reading = memory_reading(Memory(total=total, available=available))
    assert reading.status == status and not reading.fact
    assert "available of" in reading.found


def test_what_workers_take_is_only_told() -> None:
    low = Memory(total=100 * GIB, available=1 * GIB)
    reading = memory_reading(low, is_busy=True)
    assert reading.status == "fit" and "1.0 GiB of memory available" in reading.warning
    assert memory_reading(low).status == "unfit"
    assert memory_reading(Memory(total=100 * GIB, available=50 * GIB), is_busy=True).warning == ""


def test_a_control_groups_limit_counts_too() -> None:
    rich = {"total": 100 * GIB, "available": 50 * GIB}
    assert memory_reading(Memory(**rich, group_limit=10 * GIB, group_free=200 * MIB)).status == "unfit"
    assert memory_reading(Memory(**rich, group_limit=10 * GIB, group_free=300 * MIB)).status == "fit"
    assert memory_reading(Memory(**rich, group_limit=200 * GIB, group_free=0)).status == "fit", "no limit at all"


@pytest.mark.parametrize(
    ("disk", "status", "fact"),
    [
        (Disk(path="/s", total=100 * GIB, free=2 * GIB, read_only=False), "fit", False),
        (Disk(path="/s", total=50 * GIB, free=400 * MIB, read_only=False), "unfit", False),
        (Disk(path="/s", total=10_000 * GIB, free=2 * GIB, read_only=False), "fit", False),
        (Disk(path="/s", total=2 * GIB, free=60 * MIB, read_only=False), "unfit", False),
        (Disk(path="/s", total=16 * MIB, free=8 * MIB, read_only=False), "fit", False),
        (Disk(path="/s", total=100 * GIB, free=50 * GIB, read_only=True), "unfit", True),
    ],
)
def test_the_file_system_of_the_state_folder(disk: Disk, status: str, fact: bool) -> None:
    reading = disk_reading(disk)
    assert (reading.status, reading.fact) == (status, fact)
    assert "/s" in reading.found


def test_load_and_quota_are_not_a_fault() -> None:
    before = Cpu(at_ms=0, quota_wait_us=0, hot_ms=0, hot_events=0)
    reading = cpu_reading(before, Cpu(at_ms=5_000, quota_wait_us=4_000_000, hot_ms=100, hot_events=3))
    assert reading.status == "fit"
    assert reading.warning == "the control group's processor quota held it back for 80% of the time"


def test_heat_that_holds_a_core_back() -> None:
    hot = cpu_reading(Cpu(at_ms=0, hot_ms=1_000), Cpu(at_ms=5_000, hot_ms=2_500))
    assert (hot.status, hot.fact, hot.found) == (
        "unfit",
        False,
        "a core was throttled by heat for 30% of the time",
    )
    counted = cpu_reading(Cpu(at_ms=0, hot_events=0), Cpu(at_ms=5_000, hot_events=200))
    assert (counted.status, counted.found) == ("unfit", "a core was throttled by heat 40 times a second")
    assert cpu_reading(None, Cpu(at_ms=0, hot_ms=10**9)).status == "fit", "what was before is not known"
    assert cpu_reading(Cpu(at_ms=0, hot_ms=50), Cpu(at_ms=5_000, hot_ms=1)).status == "fit", "counters began anew"


def eth(at_ms: int, **more: object) -> Network:
    values = {"address": "10.0.0.1", "interface": "eth0", "carrier": True, **more}
    return Network(at_ms=at_ms, **values)  # type: ignore[arg-type]


def test_links() -> None:
    assert network_reading(None, eth(0)).status == "fit"
    down = network_reading(eth(0), eth(5_000, up=False, carrier=None))
    assert (down.status, down.fact, down.found) == ("unfit", True, "eth0 (10.0.0.1) is down")
    cut = network_reading(eth(0), eth(5_000, carrier=False))
    assert (cut.status, cut.fact, cut.found) == ("unfit", True, "eth0 (10.0.0.1) has lost its carrier")
    gone = network_reading(eth(0), eth(5_000, interface=""))
    assert (gone.status, gone.fact) == ("unfit", True)
    assert gone.found == "eth0 does not carry 10.0.0.1 any more"
    assert network_reading(None, eth(0, interface="")).status == "skipped", "behind an address translation, say"


@pytest.mark.parametrize(
    ("packets", "errors", "drops", "status"),
    [
        (100_000, 0, 0, "fit"),
        (100_000, 2, 0, "fit"),
        (100_000, 5_000, 0, "unfit"),
        (3, 3, 0, "fit"),
        (100_000, 0, 3_000, "fit"),
        (100_000, 0, 20_000, "unfit"),
    ],
)
def test_errors_and_drops_that_keep_rising(packets: int, errors: int, drops: int, status: str) -> None:
    before = eth(0, packets=50, errors=7, drops=9)
    reading = network_reading(before, eth(5_000, packets=50 + packets, errors=7 + errors, drops=9 + drops))
    assert reading.status == status and not reading.fact


def test_another_interface_has_other_counters() -> None:
    before = eth(0, interface="eth1", errors=0)
    assert network_reading(before, eth(5_000, errors=10**6, packets=10**6)).status == "fit"


def test_a_clock_that_jumps_is_told_and_nothing_else() -> None:
    before = Clock(wall_ms=1_000_000, monotonic_ms=500)
    back = clock_reading(before, Clock(wall_ms=1_000_000, monotonic_ms=5_500))
    assert (back.status, back.warning) == ("fit", "the wall clock jumped by -5.0 s")
    slewed = clock_reading(before, Clock(wall_ms=1_005_400, monotonic_ms=5_500))
    assert (slewed.status, slewed.warning) == ("fit", "")


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu(index=3, lost="GPU is lost"), "GPU 3: does not answer: GPU is lost"),
        (Gpu(index=0, uncorrected=2), "GPU 0: 2 new memory errors that could not be corrected"),
        (Gpu(index=0, remap_failed=True), "GPU 0: a faulty row of its memory could not be replaced"),
        (
            Gpu(index=0, remap_pending=True),
            "GPU 0: a faulty row of its memory is to be replaced: it must be reset",
        ),
        (Gpu(index=0, links_up=(0, 3)), "GPU 0: NVLink 1, 2 went down"),
    ],
)
def test_faults_of_a_gpu(gpu: Gpu, words: str) -> None:
    before = [Gpu(index=0, uncorrected=0, links_up=(0, 1, 2, 3) if gpu.links_up else ()), Gpu(index=3)]
    reading = gpu_reading(before, [Gpu(index=1), gpu])
    assert (reading.status, reading.fact, reading.found) == ("unfit", True, words)


def test_memory_errors_from_before_do_not_count_and_new_ones_do() -> None:
    first = (Gpu(index=0, uncorrected=3), Gpu(index=1), Gpu(index=2, lost="once"))
    base = gpu_base((), first)
    old = gpu_reading(base, first[:2])
    assert old.status == "fit" and "3 on GPU 0" in old.warning
    new = gpu_reading(base, [Gpu(index=0, uncorrected=4), Gpu(index=1)])
    assert (new.status, new.fact) == ("unfit", True)
    assert new.found == "GPU 0: 1 new memory errors that could not be corrected"
    later = gpu_base(base, [Gpu(index=0, uncorrected=0), Gpu(index=2, uncorrected=5), Gpu(index=9, uncorrected=1)])
    assert [d.uncorrected for d in later] == [0, None, 5, 1], "the driver was loaded again; others tell at last"
    assert gpu_reading(later, [Gpu(index=0, uncorrected=1)]).status == "unfit"


def test_a_hot_gpu_is_a_trend_and_a_cool_one_none() -> None:
    hot = gpu_reading([], [Gpu(index=0, celsius=92, slowdown_celsius=90)])
    assert (hot.status, hot.fact, hot.found) == ("unfit", False, "GPU 0: 92 °C, it slows down at 90 °C")
    assert gpu_reading([], [Gpu(index=0, name="H100", celsius=70, slowdown_celsius=90, uncorrected=0)]).status == "fit"
    assert gpu_reading([], [Gpu(index=0)]).status == "fit", "a device that tells nothing has no faults to tell"


def test_the_sites_command() -> None:
    assert command_reading(CommandEnd(code=0, line="all well")).status == "fit"
    bad = command_reading(CommandEnd(code=3, line="\n  link 2 is \x1b[31mdown\x1b[0m \nmore"))
    assert (bad.status, bad.fact) == ("unfit", True)
    assert bad.found == "link 2 is  [31mdown [0m"
    assert command_reading(CommandEnd(code=1)).found == "the health command ended with 1"
    assert command_reading(CommandEnd(code=1, problem="can not be started")).status == "skipped"


def test_a_reason_is_one_bounded_line() -> None:
    assert one_line("") == one_line(" \n\t\n") == ""
    assert one_line("a\r\nb") == "a"
    assert len(one_line("x" * 5_000)) == health.MAX_REASON_CHARS


# -- the verdict ------------------------------------------------------------------------------------------------------


def bad(check: str = "memory", *, fact: bool = False, lasting_ms: int = 0, found: str = "bad") -> Reading:
    return Reading(check=check, status="unfit", found=found, fact=fact, lasting_ms=lasting_ms)


def good(check: str = "memory", warning: str = "") -> Reading:
    return Reading(check=check, warning=warning)


def verdicts(judge: Judge, *readings: Reading, from_ms: int = 0, step_ms: int = 5_000) -> list[bool]:
    return [judge.take([r], from_ms + i * step_ms)[0].fit for i, r in enumerate(readings)]


def test_a_fact_counts_at_once_a_trend_after_three() -> None:
    assert verdicts(Judge(), bad(fact=True)) == [False]
    assert verdicts(Judge(), bad(), bad(), bad()) == [True, True, False]
    assert verdicts(Judge(), bad(), bad(), good(), bad(), bad()) == [True] * 5


def test_fit_again_after_two_good_ones() -> None:
    judge = Judge()
    assert verdicts(judge, bad(fact=True), good(), bad(), good(), good()) == [False, False, False, False, True]
    assert judge.verdict() == Verdict(fit=True, reason="")


def test_an_event_stands_for_its_time() -> None:
    event = bad("kernel", fact=True, lasting_ms=20_000)
    assert verdicts(Judge(), event, good("kernel"), good("kernel"), good("kernel")) == [False] * 4
    assert verdicts(Judge(), event, *[good("kernel")] * 5, from_ms=0) == [False] * 5 + [True]


def test_the_reason_stays_while_the_same_checks_find_the_host_unfit() -> None:
    judge = Judge()
    judge.take([bad("gpu", fact=True, found="GPU 0: lost"), bad("disk", fact=True, found="read-only")], 0)
    judge.take([bad("gpu", fact=True, found="GPU 1: lost")], 5_000)
    assert judge.verdict() == Verdict(fit=False, reason="disk: read-only; gpu: GPU 0: lost")
    for at_ms in (10_000, 15_000):
        judge.take([good("disk"), bad("gpu", fact=True, found=f"GPU 2: {at_ms} errors")], at_ms)
    assert judge.verdict() == Verdict(fit=False, reason="gpu: GPU 0: lost")
    for at_ms in (20_000, 25_000):
        judge.take([good("gpu")], at_ms)
    judge.take([bad("gpu", fact=True, found="GPU 1: lost")], 30_000)
    assert judge.verdict() == Verdict(fit=False, reason="gpu: GPU 1: lost")


def test_what_could_not_run_is_said_once_and_changes_nothing() -> None:
    judge = Judge()
    nothing = health.skipped("command", "it did not end")
    assert judge.take([nothing], 0) == (
        Verdict(),
        (Said(check="command", kind="skipped", text="it did not end"),),
    )
    assert judge.take([nothing], 1) == (Verdict(), ())
    _, said = judge.take([good("command")], 2)
    assert [s.kind for s in said] == ["runs"]
    judge.take([bad("command", fact=True, found="link down")], 3)
    verdict, said = judge.take([nothing], 4)
    assert not verdict.fit and [s.kind for s in said] == ["skipped"]
    assert verdicts(Judge(), bad(), bad(), health.skipped("memory", "?"), bad()) == [True, True, True, False]


def test_warnings_are_told_once_when_they_last_and_jumps_each_time() -> None:
    judge = Judge()
    slow = good("cpu", warning="quota")
    told = [len(judge.take([slow], i)[1]) for i in range(6)]
    assert told == [0, 0, 1, 0, 0, 0]
    judge.take([good("cpu")], 7)
    assert sum(len(judge.take([slow], 8 + i)[1]) for i in range(4)) == 1
    jump = good("clock", warning="jumped")
    assert [len(judge.take([jump], i)[1]) for i in range(2)] == [1, 1]
