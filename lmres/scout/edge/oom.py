"""Whether the kernel ended a process for want of memory: its log names the pid, or a counter of such ends has risen.

The log may be closed to us, or show other pids than ours (in a container); the counter of our own control group counts
whoever is in it. So the log's word is taken, and a rise of the group's counter is, once for each process that was
killed; the host's counter (``/proc/vmstat``) only where neither of these can be read. The group's counter rises also
for one that is killed because the host had no memory left: only if its limit was hit too is that limit the reason.
"""

from __future__ import annotations

import threading
from pathlib import Path

from lmres import cgroups
from lmres.scout.edge.readers import CannotRead, KernelLog
from lmres.scout.kernel_log import judge_lines

HOST = "killed by the kernel: the host was out of memory"
GROUP = "killed by the kernel: its control group was out of memory (the container's limit)"
KERNEL = "killed by the kernel for want of memory"


class OomWatch:
    """Remembers what has happened before ``renew``. For any thread."""

    def __init__(
        self,
        *,
        log: Path = Path("/dev/kmsg"),
        vmstat: Path = Path("/proc/vmstat"),
        membership: Path = cgroups.MEMBERSHIP,
        root: Path = cgroups.ROOT,
    ) -> None:
        self._vmstat = vmstat
        self._membership = membership
        self._root = root
        self._lock = threading.Lock()
        self._killed: set[int] = set()
        self._log: KernelLog | None = None
        try:
            self._log = KernelLog(log)
        except CannotRead:
            self._log = None
        self._group, self._host = self._counts()
        self._hits = self._limit_hits()

    def renew(self) -> None:
        """What comes from now on counts."""
        with self._lock:
            self._read_log()
            self._killed.clear()
            self._group, self._host = self._counts()
            self._hits = self._limit_hits()

    def cause(self, pid: int) -> str:
        """How it is known that the kernel ended this process for want of memory; empty if it is not."""
        with self._lock:
            self._read_log()
            group, host = self._counts()
            in_group = _rose(self._group, group)
            if pid in self._killed or in_group:
                self._killed.discard(pid)
                self._group, self._host = _taken(self._group, group), _taken(self._host, host)
                if in_group:
                    return GROUP if _rose(self._hits, self._limit_hits()) else KERNEL
                return HOST
            if self._log is None and group is None and _rose(self._host, host):
                self._host = _taken(self._host, host)
                return HOST
            return ""

    def close(self) -> None:
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None

    def _counts(self) -> tuple[int | None, int | None]:
        group = cgroups.oom_kills(self._membership, self._root)
        return group, cgroups.fields(self._vmstat).get("oom_kill")

    def _limit_hits(self) -> int | None:
        return cgroups.limit_hits(self._membership, self._root)

    def _read_log(self) -> None:
        if self._log is None:
            return
        try:
            self._killed.update(judge_lines(self._log.lines(), ()).killed)
        except CannotRead:
            self._log.close()
            self._log = None


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _taken(before: int | None, now: int | None) -> int | None:
    """One of the rise is accounted for."""
    return before + 1 if before is not None and now is not None and now > before else before
