"""The attachment of one worker process: its channel to the agent, its progress page, its hooks.

Rules:

1. Nothing here raises into the user's code, blocks it (but for the hold of a process that is already lost), or
   imports torch.
2. It belongs to one process. A fork lets go of it at once: a child neither reports nor counts.
3. The descriptors may be taken away: programs close "all" descriptors. So the channel is checked to be the same
   socket before each use; the page is mapped and needs none.
"""

from __future__ import annotations

import _socket
import itertools
import mmap
import os
import select
import sys
import time

from lmres.adapters.bootstrap.page import (
    COUNTERS,
    COUNTERS_AT,
    EVENT,
    EVENT_AT,
    HEAD,
    PAGE_BYTES,
    PAGE_MAGIC,
    PAGE_VERSION,
    PAUSE,
    PAUSE_AT,
)

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

HOLD_VARIABLE = "LMRES_HOLD_S"
DEFAULT_HOLD_S = 60.0

_SEND_MS = 200


class Session:
    """What ``attach`` made. ``page`` is the mapped progress page; in a forked child a private dummy."""

    def __init__(self, channel: int, page: mmap.mmap) -> None:
        self.page: mmap.mmap | bytearray = page
        self.crashing = False
        self.attachment: Any = None
        self.watch: Any = None
        self.events = itertools.count(1)
        """Numbers what is noted on the page beside the steps."""
        self._channel = channel
        self._identity = _identity(channel)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return int(COUNTERS.unpack_from(self.page, COUNTERS_AT)[0])

    @property
    def pause_at(self) -> int:
        """The step at whose boundary the agent asks to stand still; 0 for none."""
        return int(PAUSE.unpack_from(self.page, PAUSE_AT)[0])

    @property
    def attached(self) -> bool:
        return self._channel >= 0

    def send(self, line: bytes) -> bool:
        """Send one report; waits a moment if the agent is slow, then drops it."""
        if not self._usable():
            return False
        sock = None
        try:
            # The object only borrows the descriptor, so nothing of ours is closed (or warned about) at exit.
            sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, self._channel)
            rest = memoryview(line + b"\n")
            while rest:
                try:
                    rest = rest[sock.send(rest, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if not _poll(self._channel, select.POLLOUT, _SEND_MS):
                        return False
        except OSError:
            return False
        finally:
            if sock is not None:
                sock.detach()
        return True

    def hold(self, bound_s: float) -> None:
        """Block until the agent releases this process, its end closes, or ``bound_s`` have passed."""
        end = time.monotonic() + bound_s
        heard = b""
        while self._usable() and (left_s := end - time.monotonic()) > 0:
            if not _poll(self._channel, select.POLLIN, int(left_s * 1000) + 1):
                return
            try:
                data = os.read(self._channel, 4096)
            except BlockingIOError:
                continue
            except OSError:
                return
            heard = heard[-4096:] + data
            if not data or b'"release": true' in heard:
                return

    def mark_progress(self) -> None:
        """Something goes on, without a step."""
        moment = time.monotonic_ns()
        COUNTERS.pack_into(self.page, COUNTERS_AT, self.step, moment)
        EVENT.pack_into(self.page, EVENT_AT, next(self.events), moment)

    def let_go(self) -> None:
        """In a forked child: this process is not the worker."""
        if self._usable():
            os.close(self._channel)
        self._channel = -1
        self.page = bytearray(PAGE_BYTES)
        if self.watch is not None:
            self.watch.let_go()

    def _usable(self) -> bool:
        try:
            return self._channel >= 0 and _identity(self._channel) == self._identity
        except OSError:
            return False


_session: Session | None = None


def current() -> Session | None:
    """The session of this process, if it is an attached worker."""
    return _session if _session is not None and _session.attached else None


def attach(numbers: str) -> None:
    """Attach to the agent through ``REPORT,PAGE``. Raises ``ValueError`` or ``OSError`` if they are not what an agent
    gives; the caller reports it. A page that has a writer already is another process's: then nothing happens."""
    global _session
    channel, page_fd = (int(number) for number in numbers.split(","))
    try:
        identity = _identity(channel)
        page = mmap.mmap(page_fd, PAGE_BYTES)
    except OSError:
        return  # passed on through something that closed the descriptors: not the worker
    magic, version, writer = HEAD.unpack_from(page)
    if magic != PAGE_MAGIC or version != PAGE_VERSION:
        raise ValueError(f"progress page {magic!r} version {version}, expected {PAGE_MAGIC!r} version {PAGE_VERSION}")
    if writer != 0 or identity[0] != 0o140000:
        return
    HEAD.pack_into(page, 0, magic, version, os.getpid())
    os.close(page_fd)  # the mapping stays
    os.set_inheritable(channel, False)
    os.set_blocking(channel, False)
    _session = session = Session(channel, page)
    os.register_at_fork(after_in_child=session.let_go)

    from lmres.adapters.bootstrap import crash, protect, steps, watching

    hook = crash.install(session)
    counter = steps.install(session, hook.renew)
    session.send(b'{"kind": "attached", "python": "%d.%d.%d", "pid": %d}' % (*sys.version_info[:3], os.getpid()))
    protect.install(session, counter)
    watching.install(session)  # after it, so that it sees what the program does and not what is passed over inside


def hold_s() -> float:
    """How long a failed worker waits for the plan."""
    try:
        return max(0.0, float(os.environ.get(HOLD_VARIABLE, DEFAULT_HOLD_S)))
    except ValueError:
        return DEFAULT_HOLD_S


def _identity(descriptor: int) -> tuple[int, int, int]:
    """File type, device and inode."""
    found = os.fstat(descriptor)
    return found.st_mode & 0o170000, found.st_dev, found.st_ino


def _poll(descriptor: int, event: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(timeout_ms))
