"""The worker's side of ``lmres.rendezvous.edge.workers.stacks``: a signal handler in C that writes all stacks.

``faulthandler`` takes no lock, so it also answers while C code holds the interpreter's. It writes to a file in memory,
with a number high enough to be out of the way of programs that close "all" descriptors up to some number.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource

NAME = "lmres-stacks"
_HIGHEST = 1024
_BELOW = 32


class Stacks:
    """``signal`` 0: not armed, since the signal is not wanted, or taken."""

    def __init__(self, number: int) -> None:
        self.signal, self.fd = 0, -1
        if number and not _taken(number):
            self.fd = _file()
            faulthandler.register(number, file=self.fd, all_threads=True, chain=False)
            self.signal = number

    def let_go(self) -> None:
        """In a forked child: the file is its parent's."""
        if self.signal:
            faulthandler.unregister(self.signal)
            self.signal = 0


def _file() -> int:
    memory = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        highest = _HIGHEST if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST)
        number = fcntl.fcntl(memory, fcntl.F_DUPFD_CLOEXEC, max(3, highest - _BELOW))
    finally:
        os.close(memory)
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)
    return number


def _taken(number: int) -> bool:
    """Whether this process has a handler for the signal, or ignores it."""
    with open("/proc/self/status", "rb") as file:
        masks = dict(line.split(b":", 1) for line in file.read().splitlines() if line.startswith(b"Sig"))
    return bool((int(masks[b"SigCgt"], 16) | int(masks[b"SigIgn"], 16)) >> (number - 1) & 1)
