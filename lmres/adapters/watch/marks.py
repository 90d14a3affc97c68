"""What a worker writes onto its page about itself: its main thread's phase, time spent waiting, its collectives.

Rules:

1. A mark is a few stores into shared memory: no system call, no message, about a microsecond.
2. Phases are the main thread's. What other threads do is no sign that it goes on; only the threads of a backward,
   which it waits for, count as it.
3. Phases nest. Time belongs to the innermost of waiting, input and files that is entered, whatever is entered in it.
4. If a mark fails, the watch goes off once and says so. It raises nothing but what was raised through it: an
   exception of a signal handler of the program's that happens to run here goes on to the program.

When a process forks, the child's watch is off and its page is its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

from lmres.adapters.bootstrap.page import (
    ARMED,
    ARMED_AT,
    COUNTERS,
    COUNTERS_AT,
    EVENT,
    EVENT_AT,
    EVENT_PHASE,
    GROUP,
    GROUP_AT,
    GROUP_BYTES,
    GROUP_TEXTS,
    GROUP_TEXTS_AT,
    GROUPS,
    GROUPS_AT,
    MAX_GROUPS,
    OP,
    PAGE_BYTES,
    RING,
    RING_AT,
    TIMES,
    TIMES_AT,
)
from lmres.adapters.bootstrap.session import Session
from lmres.scout.sighting import PHASES

START, USER, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE, LOADER, CHECKPOINT_IO, END = range(9)
assert PHASES == ("start", "user", "forward", "backward", "optimizer", "collective", "loader", "checkpoint_io", "end")
_NOT_TIMED = 0
_LEARNING = (FORWARD, BACKWARD, OPTIMIZER)

NAME_BYTES, RANKS_BYTES = 64, 512
OP_BYTES, SHAPE_BYTES = 32, 40

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # noqa: PTH100, PTH120


class Group:
    """A process group of several ranks as this one uses it. ``slot`` -1: it has given way in the page's table."""

    __slots__ = ("entered", "left", "name", "ranks", "slot", "used", "written")

    def __init__(self, name: str, ranks: str) -> None:
        self.name = short_name(name)
        self.ranks = ranks.encode() if len(ranks) <= RANKS_BYTES else b""
        self.slot = -1
        self.written = self.entered = self.left = self.used = 0


