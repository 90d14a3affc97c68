"""The store process behind ``store_type=tcp``: one engine, one event loop, no torch.

It is a process of its own so that it outlives the agent that started it, and it is the last thing of a run to end.

Rules:

1. It inherits a socket that is already listening: a port conflict is its parent's to see, and a client that comes
   before the server is ready waits in the listen queue.
2. It ends by itself when no agent needs it (``lifetime``). Signals that ask a terminal's or a job's processes to end
   are ignored: agents get them too, and must be able to commit their last plan. SIGKILL always works.
3. What one connection sends or fails to read costs only that connection: frames and output are bounded, a client
   that is not understood is dropped with one line in the log, and one that does not read is dropped in time.
4. Time is counted in ticks that really ran (``_TICK_S``). After a stop of the whole process (SIGSTOP, a suspended
   machine) everything that waited is read before anything is judged late.
5. No authentication: records of a run that has a secret are authenticated by the agents themselves.

    python -m lmres.rendezvous.edge.stores.tcp_server --fd N [--linger-ms N] [--first-agent-ms N] [--stall-ms N]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass

from lmres.errors import RecordError
from lmres.rendezvous.edge.stores import wire
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.edge.stores.lifetime import Lifetime
from lmres.rendezvous.edge.stores.limits import TxnRejected, check_wait, unreachable
from lmres.rendezvous.edge.stores.sockets import LISTEN_BACKLOG, keep_alive

MAX_CONNECTIONS = 8192
_TICK_S = 0.05
_STOPPED_S = 1.0
_HELLO_MS = 5_000
_MAX_LOG_BYTES = 1 << 20
_MAX_LOG_LINE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``linger_ms``, ``first_agent_ms``: see ``lifetime``. ``stall_ms``: how long a client may leave a reply unread."""

    linger_ms: int = 5_000
    first_agent_ms: int = 60_000
    stall_ms: int = 10_000


