"""The store's model in SQL: the transactions of ``engine`` on the tables of a store file.

Every function runs inside a transaction of the caller (``prepare`` brings its own). Keys are kept as UTF-8 bytes,
whose order is that of the text and whose prefixes are ranges.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from lmres.ports import DeletePrefix, Entry, Get, Put, Range, Txn, TxnResult
from lmres.rendezvous.edge.stores.limits import MAX_STORE_BYTES, unreachable

APPLICATION_ID = 0x6C6D7273  # "lmrs"
FORMAT_VERSION = 1
_REMOVED_VERSION = -1
REMEMBERED_DELETIONS = 1024
_PAGE_BYTES = 4096
_COLUMNS = "key, value, create_revision, mod_revision"

_SCHEMA = (
    "CREATE TABLE counters (revision INTEGER NOT NULL, forgotten_revision INTEGER NOT NULL)",
    "INSERT INTO counters VALUES (0, 0)",
    "CREATE TABLE entries (key BLOB PRIMARY KEY, value TEXT NOT NULL, create_revision INTEGER NOT NULL, "
    "mod_revision INTEGER NOT NULL)",
    "CREATE INDEX entries_by_change ON entries (mod_revision)",
    "CREATE TABLE deletions (id INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key BLOB NOT NULL)",
    "CREATE INDEX deletions_by_change ON deletions (revision)",
    f"PRAGMA application_id={APPLICATION_ID}",
    f"PRAGMA user_version={FORMAT_VERSION}",
)


class ForeignFile(sqlite3.DatabaseError):
    """An SQLite database, but not one of this module."""


class RemovedFile(sqlite3.OperationalError):
    """A store that its last user has removed: open the path again."""


def prepare(db: sqlite3.Connection) -> None:
    """Makes a new connection usable; creates the tables in an empty file.

    Raises ForeignFile, RemovedFile, or as SQLite does."""
    db.execute("BEGIN")  # one snapshot: another process may be creating the tables just now
    ours = _is_ours(db)
    db.execute("COMMIT")
    db.execute("PRAGMA journal_mode=WAL")
    if not ours:
        db.execute("BEGIN IMMEDIATE")
        if not _is_ours(db):
            for statement in _SCHEMA:
                db.execute(statement)
        db.execute("COMMIT")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute(f"PRAGMA max_page_count={2 * MAX_STORE_BYTES // _PAGE_BYTES}")


def mark_removed(db: sqlite3.Connection) -> None:
    """Makes every ``prepare`` from now on raise RemovedFile."""
    db.execute(f"PRAGMA user_version={_REMOVED_VERSION}")


def is_marked_removed(db: sqlite3.Connection) -> bool:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return bool(version == _REMOVED_VERSION)


def apply(db: sqlite3.Connection, txn: Txn) -> TxnResult:
    """Runs a checked transaction."""
    (last,) = db.execute("SELECT revision FROM counters").fetchone()
    succeeded = all(_mod_revision(db, compare.key) == compare.mod_revision for compare in txn.compares)
    wrote = False
    reads: list[tuple[Entry, ...]] = []
    for op in txn.success if succeeded else txn.failure:
        match op:
            case Put():
                _put(db, op, last + 1)
                wrote = True
            case DeletePrefix():
                wrote = _delete(db, op.prefix, last + 1) or wrote
            case Range() | Get():
                reads.append(_read(db, op))
            case _:
                unreachable(op)
    if wrote:
        db.execute("UPDATE counters SET revision = ?", (last + 1,))
    return TxnResult(succeeded=succeeded, revision=last + 1 if wrote else last, reads=tuple(reads))


def changed_since(db: sqlite3.Connection, prefixes: tuple[str, ...], after_revision: int) -> bool:
    """Whether a key with one of the prefixes was put or deleted after the revision."""
    revision, forgotten = db.execute("SELECT revision, forgotten_revision FROM counters").fetchone()
    if after_revision >= revision:
        return False
    if after_revision < forgotten:
        return True
    wanted = tuple(prefix.encode() for prefix in prefixes)
    return any(
        bytes(key).startswith(wanted)
        for table, column in (("entries", "mod_revision"), ("deletions", "revision"))
        for (key,) in db.execute(f"SELECT key FROM {table} WHERE {column} > ?", (after_revision,))
    )


def _is_ours(db: sqlite3.Connection) -> bool:
    """True if the tables are there, False for an empty database."""
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id == APPLICATION_ID:
        if version == _REMOVED_VERSION:
            raise RemovedFile("removed by its last user")
        if version != FORMAT_VERSION:
            raise ForeignFile(f"store format {version}, {FORMAT_VERSION} expected: of another lmres version")
        return True
    if tables or application_id:
        raise ForeignFile("an SQLite database of another program")
    return False


def _mod_revision(db: sqlite3.Connection, key: str) -> int:
    row = db.execute("SELECT mod_revision FROM entries WHERE key = ?", (key.encode(),)).fetchone()
    return 0 if row is None else int(row[0])


def _put(db: sqlite3.Connection, put: Put, revision: int) -> None:
    db.execute(
        "INSERT INTO entries VALUES (?1, ?2, ?3, ?3) "
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value, mod_revision = excluded.mod_revision",
        (put.key.encode(), put.value, revision),
    )


def _delete(db: sqlite3.Connection, prefix: str, revision: int) -> bool:
    bounds = _bounds(prefix)
    db.execute(
        "INSERT INTO deletions (revision, key) SELECT ?, key FROM entries WHERE key >= ? AND key < ? ORDER BY key",
        (revision, *bounds),
    )
    deleted = db.execute("DELETE FROM entries WHERE key >= ? AND key < ?", bounds).rowcount
    if not deleted:
        return False
    (newest,) = db.execute("SELECT max(id) FROM deletions").fetchone()
    old = (newest - REMEMBERED_DELETIONS,)
    (forgotten,) = db.execute("SELECT max(revision) FROM deletions WHERE id <= ?", old).fetchone()
    if forgotten is not None:
        db.execute("DELETE FROM deletions WHERE id <= ?", old)
        db.execute("UPDATE counters SET forgotten_revision = ?", (forgotten,))
    return True


def _read(db: sqlite3.Connection, op: Range | Get) -> tuple[Entry, ...]:
    if isinstance(op, Get):
        rows: Iterable[tuple[bytes, str, int, int]] = db.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (op.key.encode(),)
        )
    elif op.min_mod_revision > 1:
        # The unary plus keeps the planner on the index of changes: few entries are newer, many may have the prefix.
        rows = db.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE mod_revision >= ? AND +key >= ? AND +key < ? ORDER BY +key",
            (op.min_mod_revision, *_bounds(op.prefix)),
        )
    else:
        rows = db.execute(f"SELECT {_COLUMNS} FROM entries WHERE key >= ? AND key < ? ORDER BY key", _bounds(op.prefix))
    return tuple(
        Entry(key=key.decode(), value=value, create_revision=created, mod_revision=changed)
        for key, value, created, changed in rows
    )


def _bounds(prefix: str) -> tuple[bytes, bytes]:
    """The half-open range of the keys with this prefix: the byte 0xff is in no UTF-8 text."""
    return prefix.encode(), prefix.encode() + b"\xff"
