"""The file store alone: killed and stopped processes, files that are not ours, and what is left behind."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lmres.errors import ConfigError, StoreLost, StoreProtocolError, StoreUnavailable
from lmres.ports import Compare, Get, Put, Range, Txn
from lmres.rendezvous.edge.stores import tables
from lmres.rendezvous.edge.stores.file import FileStore
from tests.contract.store_servers import LONG_MS, run_python

READ_ALL = Txn(success=(Range(prefix=""),))


def put(store: FileStore, key: str, value: str = "v") -> int:
    return store.transact(Txn(success=(Put(key=key, value=value),)), timeout_ms=LONG_MS).revision


# -- killed at any moment

_WRITER = """
import sys
from pathlib import Path
from lmres.ports import Put, Txn
from lmres.rendezvous.edge.stores import tables
from lmres.rendezvous.edge.stores.file import FileStore
store = FileStore(Path(sys.argv[1]))
turn = 0
while True:
    turn += 1
    value = f"{sys.argv[2]}/{turn}/" + "x" * (turn % 50 * 1000)
    puts = tuple(Put(key=f"k/{index}", value=value) for index in range(5))
    store.transact(Txn(success=puts), timeout_ms=20000)
    print(turn, flush=True)
"""


def test_a_killed_writer_never_leaves_a_torn_transaction(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    chance = random.Random(7)
    revision = 0
    for turn in range(50):
        writer = run_python(_WRITER, str(path), str(turn))
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "1\n"
            time.sleep(chance.uniform(0, 0.03))
            os.kill(writer.pid, signal.SIGKILL)
            told = [1] + [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        result = store.transact(READ_ALL, timeout_ms=LONG_MS)
        (entries,) = result.reads
        assert len({(entry.value, entry.mod_revision) for entry in entries}) == 1, "a transaction is whole"
        writer_turn, count, _ = entries[0].value.split("/")
        assert int(writer_turn) == turn
        assert int(count) in (told[-1], told[-1] + 1), "what was answered has happened"
        assert result.revision == revision + int(count)
        revision = result.revision
    assert store.delete()
    assert list(tmp_path.iterdir()) == []


def test_killed_while_creating_the_file(tmp_path: Path) -> None:
    chance = random.Random(11)
    for turn in range(10):
        path = tmp_path / f"store-{turn}"
        writer = run_python(_WRITER, str(path), "0")
        end = time.monotonic() + 20
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.003))
        writer.kill()
        writer.communicate(timeout=20)
        store = FileStore(path)
        before = store.transact(READ_ALL, timeout_ms=LONG_MS).revision
        assert put(store, "after") == before + 1
        store.close()


# -- a stopped process

_STOPPED_HOLDER = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
db.execute("ROLLBACK")
print("released", flush=True)
"""


