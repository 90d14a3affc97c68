"""One connection between neighbours: who is at its other end, and how it ended.

Both sides name run, node and incarnation; the one that calls also whom it expects. After that nothing is said until
``bye``, the word for an end that means nothing. Text is lines of JSON, or the word itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from dataclasses import dataclass
from typing import Literal

from lmres.rendezvous.parting import Break

MAX_LINE = 4096
BYE = b"bye\n"
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 3, 3, 5
"""A host that came up anew answers these with a reset. Nothing depends on them."""
_CLOSED = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ENOTCONN})

Stage = Literal["calling", "greeting", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """``to``: the incarnation that the caller expects, empty in an answer."""

    run: str
    node_id: str
    incarnation: str
    to: str = ""

    def encode(self) -> bytes:
        # The one place where a word could be signed; ``read_hello`` is the one where that would be checked.
        body = {"lmres": 1, "run": self.run, "node": self.node_id, "incarnation": self.incarnation, "to": self.to}
        return json.dumps(body).encode() + b"\n"


def read_hello(line: bytes) -> Hello | None:
    """None for anything that is not a greeting of ours."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or body.get("lmres") != 1:
        return None
    run, node_id, incarnation, to = (body.get(name) for name in ("run", "node", "incarnation", "to"))
    if not (isinstance(run, str) and isinstance(node_id, str) and isinstance(incarnation, str) and isinstance(to, str)):
        return None
    return Hello(run=run, node_id=node_id, incarnation=incarnation, to=to)


class Link:
    """``peer``: whose connection this is, once known; of a call, the incarnation that it is meant for."""

    def __init__(self, sock: socket.socket, *, called: bool, stage: Stage, end_by: float, peer: str = "") -> None:
        sock.setblocking(False)
        self.sock = sock
        self.called = called
        self.stage: Stage = stage
        self.end_by: float | None = end_by
        self.peer = peer
        self._inbox = b""

    def read(self) -> tuple[list[bytes], Break | None]:
        """The whole lines that have come, and how the connection has ended, if it has."""
        try:
            data = self.sock.recv(MAX_LINE)
        except (BlockingIOError, InterruptedError):
            return [], None
        except OSError as error:
            return [], Break.CLOSED if error.errno in _CLOSED else Break.SILENT
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        ended = not data or len(self._inbox) > MAX_LINE
        return lines, Break.CLOSED if ended else None

    def send(self, text: bytes) -> bool:
        """A word is short and seldom: it goes out at once, or the connection is of no use."""
        try:
            return self.sock.send(text) == len(text)
        except OSError:
            return False

    def settle(self) -> None:
        """From here on it is only kept."""
        self.stage, self.end_by = "open", None
        options = (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
            ("TCP_KEEPCNT", KEEPALIVE_TRIES),
        )
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options:
                if hasattr(socket, name):
                    self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str) -> socket.socket:
    """A listener on a free port of this address. Raises OSError."""
    family, place = _place(address, 0)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(place)
        sock.listen(16)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def call(address: str, port: int) -> socket.socket:
    """A connection that is being made. Raises OSError."""
    family, place = _place(address, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, errno.errorcode.get(code, "error"))
    except OSError:
        sock.close()
        raise
    return sock


def is_refusal(code: int | None) -> bool:
    return code == errno.ECONNREFUSED or code in _CLOSED


def _place(address: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Numeric addresses are not looked up; a name is only where the user has given one (``--local-addr``)."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    return family, place
