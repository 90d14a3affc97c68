"""The store's model in memory: a map under one revision counter, changed by transactions (see ``lmres.ports``).

Rules:

1. A transaction is checked whole before its first write, so that it happens entirely or not at all.
2. All writes of a transaction carry the same revision, one above the last; without a write none is spent. A Put
   always writes, even the value that is there; a DeletePrefix writes only if it finds a key.
3. Entries are kept in the order of their last change. What changed after a revision is then a walk back from the
   newest, as long as the answer and independent of the size of the store: most reads ask for just that.
4. Deletions are remembered for waiting only, and only the newest. Who asks about an older time is told "changed":
   a needless wake-up costs one read, a missed one would cost a timeout.

Not thread-safe: the owner serializes.
Source of the semantics: etcd v3 API, KV.Txn and RangeRequest.min_mod_revision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import takewhile

from lmres.ports import DeletePrefix, Entry, Get, Op, Put, Range, Txn, TxnResult
from lmres.rendezvous.edge.stores.limits import MAX_STORE_BYTES, TxnRejected, check_txn, entry_bytes, unreachable

REMEMBERED_DELETIONS = 1024


class Engine:
    """One store's contents. ``revision`` is that of the last transaction that wrote, 0 at first."""

    __slots__ = (
        "_bytes",
        "_deletions",
        "_entries",
        "_forgotten_revision",
        "_keys",
        "_max_bytes",
        "_revision",
    )

    def __init__(self, *, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._revision = 0
        self._entries: dict[str, Entry] = {}  # in order of last change, oldest first
        self._keys: list[str] = []  # sorted
        self._deletions: deque[tuple[int, str]] = deque()  # (revision, key), oldest first
        self._forgotten_revision = 0

    @property
    def revision(self) -> int:
        return self._revision

    def apply(self, txn: Txn) -> TxnResult:
        """Runs a transaction. Raises TxnRejected, with nothing changed, if it breaks a limit."""
        check_txn(txn)
        succeeded = all(self._mod_revision(c.key) == c.mod_revision for c in txn.compares)
        branch = txn.success if succeeded else txn.failure
        self._check_room(branch)
        revision = self._revision + 1
        wrote = False
        reads: list[tuple[Entry, ...]] = []
        for op in branch:
            match op:
                case Put():
                    self._put(op, revision)
                    wrote = True
                case DeletePrefix():
                    wrote = self._delete(op.prefix, revision) or wrote
                case Range():
                    reads.append(self._range(op))
                case Get():
                    entry = self._entries.get(op.key)
                    reads.append(() if entry is None else (entry,))
                case _:
                    unreachable(op)
        if wrote:
            self._revision = revision
        return TxnResult(succeeded=succeeded, revision=self._revision, reads=tuple(reads))

    def changed_since(self, prefixes: tuple[str, ...], after_revision: int) -> bool:
        """Whether a key with one of the prefixes was put or deleted after the revision."""
        if after_revision >= self._revision:
            return False
        if after_revision < self._forgotten_revision:
            return True
        for key in reversed(self._entries):
            if self._entries[key].mod_revision <= after_revision:
                break
            if key.startswith(prefixes):
                return True
        newer = takewhile(lambda deletion: deletion[0] > after_revision, reversed(self._deletions))
        return any(key.startswith(prefixes) for _, key in newer)

    def _mod_revision(self, key: str) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.mod_revision

    def _put(self, put: Put, revision: int) -> None:
        old = self._entries.pop(put.key, None)  # taken out and put back: now the newest
        if old is None:
            insort(self._keys, put.key)
        else:
            self._bytes -= entry_bytes(old.key, old.value)
        self._bytes += entry_bytes(put.key, put.value)
        self._entries[put.key] = Entry(
            key=put.key,
            value=put.value,
            create_revision=revision if old is None else old.create_revision,
            mod_revision=revision,
        )

    def _delete(self, prefix: str, revision: int) -> bool:
        keys = self._keys_with(prefix)
        if not keys:
            return False
        first = bisect_left(self._keys, prefix)
        del self._keys[first : first + len(keys)]
        for key in keys:
            entry = self._entries.pop(key)
            self._bytes -= entry_bytes(entry.key, entry.value)
            self._deletions.append((revision, key))
        while len(self._deletions) > REMEMBERED_DELETIONS:
            self._forgotten_revision, _ = self._deletions.popleft()
        return True

    def _range(self, op: Range) -> tuple[Entry, ...]:
        if op.min_mod_revision <= 1:
            return tuple(self._entries[key] for key in self._keys_with(op.prefix))
        found = []
        for key in reversed(self._entries):
            entry = self._entries[key]
            if entry.mod_revision < op.min_mod_revision:
                break
            if key.startswith(op.prefix):
                found.append(entry)
        return tuple(sorted(found, key=lambda entry: entry.key))

    def _keys_with(self, prefix: str) -> list[str]:
        first = bisect_left(self._keys, prefix)
        last = first
        while last < len(self._keys) and self._keys[last].startswith(prefix):
            last += 1
        return self._keys[first:last]

    def _check_room(self, branch: tuple[Op, ...]) -> None:
        grown = self._bytes
        for op in branch:
            if isinstance(op, Put):
                old = self._entries.get(op.key)
                grown += entry_bytes(op.key, op.value) - (0 if old is None else entry_bytes(old.key, old.value))
        if grown > self._max_bytes and grown > self._bytes:
            raise TxnRejected(
                f"the store would hold {grown} bytes, at most {self._max_bytes} are allowed: delete keys first"
            )