class Watch:
    """One worker's marks. ``on``: asked by every hook first."""

    def __init__(self, session: Session, torch_folder: str, on_off: Callable[[str], None]) -> None:
        main = threading.main_thread().ident
        self.on = False
        self.main = main if main is not None else -1
        self.codes = [START]
        """The phases that are entered, the innermost last; the first is what remains when all are left."""
        self.sync: tuple[Group, int] | None = None
        """A synchronous operation that was just entered: the next wait is for it."""
        self.on_let_go: list[Callable[[], None]] = []
        self.parts: list[Any] = []
        """What has to live as long as the watch."""
        self._page = session.page
        self._events = session.events
        self._on_off = on_off
        self._code_folders = (_OURS, torch_folder)
        self._timed = [_NOT_TIMED]
        self._times = [0] * len(PHASES)
        self._since = 0
        self._lock = threading.RLock()  # a signal handler of the program's may come back here
        self._table: list[Group] = []
        self._last_entry = (0, 0)

    def begin(self) -> None:
        now = time.monotonic_ns()
        EVENT_PHASE.pack_into(self._page, EVENT_AT, next(self._events), now, self.codes[-1], now)
        ARMED.pack_into(self._page, ARMED_AT, 1)
        self.on = True

    def ending(self) -> None:
        """The program is over; the interpreter takes its time to end."""
        if self.on:
            now = time.monotonic_ns()
            self.codes[0] = END
            EVENT_PHASE.pack_into(self._page, EVENT_AT, next(self._events), now, END, now)

    def let_go(self) -> None:
        """In a forked child."""
        self.on = False
        self._page = bytearray(PAGE_BYTES)
        self._lock = threading.RLock()
        for call in self.on_let_go:
            call()

    def failed(self, error: BaseException) -> None:
        """An exception has come up in one of our marks."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and not trace.tb_frame.f_code.co_filename.startswith(self._code_folders):
            raise error
        if self.on:
            self.on = False
            with contextlib.suppress(Exception):
                ARMED.pack_into(self._page, ARMED_AT, 0)
            with contextlib.suppress(Exception):
                self._on_off(f"{type(error).__name__}: {error}")

    # -- phases -------------------------------------------------------------------------------------------------------

    def within(self, code: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``function`` as a phase of the main thread."""
        depth = len(self.codes)
        try:
            self._enter(code)
            return function(*args, **kwargs)
        finally:
            try:
                self._leave(depth)
            except BaseException:
                self._mend(depth)
                raise

    def within_backward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Also: from the last collective of a backward to its end it has waited for the others."""
        depth = len(self.codes)
        began_ns = time.monotonic_ns()
        try:
            self._enter(BACKWARD)
            return function(*args, **kwargs)
        finally:
            try:
                self._leave(depth, began_ns)
            except BaseException:
                self._mend(depth)
                raise

    def _enter(self, code: int) -> None:
        try:
            now = time.monotonic_ns()
            timed = self._timed[-1]
            if timed:
                self._spend(timed, now - self._since)
            self._since = now
            if code in _LEARNING:
                self.codes[0] = USER
            self.codes.append(code)
            self._timed.append(code if code >= COLLECTIVE else timed)
            EVENT_PHASE.pack_into(self._page, EVENT_AT, next(self._events), now, code, now)
        except Exception as error:
            self.failed(error)

    def _leave(self, depth: int, backward_ns: int = 0) -> None:
        """Back to where ``depth`` phases were entered; ``backward_ns``: when the backward began that is left."""
        try:
            now = time.monotonic_ns()
            timed = self._timed[-1]
            if timed:
                self._spend(timed, now - self._since)
            elif backward_ns:
                self._wait_of_backward(backward_ns, now)
            self._since = now
            del self.codes[depth:], self._timed[depth:]
            EVENT_PHASE.pack_into(self._page, EVENT_AT, next(self._events), now, self.codes[-1], now)
        except Exception as error:
            self.failed(error)

    def _mend(self, depth: int) -> None:
        """A signal handler of the program's raised in the middle of leaving."""
        del self.codes[depth:], self._timed[depth:]

    def _wait_of_backward(self, began_ns: int, now: int) -> None:
        entered_ns, waited_ns = self._last_entry
        if entered_ns > began_ns:
            self._spend(COLLECTIVE, max(0, now - entered_ns - (self._times[COLLECTIVE] - waited_ns)))

    def _spend(self, timed: int, spent_ns: int) -> None:
        times = self._times
        times[timed] += spent_ns
        TIMES.pack_into(self._page, TIMES_AT, times[COLLECTIVE], times[LOADER], times[CHECKPOINT_IO])

    # -- collectives --------------------------------------------------------------------------------------------------

    def entered(self, group: Group, op: bytes, shape: bytes, *, counts: bool) -> int:
        """An operation begins, in any thread. Its number; 0 for one that does not count."""
        with self._lock:
            if group.slot < 0:
                self._place(group)
            now = time.monotonic_ns()
            number = 0
            if counts:
                group.entered = number = group.entered + 1
            group.written = place = group.written + 1
            group.used = now
            at = GROUP_AT + group.slot * GROUP_BYTES
            page = self._page
            step = COUNTERS.unpack_from(page, COUNTERS_AT)[0]
            OP.pack_into(page, at + RING_AT + (place - 1) % RING * OP.size, place, number, step, op, shape, place)
            GROUP.pack_into(page, at, place, group.entered, group.left)
            if counts:
                self._last_entry = (now, self._times[COLLECTIVE])
            if self.codes[-1] == BACKWARD:
                EVENT.pack_into(page, EVENT_AT, next(self._events), now)
            return number

    def over(self, group: Group, number: int) -> None:
        """An operation is known to be over."""
        try:
            with self._lock:
                group.left = max(group.left, number)
                if group.slot >= 0:
                    at = GROUP_AT + group.slot * GROUP_BYTES
                    GROUP.pack_into(self._page, at, group.written, group.entered, group.left)
        except Exception as error:
            self.failed(error)

    def _place(self, group: Group) -> None:
        """A place in the table: a new one, or that of the group unused longest."""
        if len(self._table) < MAX_GROUPS:
            group.slot = len(self._table)
            self._table.append(group)
        else:
            oldest = min(self._table, key=lambda g: g.used)
            group.slot, oldest.slot = oldest.slot, -1
            self._table[group.slot] = group
        group.written = 0
        at = GROUP_AT + group.slot * GROUP_BYTES
        page = self._page
        page[at : at + GROUP_BYTES] = bytes(GROUP_BYTES)
        GROUP.pack_into(page, at, 0, group.entered, group.left)
        GROUP_TEXTS.pack_into(page, at + GROUP_TEXTS_AT, group.name, group.ranks)
        GROUPS.pack_into(page, GROUPS_AT, len(self._table))


def short_name(name: str) -> bytes:
    """The name, or its beginning with a sum of the rest: equal on all ranks, and others' differ."""
    full = name.encode("utf-8", "replace")
    if len(full) <= NAME_BYTES:
        return full
    return full[: NAME_BYTES - 9].decode("utf-8", "ignore").encode() + b"#%08x" % zlib.crc32(full)


def ranks_text(ranks: list[int]) -> str:
    """As ``0-3,8`` or ``0-12/4``."""
    parts = []
    at = 0
    while at < len(ranks):
        first, end = ranks[at], at + 1
        step = ranks[end] - first if end < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at >= 3 or (step == 1 and end - at == 2):
            parts.append(f"{first}-{ranks[end - 1]}" + (f"/{step}" if step > 1 else ""))
        else:
            end = at + 1
            parts.append(str(first))
        at = end
    return ",".join(parts)


def ranks_of(torch: Any, process_group: Any) -> list[int]:
    """Global ranks of its members; none where torch does not know."""
    try:
        return [int(rank) for rank in torch.distributed.get_process_group_ranks(process_group)]
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return []
