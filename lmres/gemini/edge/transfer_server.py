"""Serves parts by digest to other vaults: one thread per connection, bytes go from memory to the socket uncopied.

Rules:

1. What a digest stands for is the owner's to say (``lookup``). A source is released exactly once, and only after the
   puller has said that it read the reply, or the connection is gone: until then the kernel may still refer to it.
2. A connection costs at most one thread, and ends when its peer asks nothing, or reads nothing, for too long.
3. A source that is shorter than it claims, or a range outside of it, is answered with a text; never with other bytes.
4. ``close`` ends every wait by shutting the sockets down.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmres.errors import TransferError
from lmres.gemini.edge import transfer_wire as wire
from lmres.gemini.edge.transfer_wire import ConnectionLost, Op, Reply, Request, Status

_SEND_BYTES = 4 << 20
_COPY_BYTES = 1 << 20
_BACKLOG = 128
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_TURNED_AWAY = 16  # connections over the limit that still get an answer


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """Bytes ``offset`` to ``offset + length`` of ``fd``, unchanged until ``release`` is called (once, any thread)."""

    fd: int
    offset: int
    length: int
    release: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """``idle_s``: without a request. ``stall_s``: without a byte read by the peer. ``hello_s``: for the first words."""

    connections: int = 128
    hello_s: float = 5.0
    idle_s: float = 120.0
    stall_s: float = 30.0


Lookup = Callable[[str], PartSource | None]


class PartServer:
    """Listens from construction until ``close``. ``lookup`` is called by several threads at once and must be quick.

    ``problem`` gets one line for what somebody should know of (a foreign puller, a lookup that raised).
    """

    def __init__(
        self,
        lookup: Lookup,
        *,
        run_id: str,
        address: str = "",
        port: int = 0,
        limits: ServerLimits | None = None,
        problem: Callable[[str], None] | None = None,
    ) -> None:
        self._lookup = lookup
        self._run_id = run_id
        self._limits = limits or ServerLimits()
        self._problem = problem or (lambda _: None)
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener = _listen(address, port)
        self.address: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="parts-accept", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._serving)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Ends all connections and threads. False if one of them still runs (a ``lookup`` that does not return)."""
        deadline = time.monotonic() + timeout_s
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(timeout_s)
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
            for sock in serving:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in serving.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in (*serving.values(), self._acceptor))

    # -- threads

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set() or error.errno in {errno.EBADF, errno.EINVAL}:
                    return
                self._closed.wait(0.1)  # no descriptor is free: some will be
                continue
            with self._lock:
                count = len(self._serving)
                if self._closed.is_set() or count >= self._limits.connections + _TURNED_AWAY:
                    sock.close()
                    continue
                busy = count >= self._limits.connections
                thread = threading.Thread(target=self._serve, args=(sock, busy), name="parts-serve", daemon=True)
                self._serving[sock] = thread
                try:
                    thread.start()
                except RuntimeError:  # no thread is free
                    del self._serving[sock]
                    sock.close()

    def _serve(self, sock: socket.socket, busy: bool) -> None:
        unread: deque[PartSource] = deque()
        try:
            wire.prepare(sock)
            wire.limit_waits(sock, read_s=self._limits.hello_s, write_s=self._limits.stall_s)
            if self._admit(sock, busy):
                wire.limit_waits(sock, read_s=self._limits.idle_s, write_s=self._limits.stall_s)
                self._answer_all(sock, unread)
        except (ConnectionLost, OSError):
            pass  # the puller knows, and asks again
        except Exception as error:
            self._problem(f"serving parts to {_peer(sock)} failed: {error!r}")
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            for source in unread:
                self._release(source)
            with self._lock:  # last: close() waits for what is still listed
                self._serving.pop(sock, None)

    def _admit(self, sock: socket.socket, busy: bool) -> bool:
        magic = wire.read_exactly(sock, len(wire.MAGIC))
        if magic != wire.MAGIC:
            self._problem(f"{_peer(sock)} is no vault: it opened with {magic!r}")
            return False
        why = wire.refusal(wire.read_frame(sock), run_id=self._run_id)
        if why:
            self._problem(f"parts refused to {_peer(sock)}: {why}")
        elif busy:
            why = f"all {self._limits.connections} connections are taken"
        wire.send(sock, wire.pack_frame({"refused": why, "busy": busy}))
        return not why

    def _answer_all(self, sock: socket.socket, unread: deque[PartSource]) -> None:
        released = 0
        while not self._closed.is_set():
            request = wire.unpack_request(wire.read_exactly(sock, wire.REQUEST_BYTES))
            while released < request.replies_read and unread:
                self._release(unread.popleft())
                released += 1
            if request.op is Op.READ_SO_FAR:
                continue
            if len(unread) >= wire.MAX_UNREAD_REPLIES:
                raise ConnectionLost("asks for more than it reads")
            self._answer(sock, request, unread)

    def _answer(self, sock: socket.socket, request: Request, unread: deque[PartSource]) -> None:
        source = self._find(request.digest)
        if source is None:
            unread.append(PartSource(fd=-1, offset=0, length=0))
            _say(sock, Status.MISSING, f"no part {request.digest} here")
            return
        unread.append(source)
        if request.offset + request.length > source.length:
            end = request.offset + request.length
            _say(sock, Status.REFUSED, f"part {request.digest} has {source.length} bytes, none up to {end}")
            return
        size = os.fstat(source.fd).st_size
        if size < source.offset + source.length:
            why = f"part {request.digest} ends at {source.offset + source.length}, its file at {size}"
            self._problem(why)
            _say(sock, Status.BROKEN, why)
            return
        reply = Reply(status=Status.OK, part_length=source.length, length=request.length)
        wire.send(sock, wire.pack_reply(reply), more=request.length > 0)
        _send_file(sock, source.fd, source.offset + request.offset, request.length)

    def _find(self, digest: str) -> PartSource | None:
        try:
            return self._lookup(digest)
        except Exception as error:
            self._problem(f"looking up part {digest} failed: {error!r}")
            return None

    def _release(self, source: PartSource) -> None:
        try:
            source.release()
        except Exception as error:
            self._problem(f"releasing a part failed: {error!r}")


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise TransferError(f"parts can not be served at {address or 'any address'}, port {port}: {error}") from error
    return sock


def _say(sock: socket.socket, status: Status, text: str) -> None:
    data = text.encode()[: wire.MAX_TEXT_BYTES]
    wire.send(sock, wire.pack_reply(Reply(status=status, part_length=0, length=len(data))) + data)


def _send_file(sock: socket.socket, fd: int, offset: int, length: int) -> None:
    end = offset + length
    out = sock.fileno()
    copying = False
    while offset < end:
        try:
            if copying:
                data = os.pread(fd, min(end - offset, _COPY_BYTES), offset)
                sock.sendall(data)
                sent = len(data)
            else:
                sent = os.sendfile(out, fd, offset, min(end - offset, _SEND_BYTES))
        except BlockingIOError:
            raise ConnectionLost("reads nothing for too long") from None
        except OSError as error:
            if copying or error.errno not in _NO_SENDFILE:
                raise
            copying = True
            continue
        if not sent:
            raise ConnectionLost("its part became shorter while it was sent")
        offset += sent


def _peer(sock: socket.socket) -> str:
    try:
        found = sock.getpeername()
    except OSError:
        return "a puller that is gone"
    return f"{found[0]}:{found[1]}"
