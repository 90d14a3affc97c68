"""Reads what the rules about a host's health are made from: ``/proc``, ``/sys``, control groups, the file system.

Each reader takes its places as arguments and answers with a record of ``lmres.scout.health``; one that can not read
raises ``CannotRead`` with the reason, and its check is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from lmres import cgroups
from lmres.scout.health import Clock, Cpu, Disk, Memory, Network

CPUS = Path("/sys/devices/system/cpu")
NETWORKS = Path("/sys/class/net")
IFF_UP = 1


class CannotRead(Exception):
    """The system does not tell. The message says what, and why."""


def read_memory(
    meminfo: Path = Path("/proc/meminfo"), *, cgroup: Path = cgroups.MEMBERSHIP, root: Path = cgroups.ROOT
) -> Memory:
    found = {}
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << 10
    if "MemTotal" not in found or "MemAvailable" not in found:
        raise CannotRead(f"{meminfo} does not tell what memory is available")
    tightest = min(cgroups.memory_groups(cgroup, root), key=lambda g: g.free, default=None)
    limits = {} if tightest is None else {"group_limit": tightest.limit, "group_free": tightest.free}
    return Memory(total=found["MemTotal"], available=found["MemAvailable"], **limits)


def read_disk(path: Path) -> Disk:
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise CannotRead(f"the file system of {path} does not answer: {error.strerror}") from error
    return Disk(
        path=str(path),
        total=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def read_cpu(now_ms: int, cpus: Path = CPUS, *, cgroup: Path = cgroups.MEMBERSHIP, root: Path = cgroups.ROOT) -> Cpu:
    return Cpu(
        at_ms=now_ms,
        quota_wait_us=cgroups.quota_wait_us(cgroup, root),
        hot_ms=_worst(cpus, "core_throttle_total_time_ms"),
        hot_events=_worst(cpus, "core_throttle_count"),
    )


def _worst(cpus: Path, name: str) -> int | None:
    found = (cgroups.number(folder / "thermal_throttle" / name) for folder in cpus.glob("cpu[0-9]*"))
    return max((n for n in found if n is not None), default=None)


def read_network(
    now_ms: int,
    address: str,
    networks: Path = NETWORKS,
    *,
    addresses: Callable[[], Iterator[tuple[str, str]]] | None = None,
) -> Network:
    """``addresses``: pairs of interface and numeric address."""
    pairs = (addresses or _addresses)()
    interface = next((name for name, each in pairs if each == address), "")
    if not interface:
        return Network(at_ms=now_ms, address=address, interface="")
    folder = networks / interface.partition(":")[0]  # eth0:1 is another address of eth0
    if not folder.is_dir():
        raise CannotRead(f"{folder} does not exist")
    counts = folder / "statistics"
    carrier = cgroups.number(folder / "carrier")  # of an interface that is down it can not be read
    return Network(
        at_ms=now_ms,
        address=address,
        interface=interface,
        up=_is_up(folder / "flags"),
        carrier=None if carrier is None else carrier == 1,
        packets=_sum(counts, "packets"),
        errors=_sum(counts, "errors"),
        drops=_sum(counts, "dropped"),
    )


def _addresses() -> Iterator[tuple[str, str]]:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            yield name, entry.address.partition("%")[0]


def _is_up(flags: Path) -> bool:
    try:
        return bool(int(flags.read_text(), 16) & IFF_UP)
    except (OSError, ValueError):
        return True


def _sum(counts: Path, name: str) -> int:
    return sum(cgroups.number(counts / f"{way}_{name}") or 0 for way in ("rx", "tx"))


def read_clock() -> Clock:
    """Between two looks at the monotonic clock, so that a pause in between is no jump."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    return Clock(wall_ms=wall // 1_000_000, monotonic_ms=(before + time.monotonic_ns()) // 2_000_000)


class KernelLog:
    """New lines of ``/dev/kmsg``, from its opening on. Raises CannotRead where it may not be read."""

    LINE_BYTES = 8192
    MOST_LINES = 4096

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CannotRead(f"{path} can not be opened: {error.strerror}") from error
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            raise CannotRead(f"{path} can not be read: {error.strerror}") from error

    def lines(self) -> list[str]:
        """Messages without their prefix; at most a bounded number, the rest comes the next time."""
        found: list[str] = []
        while len(found) < self.MOST_LINES:
            try:
                record = os.read(self._fd, self.LINE_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # older ones were overwritten before they were read
                continue
            except OSError as error:
                raise CannotRead(f"the kernel's log can not be read any more: {error.strerror}") from error
            if not record:
                break
            text = record.decode("utf-8", "replace")
            found.append(text.partition(";")[2].partition("\n")[0] if ";" in text else text.strip())
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise CannotRead(f"{path} can not be read: {error.strerror}") from error