def stopped_holder(path: Path) -> subprocess.Popen[str]:
    holder = run_python(_STOPPED_HOLDER, str(path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    _, status = os.waitpid(holder.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return holder


def test_a_stopped_lock_holder_costs_writers_their_timeout_and_readers_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    revision = put(store, "a")
    holder = stopped_holder(tmp_path / "store")
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="locked by another process"):
            store.transact(Txn(success=(Put(key="b", value=""),)), timeout_ms=300)
        assert 0.25 < time.monotonic() - started < 5
        assert store.transact(READ_ALL, timeout_ms=LONG_MS).revision == revision
        fresh = store.clone()
        assert fresh.transact(READ_ALL, timeout_ms=LONG_MS).revision == revision
        assert not fresh.wait(("a",), after_revision=revision, timeout_ms=200)
        fresh.close()
        os.kill(holder.pid, signal.SIGCONT)
        assert put(store, "b") == revision + 1
    finally:
        holder.kill()
        holder.communicate(timeout=20)
    store.close()


def test_close_ends_a_call_that_waits_for_the_lock(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    put(store, "a")
    holder = stopped_holder(tmp_path / "store")
    timer = threading.Timer(0.2, store.close)
    timer.start()
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="closed"):
            put(store, "b")
        assert time.monotonic() - started < LONG_MS / 2000
    finally:
        timer.join()
        holder.kill()
        holder.communicate(timeout=20)


# -- places where no store can be


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none does not exist; create it"):
        FileStore(tmp_path / "none" / "store")


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        FileStore(tmp_path)


def test_a_pipe_in_place_of_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store")
    with pytest.raises(ConfigError, match="not a regular file"):
        FileStore(tmp_path / "store")


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="not writable"):
        FileStore(tmp_path / "store")


@pytest.mark.parametrize("content", [b"hello, world\n" * 200, b"x", b"y" * 511, b"z" * 512, b"\x00" * 8192])
def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store"
    path.write_bytes(content)
    store = FileStore(path)
    with pytest.raises(StoreProtocolError, match="not a store file of lmres"):
        put(store, "a")
    assert not store.delete()
    assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    content = path.read_bytes()
    store = FileStore(path)
    with pytest.raises(StoreProtocolError, match="of another program"):
        put(store, "a")
    assert not store.delete()
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    put(store, "a")
    store.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=2")
    db.close()
    with pytest.raises(StoreProtocolError, match="store format 2, 1 expected"):
        put(FileStore(path), "a")


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    for index in range(200):
        put(store, f"k/{index}", "x" * 1000)
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreProtocolError, match="damaged"):
        FileStore(path).transact(READ_ALL, timeout_ms=LONG_MS)


# -- removal


def test_the_last_user_removes_all_files(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "store")
    put(first, "a")
    second = first.clone()
    put(second, "b")
    assert not first.delete(timeout_ms=50), "the other one still uses it"
    assert second.transact(READ_ALL, timeout_ms=LONG_MS).reads[0][0].key == "a"
    assert second.delete()
    assert list(tmp_path.iterdir()) == []
    assert second.delete(), "gone is gone"


def test_of_users_that_end_together_one_removes_the_files(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path / "store") for _ in range(4)]
    for store in stores:
        put(store, "a")
    threads = [threading.Thread(target=store.delete, kwargs={"timeout_ms": LONG_MS}) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_may_follow_a_removed_one(tmp_path: Path) -> None:
    old = FileStore(tmp_path / "store")
    put(old, "old")
    assert old.delete()
    new = FileStore(tmp_path / "store")
    absent = Txn(compares=(Compare(key="old", mod_revision=0),), success=(Get(key="old"),))
    assert new.transact(absent, timeout_ms=LONG_MS).succeeded
    assert new.delete()


def test_runs_that_end_and_begin_at_one_path_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "store"
    failures: list[BaseException] = []

    def user(me: int) -> None:
        try:
            for turn in range(30):
                store = FileStore(path)
                key = f"{me}/{turn}"
                absent = Compare(key=key, mod_revision=0)
                write = Txn(compares=(absent,), success=(Put(key=key, value=key),))
                assert store.transact(write, timeout_ms=LONG_MS).succeeded
                ((entry,),) = store.transact(Txn(success=(Get(key=key),)), timeout_ms=LONG_MS).reads
                assert entry.value == key
                store.delete(timeout_ms=1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=user, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    FileStore(path).delete()
    assert list(tmp_path.iterdir()) == []


def test_killed_in_the_middle_of_a_removal(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    put(store, "old")
    store.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=DELETE")
    tables.mark_removed(db)
    db.close()
    fresh = FileStore(path)
    assert fresh.transact(READ_ALL, timeout_ms=LONG_MS).revision == 0
    assert put(fresh, "new") == 1
    assert fresh.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_file_removed_by_hand_is_a_lost_store_not_an_empty_one(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    put(store, "a")
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(StoreLost, match="removed or replaced"):
        store.transact(READ_ALL, timeout_ms=LONG_MS)
    newer = FileStore(tmp_path / "store")
    put(newer, "b")
    with pytest.raises(StoreLost, match="removed or replaced"):
        store.wait(("a",), after_revision=0, timeout_ms=LONG_MS)
    store.close()
    newer.close()


def test_the_file_is_private(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    put(store, "a")
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}
    assert store.delete()
