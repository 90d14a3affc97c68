"""Parts in memory, a proxy that cuts, and servers that lie: what the tests of transfers share."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from lmres.gemini.edge import transfer_wire as wire
from lmres.gemini.edge.transfer import PartServer, PartSource

BOUND_S = 30.0
RUN = "run/1"


def until(what: str, true: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + bound_s
    while not true():
        assert time.monotonic() < deadline, f"not in {bound_s} s: {what}"
        time.sleep(0.005)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def noise(length: int, seed: int = 0) -> bytes:
    block = random.Random(f"{seed}-{length}").randbytes(min(length, 1 << 20) + 13)
    return (block * (length // len(block) + 1))[:length]


def memory(length: int) -> memoryview:
    """Writable, with guard bytes behind that nothing may touch."""
    view = memoryview(mmap.mmap(-1, length + 64))
    view[length:] = b"\xa5" * 64
    return view


def guards_hold(view: memoryview) -> bool:
    return bytes(view[-64:]) == b"\xa5" * 64


class Store:
    """Parts in memfds, and who reads them."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, int, int]] = {}
        self.lock = threading.Lock()
        self.given = 0
        self.released = 0
        self._fds: list[int] = []

    def add(self, data: bytes, *, offset: int = 4096, digest: str = "") -> str:
        fd = os.memfd_create("part", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.ftruncate(fd, offset + len(data))
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset + len(data) - len(view))
            view = view[done:]
        digest = digest or xxhash.xxh3_128_hexdigest(data)
        self.parts[digest] = (fd, offset, len(data))
        return digest

    def lookup(self, digest: str) -> PartSource | None:
        found = self.parts.get(digest)
        if found is None:
            return None
        with self.lock:
            self.given += 1
        once = [True]

        def release() -> None:
            assert once.pop()
            with self.lock:
                self.released += 1

        return PartSource(fd=found[0], offset=found[1], length=found[2], release=release)

    def all_released(self) -> bool:
        with self.lock:
            return self.given == self.released

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@contextlib.contextmanager
def serving(store: Store, **options: object) -> Iterator[PartServer]:
    problems: list[str] = []
    options = {"run_id": RUN, "address": "127.0.0.1", "problem": problems.append, **options}
    server = PartServer(store.lookup, **options)  # type: ignore[arg-type]
    server.problems = problems  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        assert server.close()
        assert store.all_released()


class Proxy:
    """Forwards to a server; ``budgets`` yields, for each connection, after how many bytes it is cut (None: never)."""

    def __init__(self, port: int, budgets: Iterator[int | None], *, pace_s: float = 0.0, reset: bool = False) -> None:
        self.target = port
        self.forwarded = 0
        self.connections = 0
        self.pace_s = pace_s
        self._budgets = budgets
        self._reset = reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.connections += 1
            self._socks += [near, far]
            for run in ((near, far, None), (far, near, next(self._budgets))):
                thread = threading.Thread(target=self._forward, args=run, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        left = budget
        with contextlib.suppress(OSError):
            while left is None or left > 0:
                data = source.recv(1 << 16 if left is None else min(left, 1 << 16))
                if not data:
                    break
                if self.pace_s and budget is not None:
                    time.sleep(self.pace_s)
                sink.sendall(data)
                if left is not None:
                    left -= len(data)
                    self.forwarded += len(data)
        if budget is not None and self._reset:
            with contextlib.suppress(OSError):
                sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                sink.shutdown(socket.SHUT_RD)  # wakes the other thread, which holds the socket open
                sink.close()
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(BOUND_S)
        for sock in self._socks:
            sock.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Liar:
    """Speaks the first words as a server does, then does what ``behave`` does with the connection."""

    def __init__(self, behave: Callable[[socket.socket], None], *, hello: dict[str, object] | None = None) -> None:
        self.connections = 0
        self._behave = behave
        self._hello = {"refused": "", "busy": False} if hello is None else hello
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            self.connections += 1
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, wire.ConnectionLost):
            wire.read_exactly(sock, len(wire.MAGIC))
            wire.read_frame(sock)
            sock.sendall(wire.pack_frame(self._hello))
            self._behave(sock)

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def next_request(sock: socket.socket) -> wire.Request:
    return wire.unpack_request(wire.read_exactly(sock, wire.REQUEST_BYTES))


def reply(sock: socket.socket, part_length: int, length: int) -> None:
    sock.sendall(wire.pack_reply(wire.Reply(status=wire.Status.OK, part_length=part_length, length=length)))
