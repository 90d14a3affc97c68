"""A store in a file, for the processes of one host: no server, nothing to start.

The file is an SQLite database. A journal of our own would need framing, checksums, recovery of a torn tail,
compaction and a lock that survives SIGKILL; SQLite has all of it, proven. It is used so:

1. Write-ahead log: a process killed at any moment leaves a whole database, and its locks die with it. A process
   that is stopped while it writes blocks writers, never readers; those writers get StoreUnavailable in time.
2. Lock waits are ours, not SQLite's: short sleeps that end by the deadline or when the connection is closed.
3. ``PRAGMA data_version`` moves when another connection has committed. Asking costs microseconds, so waiting is
   asking every few milliseconds; only then are keys looked at.
4. Files are removed only by the last connection (``delete``), and marked before. SQLite names its log after the
   database: if one is removed under a user and created anew, two databases share one log. Who opened the file just
   before it was removed sees the mark and opens again. A file replaced by hand all the same is StoreLost.
5. Nothing is read from a file that is not ours (``application_id``, ``user_version``), and it is not changed.

The semantics are those of ``engine``, and the same suite tests both. Sources: sqlite.org, "Write-Ahead Logging",
"How To Corrupt An SQLite Database File".
"""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lmres.errors import ConfigError, StoreLost, StoreProtocolError, StoreUnavailable
from lmres.ports import DeletePrefix, Put, Txn, TxnResult
from lmres.rendezvous.edge.stores import tables
from lmres.rendezvous.edge.stores.limits import check_txn, check_wait
from lmres.rendezvous.edge.stores.sockets import Deadline

_POLL_S = 0.02
_LOCK_RETRY_S = 0.001
_SMALLEST_DATABASE = 512
_REMOVED = "removed while it was opened"
_T = TypeVar("_T")


