"""Words of the transfer protocol between vaults: a hello each way, then requests for ranges of parts.

Rules:

1. A connection opens with ``MAGIC`` and a frame (length, JSON) from the puller; the server answers with one frame and
   serves only if it admits the hello. ``refusal`` is the one place where a hello is judged.
2. A request is a fixed record: what is wanted, and how many replies of this connection have been read to the end.
   A zero-copy reply still refers to the sender's memory while it is on its way; only the reader can say when not.
3. A reply is a fixed record followed by its payload: bytes of the part, or a text that says why not.
4. Nothing is read without a limit on its size and on the time without progress.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from lmres.errors import TransferError

PROTOCOL = "lmres-parts"
VERSION = 1
MAGIC = b"LMRESPT\n"
MAX_FRAME_BYTES = 64 << 10
MAX_TEXT_BYTES = 4096
MAX_UNREAD_REPLIES = 16

_LENGTH = struct.Struct("!I")
_REQUEST = struct.Struct("!BxxxxxxxQ16sQQ")
_REPLY = struct.Struct("!BxxxxxxxQQ")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
_DIGEST_BYTES = 16


class Op(IntEnum):
    READ_SO_FAR = 0  # asks for nothing, only tells what has been read
    GET = 1


class Status(IntEnum):
    OK = 0
    MISSING = 1
    REFUSED = 2
    BROKEN = 3


class ConnectionLost(Exception):
    """This connection is of no more use; another one may be. Never leaves the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``offset`` and ``length`` in bytes within the part. ``replies_read``: replies of this connection read whole."""

    op: Op
    replies_read: int
    digest: str = "0" * 32
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``part_length``: of the whole part. ``length``: of the payload that follows. All in bytes."""

    status: Status
    part_length: int
    length: int


def check_digest(digest: str) -> str:
    """Returns ``digest`` if it is 32 lower-case hexadecimal characters (xxh3, 128 bits)."""
    if len(digest) != 2 * _DIGEST_BYTES or not set(digest) <= set("0123456789abcdef"):
        raise TransferError(f"{digest!r} is not a digest: 32 lower-case hexadecimal characters are expected")
    return digest


def pack_request(request: Request) -> bytes:
    digest = bytes.fromhex(request.digest)
    return _REQUEST.pack(request.op, request.replies_read, digest, request.offset, request.length)


def unpack_request(data: bytes) -> Request:
    op, replies_read, digest, offset, length = _REQUEST.unpack(data)
    try:
        known = Op(op)
    except ValueError:
        raise ConnectionLost(f"asked for an unknown operation {op}") from None
    return Request(op=known, replies_read=replies_read, digest=digest.hex(), offset=offset, length=length)


def pack_reply(reply: Reply) -> bytes:
    return _REPLY.pack(reply.status, reply.part_length, reply.length)


def unpack_reply(data: bytes) -> Reply:
    status, part_length, length = _REPLY.unpack(data)
    try:
        known = Status(status)
    except ValueError:
        raise ConnectionLost(f"answered with an unknown status {status}") from None
    return Reply(status=known, part_length=part_length, length=length)


def hello(*, run_id: str, node_id: str) -> dict[str, object]:
    return {"protocol": PROTOCOL, "version": VERSION, "run_id": run_id, "node_id": node_id}


def refusal(said: Mapping[str, object], *, run_id: str) -> str:
    """Why a puller with this hello is not served, or "" if it is. Authentication belongs here."""
    if said.get("protocol") != PROTOCOL:
        return f"the protocol here is {PROTOCOL}, not {said.get('protocol')!r}: check address and port"
    if said.get("version") != VERSION:
        found = said.get("version")
        return f"{PROTOCOL} is spoken in version {VERSION} here, not {found!r}: install one version of lmres everywhere"
    if said.get("run_id") != run_id:
        return f"this vault belongs to the run {run_id!r}, not to {said.get('run_id')!r}"
    return ""


def pack_frame(said: Mapping[str, object]) -> bytes:
    data = json.dumps(said).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise TransferError(f"a hello of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}: shorten the run id")
    return _LENGTH.pack(len(data)) + data


def read_frame(sock: socket.socket) -> dict[str, object]:
    (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ConnectionLost(f"announced {length} bytes where at most {MAX_FRAME_BYTES} are allowed")
    try:
        said = json.loads(read_exactly(sock, length))
    except (ValueError, RecursionError) as error:
        raise ConnectionLost(f"sent what is no hello: {error}") from None
    if not isinstance(said, dict):
        raise ConnectionLost("sent what is no hello")
    return said


def read_exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    read_into(sock, memoryview(data))
    return bytes(data)


def read_into(sock: socket.socket, view: memoryview) -> None:
    """Fills ``view``; raises ``ConnectionLost`` at the end of the stream or when nothing comes for too long."""
    got = 0
    while got < len(view):
        got += receive(sock, view[got:])


def receive(sock: socket.socket, view: memoryview) -> int:
    """At least one byte, at most ``len(view)``, as many as come within the socket's time limit."""
    try:
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
    except BlockingIOError:
        raise ConnectionLost("sent nothing for too long") from None
    except OSError as error:
        raise ConnectionLost(f"broke the connection ({error.strerror or error})") from error
    if not got:
        raise ConnectionLost("closed the connection")
    return got


def send(sock: socket.socket, data: bytes, *, more: bool = False) -> None:
    try:
        sock.sendall(data, socket.MSG_MORE if more else 0)
    except BlockingIOError:
        raise ConnectionLost("read nothing for too long") from None
    except OSError as error:
        raise ConnectionLost(f"broke the connection ({error.strerror or error})") from error


def limit_waits(sock: socket.socket, *, read_s: float, write_s: float) -> None:
    """The kernel ends waits: a socket with Python's own timeout would cost a poll() before each call."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(read_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(write_s))


def prepare(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may be gone already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _timeval(seconds: float) -> bytes:
    micros = max(1_000, int(seconds * 1e6))  # zero would mean: for ever
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)
