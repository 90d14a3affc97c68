"""Lines with descriptors over a socket of the event loop, both ways bounded."""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmres.errors import RecordError
from lmres.gemini import session
from lmres.gemini.edge.loop import Loop

_READ_BYTES = 1 << 18
_MAX_UNSENT_BYTES = 64 << 20
_MAX_FDS = 16


class Channel:
    """One connection. ``on_message`` gets whole, checked messages; ``on_close`` comes once, with the reason."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        kinds: Mapping[str, Mapping[str, str]],
        *,
        on_message: Callable[[Channel, session.Message], None],
        on_close: Callable[[Channel, str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self.kinds = kinds
        self.on_message = on_message
        self.on_close = on_close
        self._lines = session.LineBuffer()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._blocked = False
        self.closed = False
        sock.setblocking(False)
        loop.watch(sock, self._ready)

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sent as soon as the other end reads. The descriptors stay the caller's: they are copied at once."""
        if self.closed:
            return
        line = session.encode({**message, "fds": len(fds)} if fds else message)
        copies = [os.dup(fd) for fd in fds] if fds and self._unsent else fds
        self._unsent.append((memoryview(line), copies))
        self._unsent_bytes += len(line)
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self.close(f"{self._unsent_bytes} bytes left unread")
            return
        if len(self._unsent) == 1:
            self._flush(owned=False)

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()
        for _, fds in list(self._unsent)[0 if self._blocked else 1 :]:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        self.on_close(self, reason)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(owned=True)
        if events & selectors.EVENT_READ and not self.closed:
            self._read()

    def _flush(self, *, owned: bool) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], ancillary)
            except BlockingIOError:
                if not owned and fds:
                    self._unsent[0] = (data, [os.dup(fd) for fd in fds])
                if not self._blocked:
                    self._blocked = True
                    self._loop.watch(self._sock, self._ready, selectors.EVENT_READ | selectors.EVENT_WRITE)
                return
            except OSError as error:
                self.close(f"{error.strerror or error}")
                return
            if owned:
                for fd in fds:
                    os.close(fd)
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = (data[sent:], ())
            else:
                self._unsent.popleft()
                owned = True
        if self._blocked:
            self._blocked = False
            self._loop.watch(self._sock, self._ready)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"{error.strerror or error}")
            return
        if not data:
            self.close("closed by the other end")
            return
        self._lines.add(data)
        try:
            while not self.closed and (line := self._lines.pop()) is not None:
                self.on_message(self, session.decode(line, self.kinds))
        except RecordError as error:
            self.close(str(error))


def send_line(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """Over a blocking socket with a timeout."""
    sock.sendall(session.encode(message))


class LineReader:
    """Lines and descriptors from a blocking socket, for the clients."""

    def __init__(self, sock: socket.socket, kinds: Mapping[str, Mapping[str, str]]) -> None:
        self._sock = sock
        self._kinds = kinds
        self._lines = session.LineBuffer()
        self._fds: deque[int] = deque()

    def read(self) -> tuple[session.Message, list[int]] | None:
        """The next message and its descriptors (the caller's now); None at the end. Raises RecordError, OSError."""
        while (line := self._lines.pop()) is None:
            data, ancillary, _, _ = self._sock.recvmsg(
                _READ_BYTES, socket.CMSG_LEN(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
                    self._fds.extend(numbers)
            if not data:
                return None
            self._lines.add(data)
        message = session.decode(line, self._kinds)
        wanted = message.get("fds", 0)
        if not isinstance(wanted, int) or wanted > len(self._fds):
            raise RecordError(f"{message['op']}: {wanted} descriptors expected, {len(self._fds)} came")
        return message, [self._fds.popleft() for _ in range(wanted)]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
