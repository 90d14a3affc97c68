"""The store port: what the protocol asks of a store, in the terms of etcd v3.

A store is a map from text keys to text values under one revision counter that rises by one with each transaction
that writes. A key remembers the revision of its creation and of its last change; a revision of 0 means "no such key".
Everything the protocol needs is one kind of request, the transaction: compare revisions, then write and read in one
atomic step. Waiting for a change is a hint that saves time; nothing correct depends on it.

Source of the model: etcd v3 API (KV.Txn, RangeRequest.min_mod_revision, Watch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 1 << 20
MAX_TXN_OPS = 128
"""etcd's default ``--max-txn-ops``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Holds if the key's last change has this revision; 0 means the key does not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePrefix:
    """Deletes every key with this prefix. Used only when a finished run cleans up."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Reads every key with this prefix changed at or after ``min_mod_revision``, in key order."""

    prefix: str
    min_mod_revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Reads one key: a result of zero or one entries."""

    key: str


Op: TypeAlias = Put | DeletePrefix | Range | Get


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """If all compares hold runs ``success``, else ``failure``, atomically and in order.

    Reads see the writes before them in the same transaction. A key is written at most once in one transaction.
    """

    compares: tuple[Compare, ...] = ()
    success: tuple[Op, ...] = ()
    failure: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    key: str
    value: str
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """``reads`` holds one tuple of entries for each Range and Get of the branch that ran, in order."""

    succeeded: bool
    revision: int
    reads: tuple[tuple[Entry, ...], ...] = ()


class Store(Protocol):
    """One connection to a store. Not shared between threads: ``clone`` gives another thread its own.

    Keys are at most 1024 bytes of UTF-8, values 1 MiB. Every call ends within its timeout.
    """

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        """Runs one transaction.

        Raises StoreUnavailable when no answer came in time (the outcome is unknown), StoreRefused when
        nobody listens, StoreProtocolError when the other side is not a store of this package.
        """
        ...

    def wait(self, prefixes: tuple[str, ...], *, after_revision: int, timeout_ms: int) -> bool:
        """Blocks until a key with one of the prefixes has changed after the revision (True) or the time is over
        (False). Raises as ``transact``."""
        ...

    def clone(self) -> Store:
        """A second, independent connection to the same store."""
        ...

    def close(self) -> None:
        """Ends the connection; an unfinished call in another thread ends with StoreUnavailable."""
        ...
