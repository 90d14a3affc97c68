"""A store inside one process: the fake that passes the contract of the real ones.

Every connection (``clone``) shares one engine behind one lock; a wait sleeps on its condition, so that a change
wakes it at once. Nothing here can be unreachable, so only a closed connection is ever StoreUnavailable.
"""

from __future__ import annotations

import threading

from lmres.errors import StoreUnavailable
from lmres.ports import Txn, TxnResult
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.edge.stores.limits import check_wait


class _Shared:
    __slots__ = ("changed", "engine")

    def __init__(self) -> None:
        self.engine = Engine()
        self.changed = threading.Condition()


class MemoryStore:
    """A connection to a store of its own; ``clone`` gives further connections to the same store."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._closed = False

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        """See ``lmres.ports.Store``. The timeout never comes into play."""
        del timeout_ms
        with self._shared.changed:
            self._check_open()
            before = self._shared.engine.revision
            result = self._shared.engine.apply(txn)
            if result.revision != before:
                self._shared.changed.notify_all()
            return result

    def wait(self, prefixes: tuple[str, ...], *, after_revision: int, timeout_ms: int) -> bool:
        """See ``lmres.ports.Store``."""
        check_wait(prefixes)
        engine = self._shared.engine
        with self._shared.changed:
            self._shared.changed.wait_for(
                lambda: self._closed or engine.changed_since(prefixes, after_revision), timeout_ms / 1000
            )
            self._check_open()
            return engine.changed_since(prefixes, after_revision)

    def clone(self) -> MemoryStore:
        """See ``lmres.ports.Store``."""
        other = MemoryStore()
        other._shared = self._shared
        return other

    def close(self) -> None:
        """See ``lmres.ports.Store``."""
        with self._shared.changed:
            self._closed = True
            self._shared.changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this connection to the memory store is closed: use another one")
