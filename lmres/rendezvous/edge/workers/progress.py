"""The progress page: shared memory in which a worker notes what it does.

The agent creates the page (an anonymous ``memfd``, so nothing is left on any disk) and reads it whenever it likes,
also while the worker is stopped and after its death: the step a worker died at is evidence. The worker writes with
plain stores and makes no system call. One writer, whole words, times of CLOCK_MONOTONIC; the layout is native and
never leaves the host. ``lmres.adapters.bootstrap.page`` describes it and is the writer's copy; a test holds them
together.

The page belongs to the user's process, so anything may stand in it. It is read with ``pread``, never mapped (a file
that was cut would end the agent with SIGBUS), twice: what was being written in between is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from dataclasses import dataclass

from lmres.scout.sighting import MAX_RECENT, PHASES, GroupSight, OpMark, Phase

MAGIC = b"lmresPG\x02"
VERSION = 2
LAYOUT = struct.Struct("8sQQQQQ")  # magic, version, pid of the writer, step, last step's ns, first step's ns
PAGE_BYTES = 65536

ACTIVITY = struct.Struct("@9Q")  # events, last one's ns, phase, its ns, waiting, input, files, armed, groups
ACTIVITY_AT = LAYOUT.size
PAUSE = struct.Struct("@Q")
PAUSE_AT = 120
MAX_GROUPS = 16
GROUP_AT = 256
GROUP_BYTES = 4080
GROUP = struct.Struct("@QQQ64s512s")  # written to the ring, entered, left, name, ranks
RING_AT = 608
RING = 32
OP = struct.Struct("@QQQ32s40sQ")  # place from 1, number in the group, step, op, shape, place again

MAX_RANKS = 65536
"""More than these of one group are not listed."""

_READS = 4
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([1-9][0-9]{0,8}))?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """What a worker has noted. Times are CLOCK_MONOTONIC ns; those named ``collective_ns``, ``loader_ns`` and
    ``io_ns`` are sums over all that is over. ``step_ns`` and ``event_ns`` 0: none yet; a step is an event too.

    Without ``armed`` only steps and marks of progress are noted: phase, sums and groups say nothing.

    ``groups``: those of several ranks that have been used, in the order of their first use (beyond 16 the one unused
    longest gives way). An ``OpMark`` of number 0 is a send or a receive, which do not count. ``left`` is the number
    of the newest operation that is known to be over; of an asynchronous one it is not known.
    """

    pid: int
    step: int
    step_ns: int
    first_ns: int
    event_count: int
    event_ns: int
    phase: Phase
    phase_ns: int
    collective_ns: int
    loader_ns: int
    io_ns: int
    armed: bool
    groups: tuple[GroupSight, ...] = ()


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
        self._lock = threading.Lock()
        self.blind = ""
        """Why the last ``look`` saw nothing; empty if it saw something."""

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
            # Two equal reads show that no step came in between.
            again = self._words()
            if again == words:
                break
            words = again
        if words is not None:
            self._last = words
        return self._last

    def pause(self, step: int) -> None:
        """Asks the worker to stand still at the first boundary from this step on; 0: not to, or not any more."""
        with self._lock, contextlib.suppress(OSError):  # else the number may be another file's by now
            if self._fd >= 0:
                os.pwrite(self._fd, PAUSE.pack(step), PAUSE_AT)

    def look(self, pid: int | None = None) -> PageView | None:
        """Everything on the page; None: it can not be read, and ``blind`` says why. Never raises.

        ``pid``: of the worker; a page that another process has written is not read.
        """
        try:
            view = self._look(pid)
        except (OSError, ValueError, struct.error) as error:
            self.blind = str(error)
            return None
        self.blind = ""
        return view

    def close(self) -> None:
        if self._fd >= 0:
            self.read()
            with self._lock:
                fd, self._fd = self._fd, -1
                if fd >= 0:
                    os.close(fd)

    def _words(self) -> tuple[int, int] | None:
        if self._fd < 0:
            return None
        data = os.pread(self._fd, LAYOUT.size, 0)
        if len(data) < LAYOUT.size:
            return None
        magic, version, _pid, step, last_ns, _first_ns = LAYOUT.unpack(data)
        return (step, last_ns) if magic == MAGIC and version == VERSION else None

    def _look(self, pid: int | None) -> PageView:
        if self._fd < 0:
            raise ValueError("the page is closed")
        before = os.pread(self._fd, PAGE_BYTES, 0)
        data = os.pread(self._fd, PAGE_BYTES, 0)
        for _ in range(_READS):
            if data[:GROUP_AT] == before[:GROUP_AT]:
                break
            before, data = data, os.pread(self._fd, PAGE_BYTES, 0)
        if len(data) < PAGE_BYTES or len(before) < PAGE_BYTES:
            raise ValueError(f"the page has {len(data)} bytes, expected {PAGE_BYTES}")
        return decode(data, before, pid)


def decode(data: bytes, before: bytes, pid: int | None = None) -> PageView:
    """The page from two reads of it, ``before`` the earlier one. Raises ValueError where it is no page, or another
    process's."""
    magic, version, writer, step, step_ns, first_ns = LAYOUT.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"the page begins with {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if writer == 0:
        raise ValueError("no worker has attached")
    if pid is not None and writer != pid:
        raise ValueError(f"the page was written by process {writer}, expected {pid}")
    events, event_ns, phase, phase_ns, waiting, loader, files, armed, groups = ACTIVITY.unpack_from(data, ACTIVITY_AT)
    if phase >= len(PHASES) or groups > MAX_GROUPS or armed > 1:
        raise ValueError(f"the page has phase {phase} and {groups} groups: something else has written to it")
    return PageView(
        pid=writer,
        step=step,
        step_ns=step_ns,
        first_ns=first_ns,
        event_count=events,
        event_ns=max(event_ns, step_ns),
        phase=PHASES[phase],
        phase_ns=phase_ns,
        collective_ns=waiting,
        loader_ns=loader,
        io_ns=files,
        armed=bool(armed),
        groups=tuple(g for slot in range(groups) if (g := _group(data, before, slot)) is not None),
    )


