"""The vault's event loop: sockets, timers, and threads that hand their results back to it.

One thread owns all tables. What takes long (hashing, pulling, touching memory, files) runs in ``Threads`` and comes
back as a call in the loop. Plain selectors rather than asyncio: descriptors travel over these sockets, and the process
stays small and quick to start.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MAX_WAIT_S = 0.5


class Timer:
    __slots__ = ("call", "cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """``problem`` gets what a callback raised: a bug of ours, which must not end the vault."""

    def __init__(self, problem: Callable[[BaseException], None]) -> None:
        self._problem = problem
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain)
        self._running = False
        self.attended_s = 0.0
        """Seconds in which this loop really ran: a process that was stopped must not count the time against others."""

    def watch(self, fd: Any, call: Callable[[int], None], events: int = selectors.EVENT_READ) -> None:
        """``call`` gets the events that came. Watching again replaces what was watched."""
        try:
            self._selector.modify(fd, events, call)
        except KeyError:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def call(self, call: Callable[[], None]) -> None:
        """Runs ``call`` in the loop, soon. The only method for other threads."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        self._running = True
        last_s = time.monotonic()
        while self._running:
            for key, events in self._selector.select(self._wait_s()):
                self._run(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
            now_s = time.monotonic()
            self.attended_s += min(now_s - last_s, 2 * _MAX_WAIT_S)
            last_s = now_s
            while self._timers and self._timers[0][0] <= now_s:
                timer = heapq.heappop(self._timers)[2]
                if not timer.cancelled:
                    self._run(timer.call)
            for _ in range(len(self._calls)):
                self._run(self._calls.popleft())

    def _wait_s(self) -> float:
        if self._calls:
            return 0.0
        if not self._timers:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._problem(error)

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


class Threads:
    """Up to ``count`` daemon threads that run jobs in the order they came."""

    def __init__(self, loop: Loop, name: str, count: int) -> None:
        self._loop = loop
        self._name = name
        self._count = count
        self._jobs: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._idle = 0
        self._started = 0

    def run(self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """``done`` is called in the loop with the result or what was raised."""

        def work() -> None:
            result: T | None = None
            failure: Exception | None = None
            try:
                result = job()
            except Exception as error:
                failure = error
            self._loop.call(lambda: done(result, failure))

        with self._ready:
            self._jobs.append(work)
            if self._idle < len(self._jobs) and self._started < self._count:
                self._started += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._ready.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits for what is under way; jobs that did not begin are dropped. False if something still runs."""
        with self._ready:
            self._jobs.clear()
            return self._ready.wait_for(lambda: self._idle == self._started, timeout_s)

    def _serve(self) -> None:
        while True:
            with self._ready:
                self._idle += 1
                self._ready.notify_all()
                while not self._jobs:
                    self._ready.wait()
                self._idle -= 1
                job = self._jobs.popleft()
            job()
