"""What lines of the kernel's log say about the host. Only new lines are judged: what is old may long be repaired.

The numbers of GPU errors are NVIDIA's (document "XID Errors"): those of the device or its links count against the
host; those that a faulty program causes as well (13, 31, 43, 45 and others) do not. Errors that the hardware has
corrected are no fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lmres.scout.health import EVENT_STANDS_MS, Reading, one_line

CHECK = "kernel"
FATAL_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})
NOTED_XIDS = frozenset({63, 92, 94})

_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)(.*)")
_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory|oom-kill)[^:]*: (?:Killed process|Kill process) (\d+)")
_UNCORRECTED = re.compile(
    r"EDAC .*\bUE\b|Uncorrect(?:ed|able)[\w ,]*(?:memory|hardware|machine check|error)|Memory failure: 0x"
    r"|mce: .*(?:Fatal|uncorrected)|Machine check: Processor context corrupt",
    re.IGNORECASE,
)
_NONE_YET = re.compile(r"\b0 (?:UE|uncorrect)", re.IGNORECASE)
_MEMORY = re.compile(r"EDAC|Memory failure|memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding:
    """``killed``: pids that the kernel killed for want of memory, as its own namespace numbers them."""

    reading: Reading
    killed: tuple[int, ...] = ()


def judge_lines(lines: Iterable[str], checks: Collection[str]) -> LogFinding:
    """``lines``: new messages without their prefix, in order. ``checks``: parts of the host that are looked at."""
    faults: list[str] = []
    notes: list[str] = []
    killed: list[int] = []
    count = 0
    for line in lines:
        count += 1
        out_of_memory = _OOM.search(line)
        if out_of_memory is not None:
            killed.append(int(out_of_memory[1]))
            continue
        part, words, is_fault = _gpu(line) or _hardware(line) or ("", "", False)
        if part in checks:
            (faults if is_fault else notes).append(words)
    if faults:
        reading = Reading(check=CHECK, status="unfit", found=faults[0], fact=True, lasting_ms=EVENT_STANDS_MS)
    elif notes:
        reading = Reading(check=CHECK, found=notes[0], warning=notes[0])
    else:
        reading = Reading(check=CHECK, found=f"nothing of concern in {count} new lines")
    return LogFinding(reading=reading, killed=tuple(killed))


def _gpu(line: str) -> tuple[str, str, bool] | None:
    found = _XID.search(line)
    if found is None or int(found[2]) not in FATAL_XIDS | NOTED_XIDS:
        return None
    return "gpu", one_line(f"GPU {found[1]}: Xid {found[2]}{found[3]}"), int(found[2]) in FATAL_XIDS


def _hardware(line: str) -> tuple[str, str, bool] | None:
    if _UNCORRECTED.search(line) is None or _NONE_YET.search(line) is not None:
        return None
    return "memory" if _MEMORY.search(line) else "cpu", one_line(line), True