def _group(data: bytes, before: bytes, slot: int) -> GroupSight | None:
    at = GROUP_AT + slot * GROUP_BYTES
    written, entered, left, name, ranks = GROUP.unpack_from(data, at)
    texts = slice(at + 24, at + GROUP.size)
    if data[texts] != before[texts]:  # it gives way to another one
        return None
    name_text = _text(name)
    if not name_text:
        return None
    marks = []
    for place in range(max(1, written - MAX_RECENT + 1), written + 1):
        mark = _op(data, before, at + RING_AT + (place - 1) % RING * OP.size, place)
        if mark is not None:
            marks.append(mark)
    return GroupSight(
        name=name_text, ranks=parse_ranks(_text(ranks)), entered=entered, left=min(left, entered), recent=tuple(marks)
    )


def _op(data: bytes, before: bytes, at: int, place: int) -> OpMark | None:
    first, number, step, op, shape, last = OP.unpack_from(data, at)
    if first != place or last != place or data[at : at + OP.size] != before[at : at + OP.size]:
        return None  # it was being written
    name = _text(op)
    return OpMark(number=number, op=name, shape=_text(shape), step=step) if name else None


def _text(field: bytes) -> str:
    """Text that ends with the field or a zero byte; nothing for what is no text."""
    try:
        text = field.split(b"\0", 1)[0].decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


def parse_ranks(text: str) -> tuple[int, ...]:
    """Of text like ``0-3,8`` or ``0-12/4`` (every fourth). Nothing where it is not such a text."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _SPAN.fullmatch(part)
        if match is None:
            return ()
        first, last, step = (int(number) if number else None for number in match.groups())
        assert first is not None
        ranks = range(first, (first if last is None else last) + 1, step or 1)
        if len(found) + len(ranks) > MAX_RANKS:
            return ()
        found += ranks
    return tuple(found)
