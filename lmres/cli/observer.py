"""A run's records as somebody outside the run sees and changes them.

An observer never starts a store, never creates one, and never keeps one alive. For ``tcp`` the connection says so in
its hello. A store file has no such role: its last agent removes it, and can only do so while nobody has it open, so
it is opened for each request alone, and only if it exists.

No store, no such run and a foreign service are all ``NoSuchRun``: there is nothing here to look at.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol
from urllib.parse import unquote

from lmres.cli.run_selection import RunSelection
from lmres.cli.text import names
from lmres.errors import (
    ExitCode,
    LmresError,
    RecordError,
    StoreLost,
    StoreProtocolError,
    StoreRefused,
    StoreUnavailable,
)
from lmres.fields import shown
from lmres.ids import ROOT
from lmres.ports import Compare, Entry, Put, Range, Txn, TxnResult
from lmres.rendezvous.codec import decode
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.tcp import TcpStore
from lmres.rendezvous.state import Lease, View

TIMEOUT_MS = 5_000
MAX_TRIES = 8


class NoSuchRun(LmresError):
    """There is no such run here: no store, a store without it, or something else answers."""

    exit_code = ExitCode.NO_SUCH_RUN


class Unanswered(NoSuchRun):
    """The store did not answer in time. A write may or may not have happened."""


class Requests(Protocol):
    """The part of a store that an observer uses."""

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A lease as it was read: its record, None if that is unreadable, and the revision of its last change."""

    lease: Lease | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All records of a run at one revision. ``leases`` by node id."""

    view: View
    leases: Mapping[str, Beat]


class Observer:
    """Reads a run, and writes an operator's records. Every call ends within ``TIMEOUT_MS``. One thread."""

    def __init__(self, selection: RunSelection, store: Requests | None = None) -> None:
        """``store``: another than the selection's, for tests."""
        self.selection = selection
        self.keys = selection.keys
        self._store = store if store is not None else _open(selection)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()

    def read(self) -> Snapshot:
        """Everything. Raises NoSuchRun."""
        keys = self.keys
        result = self._transact(Txn(success=tuple(Range(prefix=p) for p in (keys.ctl, keys.reg, keys.leases))))
        control, register, leases = result.reads
        if not control and not register:
            raise NoSuchRun(self._not_here())
        view = View(keys=keys)
        view.apply(control, result.revision)
        view.apply(register, result.revision)
        return Snapshot(view=view, leases=self._beats(leases))

    def read_leases(self) -> dict[str, Beat]:
        """Only the heartbeats."""
        result = self._transact(Txn(success=(Range(prefix=self.keys.leases),)))
        return self._beats(result.reads[0])

    def write(self, put: Put, compares: tuple[Compare, ...]) -> TxnResult | None:
        """Writes if the compares hold; None when no answer came and it is not known whether it was written."""
        try:
            return self._transact(Txn(compares=compares, success=(put,)))
        except Unanswered:
            return None

    def update(self, change: Callable[[Snapshot], tuple[Put, tuple[Compare, ...]] | None]) -> tuple[Snapshot, bool]:
        """Reads, asks ``change`` what to write, and writes it, again while others write in between.

        Returns the records with the change in them, and whether one was written. ``change`` answers None if all is as
        it should be; it is asked again after a write with an unknown outcome. Raises NoSuchRun.
        """
        written = False
        for _ in range(MAX_TRIES):
            snapshot = self.read()
            wanted = change(snapshot)
            if wanted is None:
                return snapshot, written
            put, compares = wanted
            result = self.write(put, compares)
            written = result is None  # if the next read finds it written, it was by us as far as can be told
            if result is not None and result.succeeded:
                revision = result.revision
                entry = Entry(key=put.key, value=put.value, create_revision=revision, mod_revision=revision)
                snapshot.view.apply((entry,), revision)
                return snapshot, True
        raise Unanswered(f"the change to run {shown(self.selection.run_id)} did not go through; try again")

    def _beats(self, entries: tuple[Entry, ...]) -> dict[str, Beat]:
        found = {}
        for entry in entries:
            lease = None
            with suppress(RecordError):
                lease = decode(Lease, entry.value)
            found[entry.key[len(self.keys.leases) :]] = Beat(lease=lease, revision=entry.mod_revision)
        return found

    def _transact(self, txn: Txn) -> TxnResult:
        where = f"no store at {shown(self.selection.endpoint)}"
        try:
            return self._store.transact(txn, timeout_ms=TIMEOUT_MS)
        except StoreRefused as error:
            what = "nobody listens there" if self.selection.store_type == "tcp" else "there is no such file"
            raise Unanswered(f"{where}: {what}; the run is over, has not begun, or is elsewhere") from error
        except StoreUnavailable as error:
            raise Unanswered(f"{where}: {error}") from error
        except StoreLost as error:
            raise NoSuchRun(f"the store at {shown(self.selection.endpoint)} has ended: {error}") from error
        except StoreProtocolError as error:
            raise NoSuchRun(f"{where}: {error}") from error

    def _not_here(self) -> str:
        """Names the runs that are there instead, where that is easily told."""
        others: set[str] = set()
        with suppress(LmresError):
            result = self._transact(Txn(success=(Range(prefix=f"{ROOT}/"),)))
            others = {entry.key[len(ROOT) + 1 :].partition("/")[0] for entry in result.reads[0]}
        there = f"; runs there: {names(sorted(map(unquote, others)))}" if others else ""
        selection = self.selection
        return f"no run {shown(selection.run_id)} in the store at {shown(selection.endpoint)} (--rdzv-id){there}"


class _FileRequests:
    """A store file, open during requests only."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        try:
            empty = self._path.stat().st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            empty = True
        except OSError as error:
            raise StoreUnavailable(f"store file {self._path}: {error.strerror}") from error
        if empty:
            raise StoreRefused(f"there is no store file {self._path}")
        store = FileStore(self._path)
        try:
            result = store.transact(txn, timeout_ms=timeout_ms)
            if result.revision == 0:
                # Its last user removed it just before it was opened, which made a new one: it holds nothing.
                store.delete(timeout_ms=1)
                raise StoreRefused(f"there is no store file {self._path}")
            return result
        finally:
            store.close()

    def close(self) -> None:
        """Nothing is open between requests."""


def _open(selection: RunSelection) -> Requests:
    if selection.store_type == "file":
        return _FileRequests(Path(selection.path))
    client_id = f"observer-{uuid.uuid4().hex[:16]}"
    return TcpStore((selection.host, selection.port), client_id=client_id, role="observer")