class StoreServer:
    """The engine and its connections. Runs in one event loop, so each request is atomic."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.engine = Engine()
        self.lifetime = Lifetime(linger_ms=options.linger_ms, first_agent_ms=options.first_agent_ms)
        self.store_id = os.urandom(8).hex()
        self.connections: set[Connection] = set()
        self.parked: set[Connection] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serves until nobody needs the store any more."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: log(f"event loop: {context.get('message')}"))
        server = await loop.create_server(lambda: Connection(self), sock=listener, backlog=LISTEN_BACKLOG)
        log(f"store {self.store_id} serves at {listener.getsockname()[:2]}, process {os.getpid()}")
        await self._until_over(loop)
        server.close()
        for connection in list(self.connections):
            connection.abort()
        log(f"store {self.store_id} ends at revision {self.engine.revision}: no agent left")

    async def _until_over(self, loop: asyncio.AbstractEventLoop) -> None:
        last = loop.time()
        while not self.lifetime.over:
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            # A tick that comes very late means that the process did not run: what waited is read first.
            ran_ms = round((now - last) * 1000) if now - last < _STOPPED_S else 0
            last = now
            self.lifetime.passed(ran_ms)
            for connection in list(self.connections):
                connection.passed(ran_ms)

    def wake(self, before: int) -> None:
        """Answers the waits that a change after revision ``before`` concerns."""
        for connection in list(self.parked):
            connection.wake(before)


class Connection(asyncio.Protocol):
    """One client's connection: preamble, hello, then requests, one at a time."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._peer = "?"
        self._received = bytearray()
        self._preamble_seen = False
        self._hello: wire.Hello | None = None
        self._wait: wire.WaitRequest | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._blocked = False  # the client does not read: nothing more is read from it
        self._age_ms = 0
        self._unread_bytes = 0
        self._stalled_ms = 0

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else "?"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # the peer may be gone already
                keep_alive(sock)
        if len(self._server.connections) > MAX_CONNECTIONS:
            self._drop(f"more than {MAX_CONNECTIONS} connections")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._unpark()
        self._server.connections.discard(self)
        self._transport = None
        if self._hello is not None and self._hello.role == "agent":
            self._server.lifetime.left(self._hello.client_id)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._read_frames()

    def pause_writing(self) -> None:
        self._blocked = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked = False
        self._stalled_ms = 0
        if self._transport is not None:
            self._transport.resume_reading()
            self._read_frames()

    # -- time

    def passed(self, ran_ms: int) -> None:
        """The server ran this long: drops a client that says no hello or leaves its replies unread."""
        if self._transport is None:
            return
        self._age_ms += ran_ms
        if self._hello is None and self._age_ms > _HELLO_MS:
            self._drop(f"no hello in {_HELLO_MS} ms")
        elif self._blocked:
            unread = self._transport.get_write_buffer_size()
            self._stalled_ms = 0 if unread < self._unread_bytes else self._stalled_ms + ran_ms
            self._unread_bytes = unread
            if self._stalled_ms > self._server.options.stall_ms:
                self._drop(f"{unread} bytes left unread for {self._stalled_ms} ms")

    # -- reading

    def _read_frames(self) -> None:
        try:
            while self._transport is not None and not self._blocked and self._read_one():
                pass
        except RecordError as error:
            self._drop(str(error))

    def _read_one(self) -> bool:
        """Handles one whole preamble or frame of what was received; False if there is none yet."""
        if not self._preamble_seen:
            return self._read_preamble()
        if len(self._received) < wire.LENGTH.size:
            return False
        (length,) = wire.LENGTH.unpack_from(self._received)
        most = wire.MAX_HELLO_BYTES if self._hello is None else wire.MAX_FRAME_BYTES
        if length > most:
            raise RecordError(f"frame of {length} bytes, at most {most} expected")
        end = wire.LENGTH.size + length
        if len(self._received) < end:
            return False
        message = wire.decode_body(self._received[wire.LENGTH.size : end])
        del self._received[:end]
        if self._hello is None:
            self._welcome(wire.hello_from_json(message))
        else:
            self._handle(wire.request_from_json(message))
        return True

    def _read_preamble(self) -> bool:
        head = bytes(self._received[: wire.PREAMBLE_BYTES])
        if head[: len(wire.MAGIC)] != wire.MAGIC[: len(head)]:
            raise RecordError(f"starts with {head!r}, not a client of this store")
        if len(head) < wire.PREAMBLE_BYTES:
            return False
        # Sent in any case: a client of another version can then say which versions met.
        self._send(wire.PREAMBLE)
        if head != wire.PREAMBLE:
            self._drop(f"speaks {head!r}, {wire.PREAMBLE!r} expected", flush=True)
            return False
        del self._received[: wire.PREAMBLE_BYTES]
        self._preamble_seen = True
        return True

    # -- requests

    def _welcome(self, hello: wire.Hello) -> None:
        self._hello = hello
        if hello.role == "agent":
            self._server.lifetime.joined(hello.client_id)
        self._send(wire.encode_frame({"op": "welcome", "store_id": self._server.store_id}))

    def _handle(self, request: wire.Request) -> None:
        if self._wait is not None:
            raise RecordError("a request while a wait is under way, one request at a time expected")
        try:
            match request:
                case wire.TxnRequest():
                    before = self._server.engine.revision
                    result = self._server.engine.apply(request.txn)
                    self._reply(request.id, wire.result_to_json(result))
                    if result.revision != before:
                        self._server.wake(before)
                case wire.WaitRequest():
                    check_wait(request.prefixes)
                    self._park(request)
                case wire.ByeRequest():
                    self._bye()
                    self._reply(request.id, True)
                case wire.PingRequest():
                    self._reply(request.id, True)
                case _:
                    unreachable(request)
        except TxnRejected as error:
            self._send(wire.encode_frame({"id": request.id, "rejected": str(error)}))

    def _bye(self) -> None:
        if self._hello is not None and self._hello.role == "agent":
            self._server.lifetime.said_bye(self._hello.client_id)

    def _park(self, request: wire.WaitRequest) -> None:
        if self._server.engine.changed_since(request.prefixes, request.after_revision):
            self._reply(request.id, True)
            return
        self._wait = request
        self._server.parked.add(self)
        delay_s = min(request.timeout_ms, 86_400_000) / 1000
        self._wait_timer = asyncio.get_running_loop().call_later(delay_s, self._end_wait, False)

    def wake(self, before: int) -> None:
        """Ends the parked wait if it concerns a change after revision ``before``."""
        if self._wait is not None:
            after = max(self._wait.after_revision, before)
            if self._server.engine.changed_since(self._wait.prefixes, after):
                self._end_wait(True)

    def _end_wait(self, changed: bool) -> None:
        if self._wait is not None:
            request_id = self._wait.id
            self._unpark()
            self._reply(request_id, changed)

    def _unpark(self) -> None:
        self._wait = None
        self._server.parked.discard(self)
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    # -- writing

    def _reply(self, request_id: int, result: object) -> None:
        frame = wire.encode_frame({"id": request_id, "ok": result})
        if len(frame) > wire.MAX_FRAME_BYTES:
            text = f"reply of {len(frame)} bytes, at most {wire.MAX_FRAME_BYTES} are sent: read less at once"
            frame = wire.encode_frame({"id": request_id, "rejected": text})
        self._send(frame)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _drop(self, reason: str, *, flush: bool = False) -> None:
        log(f"connection from {self._peer} dropped: {reason}")
        if flush and self._transport is not None:
            self._transport.close()
        else:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def log(line: str) -> None:
    """Appends one bounded line to the log (standard error). A full log starts anew: the newest lines matter."""
    with contextlib.suppress(OSError, ValueError):  # a full disk must not end the store
        if os.fstat(2).st_size > _MAX_LOG_BYTES:
            os.ftruncate(2, 0)
        text = line if len(line) <= _MAX_LOG_LINE else f"{line[:_MAX_LOG_LINE]}…"
        os.write(2, f"{text}\n".encode(errors="replace"))


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 64
    with contextlib.suppress(OSError, ValueError):
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
            )


def main(argv: list[str]) -> None:
    """Runs the server. ``argv`` holds pairs of an option and its number, written by ``spawn.start_server``."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    numbers = {name: int(number) for name, number in zip(argv[::2], argv[1::2], strict=True)}
    listener = socket.socket(fileno=numbers.pop("--fd"))
    listener.set_inheritable(False)
    listener.setblocking(False)
    _raise_file_limit()
    options = ServerOptions(**{name[2:].replace("-", "_"): number for name, number in numbers.items()})
    asyncio.run(StoreServer(options).serve(listener))


if __name__ == "__main__":
    main(sys.argv[1:])
