"""Pulls parts from another vault: ranges over several connections, straight into the memory that is to hold them.

Rules:

1. A part is cut into chunks; each stream takes the next one. A lost connection gives its chunks back with the count of
   bytes that came, and they go on from there, on a new connection.
2. Chunks are hashed in order as they become whole, by whichever stream completed the next one: the digest is ready
   moments after the last byte. Hashing and receiving release the interpreter lock.
3. Only a part whose digest is right was pulled; else an error, and what lies in memory is no part.
4. Retries are counted only while nothing worth a connection comes; time is limited as a whole.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from lmres.errors import DigestMismatch, PartMissing, TransferError
from lmres.gemini.edge import transfer_wire as wire
from lmres.gemini.edge.transfer_wire import ConnectionLost, Op, Request, Status

CHUNK_BYTES = 2 << 20  # with the next chunk asked for, what is under way still fits into a processor's cache
_SMALL_BYTES = 16 << 20  # below one stream, in the caller's thread
MAX_STREAMS = 16
_DEFAULT_STREAMS = 4  # one is as fast on quiet cores, and less than half as fast on busy ones
_PROGRESS_BYTES = 64 << 10  # a connection that brought this, or the rest of a chunk, was of use
_AHEAD = 2  # requests under way on one connection, so that it never waits for the next one
_MAX_IDLE_CONNECTIONS = 8
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a pull did. ``received``: bytes that came over the network. ``state``: the hash, to go on from there."""

    digest: str
    length: int
    received: int
    duration_s: float
    reconnects: int
    state: xxhash.xxh3_128


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """``attempts``: connections in a row, over all streams, that were of no use, until the pull gives up."""

    connect_s: float = 5.0
    idle_s: float = 10.0
    attempts: int = 4


class Puller:
    """Pulls from one vault and keeps its connections for the next part. Any number of threads may pull at once."""

    def __init__(
        self, address: str, port: int, *, run_id: str, node_id: str = "", limits: PullLimits | None = None
    ) -> None:
        self.address = address
        self.port = port
        self.limits = limits or PullLimits()
        self._hello = wire.pack_frame(wire.hello(run_id=run_id, node_id=node_id))
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pulls: set[_Pull] = set()
        self._closed = False

    def pull(self, digest: str, length: int, into: memoryview, *, streams: int = 0, timeout_s: float = 600.0) -> Pulled:
        """Fills ``into[:length]`` with the part ``digest``. ``streams`` 0: chosen by size.

        Raises ``PartMissing``, ``DigestMismatch`` or ``TransferError``; then nothing in ``into`` counts.
        """
        return self.pull_tail(digest, length, into, have=0, state=None, streams=streams, timeout_s=timeout_s)

    def pull_tail(
        self,
        digest: str,
        length: int,
        into: memoryview,
        *,
        have: int,
        state: xxhash.xxh3_128 | None,
        streams: int = 0,
        timeout_s: float = 600.0,
    ) -> Pulled:
        """As ``pull``, but ``into[:have]`` is there already. ``state``: the hash of it, None: it is hashed again.

        ``state`` is not changed. A prefix that is not the part's raises ``DigestMismatch``: pull the whole then.
        """
        wire.check_digest(digest)
        if into.readonly or not into.c_contiguous or into.itemsize != 1 or not 0 <= have <= length <= len(into):
            raise TransferError(
                f"{length} bytes, {have} of them there already, can not be pulled into memory of {into.nbytes} bytes"
                f"{' that is read-only' if into.readonly else ''}"
            )
        # A view of our own: an error that somebody keeps does not keep the memory.
        with memoryview(into) as view:
            if state is None:
                state = xxhash.xxh3_128(view[:have])
            pull = _Pull(self, digest, length, view, have, state.copy(), timeout_s)
            with self._lock:
                if self._closed:
                    raise TransferError(f"pulling from {self} has ended")
                self._pulls.add(pull)
            try:
                return pull.run(streams)
            finally:
                with self._lock:
                    self._pulls.discard(pull)

    def close(self) -> None:
        """Ends pulls that are under way with ``TransferError``, and all connections."""
        with self._lock:
            self._closed = True
            pulls = list(self._pulls)
        for pull in pulls:
            pull.fail(TransferError(f"pulling from {self} was ended"))
        self._forget_idle()

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections, for _Pull

    def _borrow(self, left_s: float) -> _Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect(left_s)

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                connection.used = True
                self._idle.append(connection)
                return
        connection.close()

    def _forget_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self, left_s: float) -> _Connection:
        wait_s = max(0.001, min(self.limits.connect_s, left_s))
        try:
            sock = socket.create_connection((self.address, self.port), timeout=wait_s)
        except OSError as error:
            raise ConnectionLost(f"could not be connected ({error})") from error
        try:
            wire.prepare(sock)
            wire.limit_waits(sock, read_s=wait_s, write_s=wait_s)
            wire.send(sock, wire.MAGIC + self._hello)
            answer = wire.read_frame(sock)
            if answer.get("busy"):
                raise _Busy(f"is busy: {answer.get('refused')}")
            if answer.get("refused"):
                raise TransferError(f"{self} refuses to send parts: {str(answer['refused'])[: wire.MAX_TEXT_BYTES]}")
        except BaseException:
            sock.close()
            raise
        return _Connection(sock)


