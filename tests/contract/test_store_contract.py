"""The contract of the store port, clause by clause, for every store that needs nothing installed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmres.errors import StoreUnavailable
from lmres.ports import (
    MAX_KEY_BYTES,
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    Compare,
    DeletePrefix,
    Entry,
    Get,
    Op,
    Put,
    Range,
    Store,
    Txn,
    TxnResult,
)
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.limits import MAX_TXN_BYTES, TxnRejected
from lmres.rendezvous.edge.stores.memory import MemoryStore
from tests.contract.store_servers import LONG_MS, run_python, running_server


@pytest.fixture(params=["memory", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "file":
        file_store = FileStore(tmp_path / "store")
        yield file_store
        file_store.close()
    else:
        with running_server(tmp_path) as server:
            tcp_store = server.client()
            yield tcp_store
            tcp_store.close()


def run(store: Store, *ops: Op, compares: tuple[Compare, ...] = (), otherwise: tuple[Op, ...] = ()) -> TxnResult:
    return store.transact(Txn(compares=compares, success=ops, failure=otherwise), timeout_ms=LONG_MS)


def put(store: Store, key: str, value: str = "v") -> int:
    return run(store, Put(key=key, value=value)).revision


def keys(store: Store, prefix: str, *, since: int = 0) -> list[str]:
    (read,) = run(store, Range(prefix=prefix, min_mod_revision=since)).reads
    return [entry.key for entry in read]


# -- revisions


def test_a_revision_is_spent_only_by_a_transaction_that_writes(store: Store) -> None:
    first = put(store, "a")
    assert run(store, Get(key="a"), Range(prefix="")).revision == first
    assert run(store, DeletePrefix(prefix="absent")).revision == first
    assert run(store).revision == first
    assert run(store, Put(key="b", value="1"), Put(key="c", value="2")).revision == first + 1
    assert run(store, Put(key="b", value="1")).revision == first + 2, "the same value is a write too"
    assert run(store, DeletePrefix(prefix="b")).revision == first + 3


def test_an_entry_knows_its_creation_and_its_last_change(store: Store) -> None:
    created = put(store, "a", "1")
    changed = put(store, "a", "2")
    (read,) = run(store, Get(key="a")).reads
    assert read == (Entry(key="a", value="2", create_revision=created, mod_revision=changed),)


def test_a_key_created_anew_after_its_deletion_is_new(store: Store) -> None:
    put(store, "a")
    run(store, DeletePrefix(prefix="a"))
    created = put(store, "a")
    ((entry,),) = run(store, Get(key="a")).reads
    assert (entry.create_revision, entry.mod_revision) == (created, created)


def test_all_writes_of_a_transaction_have_its_revision(store: Store) -> None:
    result = run(store, Put(key="a", value="1"), Put(key="b", value="2"), Range(prefix=""))
    assert {entry.mod_revision for entry in result.reads[0]} == {result.revision}


# -- compares


def test_revision_zero_means_absent(store: Store) -> None:
    absent = (Compare(key="a", mod_revision=0),)
    assert run(store, Put(key="a", value="1"), compares=absent).succeeded
    lost = run(store, Put(key="a", value="2"), compares=absent, otherwise=(Get(key="a"),))
    assert not lost.succeeded
    assert lost.reads[0][0].value == "1"
    run(store, DeletePrefix(prefix="a"))
    assert run(store, compares=absent).succeeded


def test_a_compare_needs_the_exact_last_revision(store: Store) -> None:
    old = put(store, "a")
    new = put(store, "a")
    assert not run(store, compares=(Compare(key="a", mod_revision=old),)).succeeded
    assert run(store, compares=(Compare(key="a", mod_revision=new),)).succeeded
    assert not run(store, compares=(Compare(key="a", mod_revision=new + 1),)).succeeded


def test_all_compares_must_hold(store: Store) -> None:
    revision = put(store, "a")
    good, bad = Compare(key="a", mod_revision=revision), Compare(key="b", mod_revision=revision)
    for compares in ((good, bad), (bad, good)):
        result = run(store, Put(key="yes", value=""), compares=compares, otherwise=(Put(key="no", value=""),))
        assert not result.succeeded
    assert keys(store, "") == ["a", "no"]


def test_a_failed_transaction_without_writes_spends_no_revision(store: Store) -> None:
    revision = put(store, "a")
    failed = run(store, Put(key="b", value=""), compares=(Compare(key="a", mod_revision=0),))
    assert (failed.succeeded, failed.revision, failed.reads) == (False, revision, ())
    assert keys(store, "") == ["a"]


# -- reads


def test_reads_see_the_writes_before_them_and_not_those_after(store: Store) -> None:
    put(store, "k/old")
    before, after, got, deleted = run(
        store,
        Range(prefix="k/"),
        Put(key="k/new", value="1"),
        Range(prefix="k/"),
        Get(key="k/new"),
        DeletePrefix(prefix="k/old"),
        Range(prefix="k/"),
    ).reads
    assert [entry.key for entry in before] == ["k/old"]
    assert [entry.key for entry in after] == ["k/new", "k/old"]
    assert [entry.value for entry in got] == ["1"]
    assert [entry.key for entry in deleted] == ["k/new"]


def test_reads_come_in_the_order_of_their_operations(store: Store) -> None:
    put(store, "a", "1")
    result = run(store, Get(key="none"), Get(key="a"), Range(prefix="none"))
    assert [len(read) for read in result.reads] == [0, 1, 0]


def test_range_is_by_prefix_in_key_order(store: Store) -> None:
    for key in ("b/2", "b", "a", "b/10", "b0", "c", "b/ü", "b/\U0001f600", "b/z"):
        put(store, key)
    assert keys(store, "b/") == ["b/10", "b/2", "b/z", "b/ü", "b/\U0001f600"]
    assert keys(store, "") == sorted(keys(store, ""))
    assert len(keys(store, "")) == 9


def test_prefixes_are_text_not_patterns(store: Store) -> None:
    for key in ("a%b", "axb", "a_b", "a*b", "A%b"):
        put(store, key)
    assert keys(store, "a%") == ["a%b"]
    assert keys(store, "a_") == ["a_b"]
    assert keys(store, "a*") == ["a*b"]


def test_range_since_a_revision_gives_what_changed_then_or_later(store: Store) -> None:
    put(store, "k/1")
    second = put(store, "k/2")
    put(store, "k/3")
    put(store, "other")
    latest = put(store, "k/1")
    assert keys(store, "k/", since=second) == ["k/1", "k/2", "k/3"]
    assert keys(store, "k/", since=second + 1) == ["k/1", "k/3"]
    assert keys(store, "k/", since=latest) == ["k/1"]
    assert keys(store, "k/", since=latest + 1) == []


def test_delete_prefix_takes_only_what_has_the_prefix(store: Store) -> None:
    for key in ("run/1/a", "run/1/b", "run/10", "run", "other"):
        put(store, key)
    run(store, DeletePrefix(prefix="run/1/"))
    assert keys(store, "") == ["other", "run", "run/10"]
    run(store, DeletePrefix(prefix=""))
    assert keys(store, "") == []


@pytest.mark.parametrize("value", ["", "\x00", 'quote " and \\', "line\nend\r", "ü\U0001f600\u2028", "x" * 100_000])
def test_any_text_is_kept_as_it_is(store: Store, value: str) -> None:
    put(store, "key\n\x01ü", value)
    ((entry,),) = run(store, Get(key="key\n\x01ü")).reads
    assert entry.value == value


# -- limits


def test_the_limits_are_allowed(store: Store) -> None:
    key = "ü" * (MAX_KEY_BYTES // 2)
    put(store, key, "x" * MAX_VALUE_BYTES)
    ((entry,),) = run(store, Get(key=key)).reads
    assert len(entry.value) == MAX_VALUE_BYTES
    many = tuple(Put(key=f"m/{index:03}", value="") for index in range(MAX_TXN_OPS))
    compares = tuple(Compare(key=op.key, mod_revision=0) for op in many)
    assert run(store, *many, compares=compares, otherwise=many).succeeded
    assert len(keys(store, "m/")) == MAX_TXN_OPS


_TOO_MANY = tuple(Get(key="k") for _ in range(MAX_TXN_OPS + 1))
_A, _B = Put(key="a", value="1"), Put(key="a", value="2")


@pytest.mark.parametrize(
    ("txn", "words"),
    [
        (Txn(success=(Put(key="ü" * 513, value=""),)), "1026 bytes"),
        (Txn(success=(Put(key="", value=""),)), "empty key"),
        (Txn(success=(Put(key="k", value="ü" * (MAX_VALUE_BYTES // 2 + 1)),)), "1048578 bytes"),
        (Txn(success=(Put(key="k", value="\ud800"),)), "not UTF-8"),
        (Txn(success=_TOO_MANY), "129 entries in success"),
        (Txn(failure=_TOO_MANY), "129 entries in failure"),
        (Txn(compares=(Compare(key="k", mod_revision=0),) * 129), "129 entries in compares"),
        (Txn(compares=(Compare(key="k", mod_revision=-1),)), "revision -1"),
        (Txn(success=(_A, _B)), "put twice"),
        (Txn(compares=(Compare(key="k", mod_revision=0),), failure=(_A, Get(key="a"), _B)), "put twice"),
        (Txn(success=(_A, DeletePrefix(prefix=""))), "also deleted"),
        (Txn(success=(DeletePrefix(prefix="a"), _A)), "also deleted"),
        (
            Txn(success=tuple(Put(key=f"{i}", value="x" * MAX_VALUE_BYTES) for i in range(17))),
            f"at most {MAX_TXN_BYTES}",
        ),
    ],
)
def test_a_transaction_over_a_limit_is_rejected_without_effect(store: Store, txn: Txn, words: str) -> None:
    revision = put(store, "z")
    with pytest.raises(TxnRejected, match=words):
        store.transact(txn, timeout_ms=LONG_MS)
    assert run(store).revision == revision
    assert keys(store, "") == ["z"]


def test_the_same_key_may_be_put_in_both_branches(store: Store) -> None:
    assert run(store, _A, otherwise=(_B,)).succeeded


# -- waiting


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_wait_ends_at_once_if_the_change_is_there_already(store: Store) -> None:
    before = put(store, "z")
    put(store, "a/1")
    assert store.wait(("a/",), after_revision=before, timeout_ms=LONG_MS)
    assert store.wait(("",), after_revision=before, timeout_ms=LONG_MS)


@pytest.mark.parametrize("op", [Put(key="b/2", value=""), Put(key="b/1", value=""), DeletePrefix(prefix="b/")])
def test_wait_wakes_on_a_change_of_any_of_its_prefixes(store: Store, op: Op) -> None:
    revision = put(store, "b/1")
    other = store.clone()
    timer = later(0.1, lambda: run(other, op))
    try:
        started = time.monotonic()
        assert store.wait(("a/", "b/"), after_revision=revision, timeout_ms=LONG_MS)
        assert time.monotonic() - started < LONG_MS / 2000
    finally:
        timer.join()
        other.close()


def test_wait_times_out_when_only_other_keys_change(store: Store) -> None:
    put(store, "a/1")
    revision = put(store, "b/1")
    other = store.clone()
    timer = later(0.1, lambda: put(other, "c"))
    try:
        started = time.monotonic()
        assert not store.wait(("a/", "b/"), after_revision=revision, timeout_ms=2_000)
        assert 1.5 < time.monotonic() - started < 10
    finally:
        timer.join()
        other.close()


def test_wait_sees_a_deletion_that_came_before_it(store: Store) -> None:
    revision = put(store, "a/1")
    run(store, DeletePrefix(prefix="a/"))
    put(store, "z")
    assert store.wait(("a/",), after_revision=revision, timeout_ms=LONG_MS)
    assert not store.wait(("b/",), after_revision=revision, timeout_ms=500)


def test_wait_sees_deletions_that_are_no_longer_remembered(store: Store) -> None:
    revision = put(store, "a/1")
    for chunk in range(10):
        run(store, *(Put(key=f"b/{chunk}/{index}", value="") for index in range(MAX_TXN_OPS)))
    run(store, DeletePrefix(prefix="a/"))
    run(store, DeletePrefix(prefix="b/"))
    assert store.wait(("a/",), after_revision=revision, timeout_ms=LONG_MS)
    assert not store.wait(("",), after_revision=run(store).revision, timeout_ms=500)


def test_wait_without_a_prefix_is_rejected(store: Store) -> None:
    with pytest.raises(TxnRejected, match="0 prefixes"):
        store.wait((), after_revision=0, timeout_ms=LONG_MS)


def test_a_connection_is_usable_after_a_wait_timed_out(store: Store) -> None:
    revision = put(store, "a")
    assert not store.wait(("a",), after_revision=revision, timeout_ms=500)
    assert keys(store, "") == ["a"]


# -- connections


def test_clones_see_one_store(store: Store) -> None:
    other = store.clone()
    put(store, "a", "1")
    assert keys(other, "") == ["a"]
    other.close()
    assert keys(store, "") == ["a"], "closing a clone leaves the other open"


def test_a_closed_connection_is_unavailable(store: Store) -> None:
    put(store, "a")
    clone = store.clone()
    clone.close()
    clone.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        run(clone, Get(key="a"))
    with pytest.raises(StoreUnavailable, match="closed"):
        clone.wait(("a",), after_revision=0, timeout_ms=LONG_MS)


def test_close_ends_a_wait_of_another_thread(store: Store) -> None:
    revision = put(store, "a")
    waiting = store.clone()
    timer = later(0.2, waiting.close)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="closed"):
        waiting.wait(("a",), after_revision=revision, timeout_ms=LONG_MS)
    assert time.monotonic() - started < LONG_MS / 2000
    timer.join()


def test_of_eight_threads_exactly_one_wins_each_round(store: Store) -> None:
    threads, rounds = 8, 20
    wins: list[list[int]] = [[] for _ in range(rounds)]
    barrier = threading.Barrier(threads, timeout=LONG_MS / 1000)
    failures: list[BaseException] = []

    def compete(me: int) -> None:
        mine = store.clone()
        try:
            for turn in range(rounds):
                barrier.wait()
                absent = (Compare(key=f"plan/{turn:02}", mod_revision=0),)
                if run(mine, Put(key=f"plan/{turn:02}", value=str(me)), compares=absent).succeeded:
                    wins[turn].append(me)
        except BaseException as error:
            failures.append(error)
            barrier.abort()
        finally:
            mine.close()

    workers = [threading.Thread(target=compete, args=(me,)) for me in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert [len(winners) for winners in wins] == [1] * rounds
    (read,) = run(store, Range(prefix="plan/")).reads
    assert [int(entry.value) for entry in read] == [winners[0] for winners in wins]


_COUNT = """
import sys
from pathlib import Path
from lmres.ports import Compare, Get, Put, Txn
kind, where, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "file":
    from lmres.rendezvous.edge.stores.file import FileStore
    store = FileStore(Path(where))
else:
    from lmres.rendezvous.edge.stores.tcp import TcpStore
    store = TcpStore(("127.0.0.1", int(where)), client_id=sys.argv[4])
done = 0
while done < count:
    ((entry,),) = store.transact(Txn(success=(Get(key="n"),)), timeout_ms=20000).reads
    put = Put(key="n", value=str(int(entry.value) + 1))
    txn = Txn(compares=(Compare(key="n", mod_revision=entry.mod_revision),), success=(put,))
    done += store.transact(txn, timeout_ms=20000).succeeded
print(done)
"""


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_two_processes_count_without_a_lost_update(kind: str, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        where = str(tmp_path / "store") if kind == "file" else str(server.port)
        store: Store = FileStore(tmp_path / "store") if kind == "file" else server.client("test")
        put(store, "n", "0")
        children = [run_python(_COUNT, kind, where, "200", f"child-{index}") for index in range(2)]
        try:
            assert [child.communicate(timeout=60)[0].strip() for child in children] == ["200", "200"]
        finally:
            for child in children:
                child.kill()
                child.wait()
        ((entry,),) = run(store, Get(key="n")).reads
        assert entry.value == "400"
        store.close()
