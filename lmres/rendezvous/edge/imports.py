"""What the running program imports, from an agent that runs it to the standbys, whose workers have not run yet.

One record, written by the agent of slot 0 when it has learned something new, and looked for by standbys at long
intervals; nobody waits for it, and without it a standby's warm workers import what nearly every program needs.
"""

from __future__ import annotations

import binascii
import logging
import zlib
from collections.abc import Callable

from lmres.adapters.bootstrap.modules import MAX_REPORT_BYTES
from lmres.errors import StoreError
from lmres.ports import Get, Put, Store, Txn
from lmres.rendezvous.edge.workers.warm import WarmPool, names_of_report
from lmres.rendezvous.rounds import Outcome

log = logging.getLogger("lmres")

LOOK_MS = 2_000
SELDOM_MS = 60_000
"""How often a standby looks, before and after it has found something."""
_REQUEST_MS = 500


class Imports:
    """Used by the control thread alone. ``key`` is asked when it is needed: the agent makes it when it starts."""

    def __init__(self, *, warm: WarmPool, store: Store, key: Callable[[], str]) -> None:
        self._warm = warm
        self._store = store
        self._key = key
        self._told: tuple[str, ...] = ()
        self._look_at_ms = 0

    def follow(self, outcome: Outcome, now_ms: int) -> None:
        """After each round."""
        if outcome.end is not None or outcome.plan is None:
            return
        if outcome.slot == 0:
            self._tell()
        elif outcome.standing == "standby" and now_ms >= self._look_at_ms:
            self._look_at_ms = now_ms + (SELDOM_MS if self._look() else LOOK_MS)

    def _tell(self) -> None:
        names = self._warm.learned
        if names == self._told:
            return
        self._told = names  # once: it is no harm if it does not arrive
        text = binascii.b2a_base64(zlib.compress(" ".join(names).encode()), newline=False).decode("ascii")
        if len(text) <= MAX_REPORT_BYTES:
            self._transact(Txn(success=(Put(key=self._key(), value=text),)))

    def _look(self) -> bool:
        """Whether there is something."""
        found = self._transact(Txn(success=(Get(key=self._key()),)))
        names = names_of_report({"names": found}) if found else ()
        if names and self._warm.learn(names):
            self._warm.refill(paced=False)
        return bool(names)

    def _transact(self, txn: Txn) -> str:
        """The value that was read, if any."""
        try:
            result = self._store.transact(txn, timeout_ms=_REQUEST_MS)
        except StoreError as error:  # the rounds find out what it means
            log.debug("the record of what the program imports: %s", error)
            return ""
        return next((entry.value for read in result.reads for entry in read), "")
