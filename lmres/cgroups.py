"""The control groups that this process is in, versions 1 and 2: limits and counters that the kernel keeps for them.

A limit of any ancestor holds too. Inside a container the path that ``/proc/self/cgroup`` tells may be the host's and
not exist; the root of the mount is then the container's own group. What cannot be read is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")

_NO_LIMIT = 1 << 60  # version 1 writes "none" as a very large number


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """Bytes. ``cached``: pages of files, part of ``used``, that the kernel takes back when it needs them."""

    limit: int
    used: int
    cached: int

    @property
    def free(self) -> int:
        return self.limit - self.used + self.cached


def memory_groups(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[MemoryGroup]:
    """Those with a limit, from this process's own group upwards."""
    for folder, version in groups("memory", membership, root):
        limit = number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        used = number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is not None and limit < _NO_LIMIT:
            found = fields(folder / "memory.stat")
            cached = found.get("inactive_file", 0) + found.get("active_file", 0)
            yield MemoryGroup(limit=limit, used=used or 0, cached=min(cached, used or 0))


def quota_wait_us(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """How long groups of this process have waited for their processor quota since they were made; the most of any."""
    waits = []
    for folder, _ in groups("cpu", membership, root):
        found = fields(folder / "cpu.stat")
        if "throttled_usec" in found:
            waits.append(found["throttled_usec"])
        elif "throttled_time" in found:
            waits.append(found["throttled_time"] // 1000)
    return max(waits, default=None)


def oom_kills(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """How many processes of this process's group (of the nearest that counts) the kernel killed for want of memory."""
    for folder, version in groups("memory", membership, root):
        found = fields(folder / ("memory.events" if version == 2 else "memory.oom_control"))
        if "oom_kill" in found:
            return found["oom_kill"]
    return None


def limit_hits(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int | None:
    """How often the memory limit of this process's group, or of a group above it, left nothing to allocate. A group
    above counts what happens below other groups too, so only its own events are taken; version 1 counts less exactly.
    """
    found: list[int] = []
    for folder, version in groups("memory", membership, root):
        if version == 2:
            events = fields(folder / "memory.events.local") or ({} if found else fields(folder / "memory.events"))
            hits = events.get("oom")
        else:
            hits = number(folder / "memory.failcnt")
        if hits is not None:
            found.append(hits)
    return sum(found) if found else None


def groups(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Folders of the groups that this process is in for a controller, and their version; its own one first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controller, 1
            if not base.is_dir():
                base = root / controllers
        else:
            continue
        group = PurePosixPath(path)
        for level in dict.fromkeys((group, *group.parents)):
            yield base / str(level).lstrip("/"), version


def number(path: Path) -> int | None:
    """The whole number in a file; None for another text, or none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdecimal()}