class FileStore:
    """A connection to the store in the file ``path``, which is created if it does not exist.

    Raises ConfigError if there can be no such file. The file itself is opened by the first call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        _check_path(self._path)
        self._db: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()  # around each attempt: close() must not pull the connection from under it

    def transact(self, txn: Txn, *, timeout_ms: int) -> TxnResult:
        """See ``lmres.ports.Store``. Raises also TxnRejected (a limit is broken) and StoreLost (rule 4)."""
        check_txn(txn)
        writes = any(isinstance(op, Put | DeletePrefix) for op in (*txn.success, *txn.failure))

        def attempt(db: sqlite3.Connection) -> TxnResult:
            # Taking the write lock at once avoids a snapshot that is too old to write on.
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            result = tables.apply(db, txn)
            db.execute("COMMIT")
            return result

        return self._until(Deadline(timeout_ms), attempt)

    def wait(self, prefixes: tuple[str, ...], *, after_revision: int, timeout_ms: int) -> bool:
        """See ``lmres.ports.Store``."""
        check_wait(prefixes)
        deadline = Deadline(timeout_ms)

        def changed(db: sqlite3.Connection) -> tuple[int, bool]:
            version = _data_version(db)  # first: a commit after it is seen by the next poll
            return version, tables.changed_since(db, prefixes, after_revision)

        version, found = self._until(deadline, changed)
        while not found:
            left_s = deadline.left_s()
            if left_s <= 0:
                return False
            self._closed.wait(min(_POLL_S, left_s))
            if self._until(deadline, _data_version) != version:
                version, found = self._until(deadline, changed)
        return True

    def clone(self) -> FileStore:
        """See ``lmres.ports.Store``."""
        return FileStore(self._path)

    def close(self) -> None:
        """See ``lmres.ports.Store``."""
        self._closed.set()
        with self._lock:
            self._disconnect()

    def delete(self, *, timeout_ms: int = 500) -> bool:
        """Closes, and removes all files of the store unless another connection, of any process, still uses it.

        Returns whether the files are gone. Every user calls it at its end; the last one succeeds.
        """
        self.close()
        deadline = Deadline(timeout_ms)
        while True:
            with self._lock:
                try:
                    if self._path_is_gone() or self._remove():
                        return True
                except sqlite3.Error as error:
                    if not _is_locked(error):
                        return False  # not a store of ours: not ours to remove
                finally:
                    self._disconnect()
            left_s = deadline.left_s()
            if left_s <= 0:
                return False
            # Two that remove at once are in each other's way: by chance one comes alone.
            time.sleep(min(left_s, random.uniform(0.001, 0.03)))

    def _until(self, deadline: Deadline, attempt: Callable[[sqlite3.Connection], _T]) -> _T:
        """Tries until the locks allow it, the deadline passes or the connection is closed."""
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise StoreUnavailable(f"store file {self._path}: this connection is closed")
                try:
                    return attempt(self._connected())
                except sqlite3.Error as error:
                    self._roll_back()
                    if not _is_locked(error):
                        self._disconnect()
                        raise self._translated(error) from error
                except BaseException:
                    self._roll_back()
                    raise
            left_s = deadline.must_left_s(
                f"store file {self._path}: locked by another process (stopped while writing?), no access"
            )
            self._closed.wait(min(_LOCK_RETRY_S, left_s))

    def _connected(self) -> sqlite3.Connection:
        if self._db is None:
            db, inode = self._opened()
            self._db = db
            self._inode = self._inode or inode
        if _inode(self._path) != self._inode:
            raise StoreLost(
                f"store file {self._path} was removed or replaced during the run: the run's records are gone; "
                "start the run again, and leave the file alone while it runs"
            )
        return self._db

    def _opened(self) -> tuple[sqlite3.Connection, tuple[int, int]]:
        before = _inode(self._path)
        if before is not None and 0 < _size(self._path) < _SMALLEST_DATABASE:
            raise tables.ForeignFile("too small for a database")  # SQLite would take it for an empty one
        # isolation_level None: transactions are begun and ended here, not by the sqlite3 module.
        db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            if before is None:
                self._path.chmod(0o600)
            tables.prepare(db)
            # From its first read on an open database holds a shared lock: the file found now is ours and stays.
            inode = _inode(self._path)
            if inode is None or before not in (None, inode):
                raise tables.RemovedFile(_REMOVED)
        except tables.RemovedFile:
            # Still there, though marked: whoever removed it was killed in between.
            self._unlink_marked(db, before)
            db.close()
            raise
        except FileNotFoundError as error:
            db.close()
            raise tables.RemovedFile(_REMOVED) from error
        except BaseException:
            db.close()
            raise
        return db, inode

    def _remove(self) -> bool:
        if self._db is None:
            self._db, _ = self._opened()
        inode = _inode(self._path)
        # Succeeds only if no other connection is open: the log is merged and removed.
        (mode,) = self._db.execute("PRAGMA journal_mode=DELETE").fetchone()
        if mode != "delete":
            return False
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # from the next lock until the connection closes
        tables.mark_removed(self._db)
        self._unlink_marked(self._db, inode)
        return True

    def _unlink_marked(self, db: sqlite3.Connection, inode: tuple[int, int] | None) -> None:
        """Unlinks the file if it is still this one. The lock of the marked file makes it one process's at a time."""
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error:
            return  # another process is at it
        if inode is not None and _inode(self._path) == inode and tables.is_marked_removed(db):
            self._path.unlink()

    def _path_is_gone(self) -> bool:
        inode = _inode(self._path)
        return inode is None or self._inode not in (None, inode)

    def _roll_back(self) -> None:
        if self._db is not None and self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.Error:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _translated(self, error: sqlite3.Error) -> StoreUnavailable | StoreProtocolError:
        text = str(error)
        if isinstance(error, tables.ForeignFile) or "not a database" in text or "malformed" in text:
            return StoreProtocolError(
                f"{self._path} is not a store file of lmres, or is damaged ({text}): check the rendezvous "
                "endpoint; remove the file if no run uses it"
            )
        return StoreUnavailable(f"store file {self._path}: {text}; check the disk and the folder's permissions")


def _data_version(db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA data_version").fetchone()
    return int(version)


def _is_locked(error: sqlite3.Error) -> bool:
    """Whether another try may succeed."""
    # By text: the error codes are in the sqlite3 module only since Python 3.11.
    if isinstance(error, tables.RemovedFile):
        return True
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "locking protocol" in str(error))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - asked at every poll, and a third the time of Path.stat
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _check_path(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"store file {path}: folder {folder} does not exist; create it or choose another path")
    try:
        found = path.lstat()
        mode = found.st_mode
        if stat.S_ISLNK(mode) or found.st_uid != os.geteuid():
            what = "a symbolic link" if stat.S_ISLNK(mode) else f"owned by user {found.st_uid}"
            raise ConfigError(f"store file {path} is {what}; give the path of a file of your own")
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
            path.chmod(0o600)  # it holds what agents obey
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise ConfigError(f"store file {path}: {error.strerror}; choose another path") from error
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConfigError(f"store file {path} is {kind}, a file or a free name expected; choose another path")
    # SQLite keeps its log next to the database, so the folder must be writable as well.
    for place in (folder, path) if mode is not None else (folder,):
        if not os.access(place, os.W_OK):
            raise ConfigError(f"store file {path}: {place} is not writable for this user; choose another path")
