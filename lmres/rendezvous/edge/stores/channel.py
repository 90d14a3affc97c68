"""One connection of a store client: connect, shake hands, then one request and its reply at a time.

A channel is used up by its first error: whatever was late or not understood may still arrive, so the owner drops the
channel and opens another. Each step ends by the deadline it is given; ``abort`` ends it at once, from any thread.
"""

from __future__ import annotations

import contextlib
import socket

from lmres.errors import RecordError, StoreProtocolError, StoreUnavailable
from lmres.rendezvous.edge.stores import wire
from lmres.rendezvous.edge.stores.limits import TxnRejected
from lmres.rendezvous.edge.stores.sockets import Deadline, Target, connect_any

_CHUNK_BYTES = 1 << 16


class Channel:
    """``name`` says in errors which store this is, for example ``store at host port 29400``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock: socket.socket | None = None
        self._received = bytearray()
        self._aborted = False

    def open(self, targets: tuple[Target, ...], hello: wire.Hello, deadline: Deadline) -> str:
        """Connects and says hello. Returns the id of the store that answers."""
        try:
            connect_any(targets, deadline, self._register)
        except StoreUnavailable as error:
            raise type(error)(f"{self._name}: {error}") from error
        self._send(wire.PREAMBLE + wire.encode_frame(wire.hello_to_json(hello)), deadline)
        self._read_preamble(deadline)
        welcome = self._read_frame(deadline)
        store_id = welcome.get("store_id")
        if welcome.get("op") != "welcome" or not isinstance(store_id, str):
            raise self._not_ours("the answer to a hello is not a welcome")
        return store_id

    def request(self, request: wire.Request, deadline: Deadline) -> object:
        """Sends a request and returns what its reply holds. After TxnRejected the channel is still good."""
        frame = wire.encode_frame(wire.request_to_json(request))
        if len(frame) > wire.MAX_FRAME_BYTES:
            raise TxnRejected(f"request of {len(frame)} bytes, at most {wire.MAX_FRAME_BYTES}: split it")
        self._send(frame, deadline)
        reply = self._read_frame(deadline)
        if reply.get("id") != request.id or self._received:
            raise self._not_ours(f"a reply that is not that of request {request.id}")
        if "rejected" in reply:
            raise TxnRejected(f"{self._name}: {reply['rejected']}")
        return reply.get("ok")

    def local_address(self) -> str | None:
        try:
            return None if self._sock is None else str(self._sock.getsockname()[0])
        except OSError:
            return None

    def abort(self) -> None:
        """Ends a call under way in another thread. Does not close: the descriptor is the other thread's to close."""
        self._aborted = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def _register(self, sock: socket.socket) -> None:
        self._sock = sock
        if self._aborted:
            raise StoreUnavailable("the connection was closed")

    def _send(self, data: bytes, deadline: Deadline) -> None:
        assert self._sock is not None
        try:
            self._sock.settimeout(deadline.must_left_s(f"{self._name}: request not sent"))
            self._sock.sendall(data)
        except OSError as error:
            raise self._broken(error, "request not sent", deadline) from error

    def _read_preamble(self, deadline: Deadline) -> None:
        while len(self._received) < wire.PREAMBLE_BYTES:
            self._receive(deadline)
            head = bytes(self._received[: len(wire.MAGIC)])
            if head != wire.MAGIC[: len(head)]:
                raise self._not_ours(f"it answers {bytes(self._received[:60])!r}")
        preamble = bytes(self._received[: wire.PREAMBLE_BYTES])
        del self._received[: wire.PREAMBLE_BYTES]
        version = wire.preamble_version(preamble)
        if version is None:
            raise self._not_ours(f"it answers {preamble!r}")
        if version != wire.VERSION:
            raise StoreProtocolError(
                f"{self._name} speaks version {version} of the store protocol, this lmres speaks "
                f"{wire.VERSION}: install the same lmres on every host"
            )

    def _read_frame(self, deadline: Deadline) -> wire.JsonObject:
        self._fill(wire.LENGTH.size, deadline)
        (length,) = wire.LENGTH.unpack_from(self._received)
        if length > wire.MAX_FRAME_BYTES:
            raise self._not_ours(f"a frame of {length} bytes, at most {wire.MAX_FRAME_BYTES} expected")
        end = wire.LENGTH.size + length
        self._fill(end, deadline)
        body = self._received[wire.LENGTH.size : end]
        del self._received[:end]
        try:
            return wire.decode_body(body)
        except RecordError as error:
            raise self._not_ours(str(error)) from error

    def _fill(self, count: int, deadline: Deadline) -> None:
        while len(self._received) < count:
            self._receive(deadline)

    def _receive(self, deadline: Deadline) -> None:
        assert self._sock is not None
        try:
            self._sock.settimeout(deadline.must_left_s(f"{self._name}: no answer"))
            data = self._sock.recv(_CHUNK_BYTES)
        except OSError as error:
            raise self._broken(error, "no answer", deadline) from error
        if not data:
            raise StoreUnavailable(
                f"{self._name}: connection closed before an answer; the store has ended, or another service "
                "listens there"
            )
        self._received += data

    def _broken(self, error: OSError, what: str, deadline: Deadline) -> StoreUnavailable:
        if isinstance(error, TimeoutError):
            return StoreUnavailable(f"{self._name}: {what} within {deadline.timeout_ms} ms")
        return StoreUnavailable(f"{self._name}: {what}: {error.strerror or error}")

    def _not_ours(self, found: str) -> StoreProtocolError:
        return StoreProtocolError(
            f"{self._name} is not a store of lmres: {found}. Another service uses this port: "
            "check the rendezvous endpoint"
        )
