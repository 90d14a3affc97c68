"""The engine, and the SQL tables of a store file, against a model that is too simple to be wrong."""

from __future__ import annotations

import sqlite3

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmres.ports import Compare, DeletePrefix, Entry, Get, Op, Put, Range, Txn, TxnResult
from lmres.rendezvous.edge.stores import tables
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.edge.stores.limits import TxnRejected, check_txn

KEYS = ("a", "a/b", "a/b/c", "a/ü", "b", "b/\U0001f600")
PREFIXES = ("", "a", "a/", "a/b", "b/", "c")

ops = st.one_of(
    st.builds(Put, key=st.sampled_from(KEYS), value=st.text(max_size=3)),
    st.builds(DeletePrefix, prefix=st.sampled_from(PREFIXES)),
    st.builds(Range, prefix=st.sampled_from(PREFIXES), min_mod_revision=st.integers(0, 30)),
    st.builds(Get, key=st.sampled_from(KEYS)),
)
branches = st.lists(ops, max_size=5).map(tuple)


class Model:
    """The port's text, word by word: whole copies, linear searches."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.changes: list[tuple[int, str]] = []

    def apply(self, txn: Txn) -> TxnResult:
        held = all(self.mod_revision(compare.key) == compare.mod_revision for compare in txn.compares)
        revision = self.revision + 1
        reads = []
        for op in txn.success if held else txn.failure:
            if isinstance(op, Put):
                old = self.entries.get(op.key)
                created = old.create_revision if old else revision
                self.entries[op.key] = Entry(key=op.key, value=op.value, create_revision=created, mod_revision=revision)
                self.changes.append((revision, op.key))
            elif isinstance(op, DeletePrefix):
                for key in [key for key in self.entries if key.startswith(op.prefix)]:
                    del self.entries[key]
                    self.changes.append((revision, key))
            else:
                reads.append(self.read(op))
        if self.changes and self.changes[-1][0] == revision:
            self.revision = revision
        return TxnResult(succeeded=held, revision=self.revision, reads=tuple(reads))

    def read(self, op: Range | Get) -> tuple[Entry, ...]:
        found = sorted(self.entries.values(), key=lambda entry: entry.key)
        if isinstance(op, Get):
            return tuple(entry for entry in found if entry.key == op.key)
        return tuple(
            entry for entry in found if entry.key.startswith(op.prefix) and entry.mod_revision >= op.min_mod_revision
        )

    def mod_revision(self, key: str) -> int:
        return self.entries[key].mod_revision if key in self.entries else 0


class StoresAgree(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.engine = Engine()
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        tables.prepare(self.db)

    def teardown(self) -> None:
        self.db.close()

    def run(self, txn: Txn) -> None:
        try:
            check_txn(txn)
        except TxnRejected:
            before = self.engine.revision
            try:
                self.engine.apply(txn)
            except TxnRejected:
                assert self.engine.revision == before
            else:
                raise AssertionError("the engine took a transaction that breaks a limit") from None
            return
        expected = self.model.apply(txn)
        assert self.engine.apply(txn) == expected
        assert tables.apply(self.db, txn) == expected

    @rule(success=branches)
    def without_compares(self, success: tuple[Op, ...]) -> None:
        self.run(Txn(success=success))

    @rule(
        data=st.data(),
        compared=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        success=branches,
        failure=branches,
    )
    def with_compares(
        self, data: st.DataObject, compared: list[str], success: tuple[Op, ...], failure: tuple[Op, ...]
    ) -> None:
        compares = tuple(
            Compare(key=key, mod_revision=data.draw(st.sampled_from((self.model.mod_revision(key), 0, 1))))
            for key in compared
        )
        self.run(Txn(compares=compares, success=success, failure=failure))

    @precondition(lambda self: self.model.revision > 0)
    @rule(data=st.data(), prefixes=st.lists(st.sampled_from(PREFIXES), min_size=1, max_size=3).map(tuple))
    def ask_for_changes(self, data: st.DataObject, prefixes: tuple[str, ...]) -> None:
        after = data.draw(st.integers(0, self.model.revision + 1))
        expected = any(revision > after and key.startswith(prefixes) for revision, key in self.model.changes)
        assert self.engine.changed_since(prefixes, after) == expected
        assert tables.changed_since(self.db, prefixes, after) == expected

    @invariant()
    def contents_are_equal(self) -> None:
        everything = Txn(success=(Range(prefix=""),))
        expected = TxnResult(succeeded=True, revision=self.model.revision, reads=(self.model.read(Range(prefix="")),))
        assert self.engine.apply(everything) == expected
        assert tables.apply(self.db, everything) == expected


TestStoresAgree = StoresAgree.TestCase
TestStoresAgree.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_store_that_is_full_takes_deletions_and_smaller_values() -> None:
    engine = Engine(max_bytes=100)
    engine.apply(Txn(success=(Put(key="a", value="x" * 90),)))
    try:
        engine.apply(Txn(success=(Put(key="b", value="x" * 20),)))
        raise AssertionError("the store took more than it may hold")
    except TxnRejected as error:
        assert "at most 100" in str(error)
    assert engine.revision == 1
    engine.apply(Txn(success=(Put(key="a", value="x" * 10),)))
    engine.apply(Txn(success=(Put(key="b", value="x" * 20),)))
    engine.apply(Txn(success=(DeletePrefix(prefix=""),)))
    engine.apply(Txn(success=(Put(key="c", value="x" * 99),)))
