"""The progress page: a worker counts its completed optimizer steps in 64 bytes of shared memory.

The agent creates the page (an anonymous ``memfd``, so nothing is left on any disk) and reads it whenever it likes,
also after the worker's death: the step a worker died at is evidence. The worker writes the counters with plain stores
and makes no system call. One writer, whole words, times of CLOCK_MONOTONIC; the layout is native and never leaves the
host. ``lmres.adapters.bootstrap.session`` holds the writer's copy of the layout, and a test holds them together.
"""

from __future__ import annotations

import os
import struct

MAGIC = b"lmresPG\x01"
VERSION = 1
LAYOUT = struct.Struct("8sQQQQQ")  # magic, version, pid of the writer, step, last step's ns, first step's ns
PAGE_BYTES = 64

_READS = 4


class ProgressPage:
    """The agent's side of one worker's page."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("lmres-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, PAGE_BYTES)
            os.pwrite(self._fd, LAYOUT.pack(MAGIC, VERSION, 0, 0, 0, 0), 0)
        except OSError:
            os.close(self._fd)
            raise
        self._last = (0, 0)

    @property
    def fd(self) -> int:
        """The descriptor to pass to the worker."""
        return self._fd

    def read(self) -> tuple[int, int]:
        """``(step, last_ns)``: completed steps and the monotonic nanoseconds of the last one, 0 for none yet.

        After ``close`` it goes on answering what it saw last.
        """
        words = self._words()
        for _ in range(_READS):
            # Read, not mapped: a worker that truncates the file must not end the agent with SIGBUS. Two equal reads
            # show that no step came in between.
            again = self._words()
            if again == words:
                break
            words = again
        if words is not None:
            self._last = words
        return self._last

    def close(self) -> None:
        if self._fd >= 0:
            self.read()
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _words(self) -> tuple[int, int] | None:
        if self._fd < 0:
            return None
        data = os.pread(self._fd, LAYOUT.size, 0)
        if len(data) < LAYOUT.size:
            return None
        magic, version, _pid, step, last_ns, _first_ns = LAYOUT.unpack(data)
        return (step, last_ns) if magic == MAGIC and version == VERSION else None
