"""The client of the store process: one blocking connection, opened when first needed.

Rules:

1. A call ends by its deadline, whatever the other side does: lookup, connecting, sending and reading all count
   against it. There are no retries here; the caller knows better what a retry may cost.
2. After a late, torn or unexpected reply the connection is dropped and the next call opens a new one, so a reply
   can never be taken for that of another request. Ids are compared all the same.
3. Revisions belong to one store process. If another one answers at the endpoint later, the old contents are gone
   and what the caller read before means nothing: StoreLost, never silently an empty store.
4. The server is asked to end a wait a little before the caller's deadline, so that "nothing changed" still arrives
   in time and is not taken for a lost server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from lmres.errors import RecordError, StoreError, StoreLost, StoreProtocolError, StoreUnavailable
from lmres.ports import Txn, TxnResult
from lmres.rendezvous.edge.stores import wire
from lmres.rendezvous.edge.stores.channel import Channel
from lmres.rendezvous.edge.stores.limits import TxnRejected, check_txn, check_wait
from lmres.rendezvous.edge.stores.sockets import Deadline, Target, lookup

_MAX_WAIT_SLACK_MS = 250
_T = TypeVar("_T")


class TcpStore:
    """A connection to the store process at an endpoint.

    ``endpoint`` is host and port. ``addresses``, if given, are the host's IP addresses, tried in order instead of a
    name lookup. ``client_id`` is the same for all connections of one agent and no other's; ``role`` says whether
    this client keeps the server alive.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        *,
        client_id: str,
        role: wire.Role = "agent",
        addresses: tuple[str, ...] = (),
    ) -> None:
        self._host, self._port = endpoint
        self._addresses = addresses
        self._hello = wire.Hello(client_id=client_id, role=role)
        self._name = f"store at {self._host} port {self._port}"
        self._store_id: str | None = None
        self._next_id = 1
        self._channel: Channel | None = None
        self._closed = threading.Event()
        self._calls = threading.Lock()

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        """See ``lmres.ports.Store``. Raises also TxnRejected (a limit is broken) and StoreLost (rule 3)."""
        check_txn(txn)
        reply = self._call(lambda request_id, _: wire.TxnRequest(id=request_id, txn=txn), timeout_ms)
        return self._decoded(reply, wire.result_from_json)

    def wait(self, prefixes: tuple[str, ...], *, after_revision: int, timeout_ms: int) -> bool:
        """See ``lmres.ports.Store``. "Nothing changed" comes up to 250 ms before the timeout (rule 4)."""
        check_wait(prefixes)

        def request(request_id: int, left_ms: int) -> wire.Request:
            return wire.WaitRequest(
                id=request_id,
                prefixes=prefixes,
                after_revision=max(0, after_revision),
                timeout_ms=left_ms - min(left_ms // 4, _MAX_WAIT_SLACK_MS),
            )

        return self._decoded(self._call(request, timeout_ms), lambda reply: wire.boolean(reply, "wait reply"))

    def connect_probe(self, *, timeout_ms: int) -> None:
        """Returns if a store of this version answers now, else raises as ``transact``. The connection stays."""
        self._call(lambda request_id, _: wire.PingRequest(id=request_id), timeout_ms)

    def bye(self, *, timeout_ms: int) -> None:
        """Tells the server that this client will not come back, and closes. Never raises: the server can do without."""
        with contextlib.suppress(StoreError):
            self._call(lambda request_id, _: wire.ByeRequest(id=request_id), timeout_ms)
        self.close()

    def local_address(self) -> str | None:
        """This host's address as the present connection uses it, None while there is none."""
        channel = self._channel
        return None if channel is None else channel.local_address()

    @property
    def store_id(self) -> str | None:
        """Names the store process whose contents this client has read; None before the first connection."""
        return self._store_id

    def clone(self) -> TcpStore:
        """See ``lmres.ports.Store``."""
        other = TcpStore(
            (self._host, self._port),
            client_id=self._hello.client_id,
            role=self._hello.role,
            addresses=self._addresses,
        )
        other._store_id = self._store_id
        return other

    def close(self) -> None:
        """See ``lmres.ports.Store``."""
        self._closed.set()
        channel = self._channel
        if channel is not None:
            channel.abort()  # a call of another thread ends now and lets go of the lock
        with self._calls:
            self._drop()

    def _call(self, request: Callable[[int, int], wire.Request], timeout_ms: int) -> object:
        """Sends the request made for an id and the milliseconds left, and returns its reply."""
        deadline = Deadline(timeout_ms)
        with self._calls:
            try:
                channel = self._connected(deadline)
                self._next_id += 1
                left_s = deadline.must_left_s(f"{self._name}: no time left for a request")
                return channel.request(request(self._next_id, int(left_s * 1000)), deadline)
            except TxnRejected:
                raise
            except BaseException as error:
                self._drop()
                if self._closed.is_set() and isinstance(error, StoreError):
                    raise StoreUnavailable(f"{self._name}: this connection was closed") from error
                raise

    def _connected(self, deadline: Deadline) -> Channel:
        if self._closed.is_set():
            raise StoreUnavailable(f"{self._name}: this connection is closed")
        if self._channel is not None:
            return self._channel
        targets = self._targets(deadline)
        channel = self._channel = Channel(self._name)
        if self._closed.is_set():  # close() may have looked just before the line above
            raise StoreUnavailable(f"{self._name}: this connection is closed")
        store_id = channel.open(targets, self._hello, deadline)
        if self._store_id is not None and self._store_id != store_id:
            raise StoreLost(
                f"{self._name} is another process than before (id {store_id}, was {self._store_id}): the run's "
                "records are gone; start the run again"
            )
        self._store_id = store_id
        return channel

    def _targets(self, deadline: Deadline) -> tuple[Target, ...]:
        found: list[Target] = []
        for host in self._addresses or (self._host,):
            found += lookup(host, self._port, deadline, self._closed)
        return tuple(found)

    def _decoded(self, reply: object, decode: Callable[[object], _T]) -> _T:
        try:
            return decode(reply)
        except RecordError as error:
            raise StoreProtocolError(f"{self._name} sent a reply that is not understood: {error}") from error

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