def pull(
    address: str,
    port: int,
    digest: str,
    length: int,
    into: memoryview,
    *,
    run_id: str,
    streams: int = 0,
    timeout_s: float = 600.0,
    limits: PullLimits | None = None,
) -> Pulled:
    """One pull over connections of its own: see ``Puller.pull``."""
    with Puller(address, port, run_id=run_id, limits=limits) as puller:
        return puller.pull(digest, length, into, streams=streams, timeout_s=timeout_s)


class _Busy(ConnectionLost):
    """The peer is well but has no connection free."""


class _Stale(ConnectionLost):
    """A connection kept from an earlier pull had ended meanwhile."""


@dataclass(slots=True, eq=False)
class _Chunk:
    index: int
    start: int
    end: int
    got: int = 0


class _Connection:
    """One socket, and what was asked on it and has not come yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.used = False  # it has been idle since: the peer may have closed it, which says nothing about the peer
        self.asked: deque[_Chunk] = deque()
        self.replies_read = 0
        self._wait_s = -1.0

    def ask(self, digest: str, chunk: _Chunk) -> None:
        offset = chunk.start + chunk.got
        request = Request(
            op=Op.GET, replies_read=self.replies_read, digest=digest, offset=offset, length=chunk.end - offset
        )
        self.asked.append(chunk)
        wire.send(self.sock, wire.pack_request(request))

    def say_read(self) -> None:
        wire.send(self.sock, wire.pack_request(Request(op=Op.READ_SO_FAR, replies_read=self.replies_read)))

    def limit_waits(self, wait_s: float) -> None:
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            wire.limit_waits(self.sock, read_s=wait_s, write_s=wait_s)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self.sock.close()


class _Pull:
    """One part on its way: what the streams share. The lock guards everything but the bytes of a chunk in work."""

    def __init__(
        self,
        puller: Puller,
        digest: str,
        length: int,
        into: memoryview,
        have: int,
        state: xxhash.xxh3_128,
        timeout_s: float,
    ) -> None:
        self._puller = puller
        self._digest = digest
        self._length = length
        self._into = into
        self._have = have
        self._state = state
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._todo = deque(_cut(have, length))
        self._chunks = tuple(self._todo)
        self._whole = bytearray(len(self._chunks))  # a flag for each chunk
        self._hashed = 0  # chunks, in order
        self._hashing = False
        self._connections: set[_Connection] = set()
        self._streams = 0
        self._barren = 0
        self._reconnects = 0
        self._failure: TransferError | None = None
        self._failed = threading.Event()

    def run(self, streams: int) -> Pulled:
        wanted = min(streams or self._streams_by_size(), MAX_STREAMS, len(self._chunks))
        self._streams = wanted
        threads = [threading.Thread(target=self._stream, name="parts-pull", daemon=True) for _ in range(1, wanted)]
        with contextlib.suppress(RuntimeError):  # no thread is free: fewer streams
            for thread in threads:
                thread.start()
        if wanted:
            self._stream()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        while self._failure is None and self._hashed < len(self._chunks):
            self._streams = 1  # a stream that gave up left chunks when the others had just finished
            self._stream()
        if self._failure is not None:
            raise self._failure
        assert self._hashed == len(self._chunks)
        found = self._state.hexdigest()
        if found != self._digest:
            raise DigestMismatch(
                f"what {self._puller} sent as part {self._digest} ({self._length} bytes, from {self._have} on) has the "
                f"digest {found}: it is not used"
            )
        return Pulled(
            digest=self._digest,
            length=self._length,
            received=self._length - self._have,
            duration_s=time.monotonic() - self._began_s,
            reconnects=self._reconnects,
            state=self._state,
        )

    def fail(self, error: TransferError) -> None:
        """The first failure counts; every stream stops."""
        error.__cause__ = error.__context__ = None  # they would keep the memory; the message says it all
        with self._lock:
            self._failure = self._failure or error
            connections = list(self._connections)
            self._failed.set()
            for connection in connections:
                connection.shut_down()

    def _streams_by_size(self) -> int:
        return 1 if self._length - self._have < _SMALL_BYTES else _DEFAULT_STREAMS

    # -- one stream

    def _stream(self) -> None:
        try:
            while not self._failed.is_set():
                try:
                    with self._connection() as connection:
                        self._work(connection)
                    return
                except _Busy as error:
                    with self._lock:
                        if self._streams > 1:  # others go on with what there is
                            self._streams -= 1
                            return
                    self._lost(str(error))
                except _Stale:
                    self._reconnects += 1
                except ConnectionLost as error:
                    self._lost(str(error))
        except TransferError as error:
            self.fail(error)
        except Exception as error:
            self.fail(TransferError(f"pulling part {self._digest} from {self._puller} failed: {error!r}"))

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection that ``fail`` can end. Goes back when the work is done, else its chunks do."""
        connection = self._puller._borrow(self._left_s())
        with self._lock:
            self._connections.add(connection)
            if self._failed.is_set():
                connection.shut_down()
        fresh, before = not connection.used, connection.replies_read
        try:
            yield connection
        except BaseException as error:
            with self._lock:
                self._connections.discard(connection)
                self._todo.extendleft(reversed(connection.asked))
            connection.close()
            if isinstance(error, ConnectionLost) and not fresh and connection.replies_read == before:
                self._puller._forget_idle()
                raise _Stale(str(error)) from error
            raise
        with self._lock:
            self._connections.discard(connection)
        self._puller._give_back(connection)

    def _work(self, connection: _Connection) -> None:
        while True:
            self._ask_ahead(connection)
            if not connection.asked:
                connection.say_read()
                return
            chunk = connection.asked[0]
            self._read(connection, chunk)
            connection.asked.popleft()
            self._complete(chunk)

    def _ask_ahead(self, connection: _Connection) -> None:
        while len(connection.asked) < _AHEAD:
            with self._lock:
                if not self._todo or self._failed.is_set():
                    return
                chunk = self._todo.popleft()
            self._limit_waits(connection)
            connection.ask(self._digest, chunk)

    def _read(self, connection: _Connection, chunk: _Chunk) -> None:
        self._limit_waits(connection)
        reply = wire.unpack_reply(wire.read_exactly(connection.sock, wire.REPLY_BYTES))
        if reply.status is not Status.OK:
            text = wire.read_exactly(connection.sock, min(reply.length, wire.MAX_TEXT_BYTES)).decode(errors="replace")
            kind = PartMissing if reply.status is Status.MISSING else TransferError
            raise kind(f"{self._puller} does not send part {self._digest}: {text}")
        before, wanted = chunk.got, chunk.end - chunk.start - chunk.got
        if reply.part_length != self._length or reply.length != wanted:
            raise TransferError(
                f"{self._puller} sends {reply.length} bytes of a part of {reply.part_length} as {self._digest}; "
                f"{wanted} of {self._length} are expected: it is not used"
            )
        while chunk.start + chunk.got < chunk.end:
            self._limit_waits(connection)
            chunk.got += wire.receive(connection.sock, self._into[chunk.start + chunk.got : chunk.end])
            if chunk.got == chunk.end - chunk.start or chunk.got - before >= _PROGRESS_BYTES:
                self._barren = 0
        connection.replies_read += 1

    def _limit_waits(self, connection: _Connection) -> None:
        connection.limit_waits(min(self._puller.limits.idle_s, self._left_s()))

    def _left_s(self) -> float:
        left_s = self._began_s + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise TransferError(
                f"part {self._digest} did not come from {self._puller} in {self._timeout_s:g} s: {self._progress()}"
            )
        return left_s

    def _lost(self, why: str) -> None:
        """Waits before the next try; raises when there have been enough."""
        with self._lock:
            self._reconnects += 1
            self._barren += 1
            barren = self._barren
        if barren >= self._puller.limits.attempts:
            raise TransferError(
                f"part {self._digest} does not come: {self._puller} {why}, {barren} times in a row; {self._progress()}"
            )
        self._failed.wait(min(_MAX_BACKOFF_S, _BACKOFF_S * 2**barren, self._left_s()))

    def _progress(self) -> str:
        return f"{self._have + sum(chunk.got for chunk in self._chunks)} of {self._length} bytes are there"

    # -- the digest

    def _complete(self, chunk: _Chunk) -> None:
        """Hashes what has become whole in order, unless another stream is at it: then that one takes this chunk too."""
        with self._lock:
            self._whole[chunk.index] = 1
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._lock:
                if self._hashed == len(self._chunks) or not self._whole[self._hashed]:
                    self._hashing = False
                    return
                following = self._chunks[self._hashed]
            self._state.update(self._into[following.start : following.end])
            self._hashed += 1


def _cut(have: int, length: int) -> Iterator[_Chunk]:
    for index, start in enumerate(range(have, length, CHUNK_BYTES)):
        yield _Chunk(index=index, start=start, end=min(start + CHUNK_BYTES, length))
