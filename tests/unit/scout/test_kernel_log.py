"""Lines as kernels write them, and what they say about the host."""

from __future__ import annotations

import pytest

from lmres.scout.health import EVENT_STANDS_MS
from lmres.scout.kernel_log import judge_lines

ALL = ("memory", "disk", "cpu", "gpu", "network")
LOST = "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PROGRAM = (
    "NVRM: Xid (PCI:0000:17:00): 31, pid=9113, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
)
REMAP = "NVRM: Xid (PCI:0000:4f:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping"
CHECK = "mce: [Hardware Error]: Machine check: Processor context corrupt"
UNCORRECTED = (
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x12 offset:0x0)"
)
CORRECTED = "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x12 offset:0x0)"
POISON = "Memory failure: 0x1234ab: recovery action for dirty LRU page: Recovered"
OOM = "Out of memory: Killed process 4242 (python) total-vm:9000kB, anon-rss:8000kB, file-rss:0kB, UID:0 pgtables:1kB"
GROUP_OOM = "Memory cgroup out of memory: Killed process 4243 (pt_main_thread) total-vm:9000kB, anon-rss:8000kB"
OLD_OOM = "Out of memory: Kill process 77 (python) score 900 or sacrifice child"


@pytest.mark.parametrize(
    "line", [LOST, CHECK, UNCORRECTED, POISON, LOST.replace("79", "48"), LOST.replace("79", "119")]
)
def test_faults_of_the_hardware(line: str) -> None:
    reading = judge_lines(["usb 1-1: new device", line], ALL).reading
    assert (reading.check, reading.status, reading.fact) == ("kernel", "unfit", True)
    assert reading.lasting_ms == EVENT_STANDS_MS
    assert reading.found


@pytest.mark.parametrize(
    "line",
    [
        PROGRAM,
        CORRECTED,
        "mce: [Hardware Error]: Machine check events logged",
        "EDAC MC: Ver: 3.0.0",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "EDAC i10nm: 0 UE so far",
        "systemd[1]: Started memory accounting",
        "\x00\ud800",
    ],
)
def test_what_is_no_fault_of_the_host(line: str) -> None:
    reading = judge_lines([line], ALL).reading
    assert (reading.status, reading.warning) == ("fit", "")


def test_a_row_to_be_replaced_is_told_only() -> None:
    reading = judge_lines([REMAP], ALL).reading
    assert reading.status == "fit" and "Xid 63" in reading.warning


def test_only_the_chosen_parts_are_looked_at() -> None:
    assert judge_lines([LOST], ("memory", "cpu")).reading.status == "fit"
    assert judge_lines([UNCORRECTED], ("gpu", "cpu")).reading.status == "fit"
    assert judge_lines([CHECK], ("cpu",)).reading.status == "unfit"


def test_the_first_fault_is_named() -> None:
    reading = judge_lines([REMAP, UNCORRECTED, LOST], ALL).reading
    assert reading.found.startswith("EDAC MC0: 1 UE")


def test_whom_the_kernel_has_killed() -> None:
    found = judge_lines([OOM, GROUP_OOM, OLD_OOM, "oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=5,uid=0"], ALL)
    assert found.killed == (4242, 4243, 77)
    assert found.reading.status == "fit", "it says nothing about the host"
