"""What the running program imports, from an agent that runs it to the standbys, whose workers have not run yet.

One record, written by the agent of slot 0 when it has learned something new, and looked for by standbys at growing
intervals; nobody waits for it, and without it a standby's warm workers import what nearly every program needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from lmres.adapters.bootstrap.modules import pack, unpack
from lmres.errors import StoreError
from lmres.ports import Get, Put, Store, Txn, TxnResult
from lmres.rendezvous.rounds import Outcome

log = logging.getLogger("lmres")

FIRST_MS = 2_000
SELDOM_MS = 60_000
"""How long after a try the next one is: at first, and at last."""
_REQUEST_MS = 500


class Pool(Protocol):
    """What is used of a ``WarmPool``."""

    @property
    def learned(self) -> tuple[str, ...]: ...
    def learn(self, modules: Iterable[str], *, from_elsewhere: bool = False) -> bool: ...
    def refill(self, *, paced: bool = True) -> None: ...


class SharedImports:
    """Used by the control thread alone. ``key`` is asked when it is needed: the agent makes it when it starts."""

    def __init__(self, *, warm: Pool, store: Store, key: Callable[[], str]) -> None:
        self._warm = warm
        self._store = store
        self._key = key
        self._told: tuple[str, ...] = ()
        self._pause_ms = FIRST_MS
        self._next_ms = 0

    def follow(self, outcome: Outcome, now_ms: int) -> None:
        """After each round."""
        if outcome.end is not None or outcome.plan is None or now_ms < self._next_ms:
            return
        if outcome.slot == 0:
            if not self._tell():
                self._next_ms = now_ms + FIRST_MS
        elif outcome.standing == "standby":
            self._pause_ms = SELDOM_MS if self._look() else min(SELDOM_MS, 2 * self._pause_ms)
            self._next_ms = now_ms + self._pause_ms

    def _tell(self) -> bool:
        """False if it may not have arrived."""
        names = self._warm.learned
        if names == self._told:
            return True
        packed = pack(names)
        if packed is not None:
            put = Put(key=self._key(), value=packed.decode("ascii"))
            if self._transact(Txn(success=(put,))) is None:
                return False
        self._told = names
        return True

    def _look(self) -> bool:
        """Whether there is something."""
        result = self._transact(Txn(success=(Get(key=self._key()),)))
        found = [entry.value for read in result.reads for entry in read] if result is not None else []
        names = unpack(found[0]) if found else ()
        if names and self._warm.learn(names, from_elsewhere=True):
            log.debug("the running program imports %d modules", len(names))
            self._warm.refill(paced=False)
        return bool(names)

    def _transact(self, txn: Txn) -> TxnResult | None:
        """None: no answer."""
        try:
            return self._store.transact(txn, timeout_ms=_REQUEST_MS)
        except StoreError as error:  # the rounds find out what it means
            log.debug("the record of what the program imports: %s", error)
            return None
