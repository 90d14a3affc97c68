"""What the running program imports reaches the standbys, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from lmres.errors import StoreUnavailable
from lmres.ports import Get, Put, Txn
from lmres.rendezvous.edge.shared_imports import FIRST_MS, SELDOM_MS, SharedImports
from lmres.rendezvous.edge.stores.memory import MemoryStore
from lmres.rendezvous.rounds import Outcome
from tests.unit.rendezvous.test_codec import PLAN

KEY = "/lmres/r/imports"
NAMES = ("torch", "torch.optim", "xml.dom")


class Pool:
    def __init__(self, learned: tuple[str, ...] = ()) -> None:
        self.learned = learned
        self.refills: list[bool] = []

    def learn(self, modules: Iterable[str], *, from_elsewhere: bool = False) -> bool:
        assert from_elsewhere
        new = tuple(modules)
        changed, self.learned = new != self.learned, new
        return changed

    def refill(self, *, paced: bool = True) -> None:
        self.refills.append(paced)


class Agent:
    """``slot`` None: a standby."""

    def __init__(self, store: MemoryStore, slot: int | None, learned: tuple[str, ...] = ()) -> None:
        self.store = store.clone()
        self.asked: list[Txn] = []
        self.answers = True
        self.pool = Pool(learned)
        self.shared = SharedImports(warm=self.pool, store=self, key=lambda: KEY)  # type: ignore[arg-type]
        self.outcome = Outcome(
            standing="standby" if slot is None else "active",
            waiting_for="",
            next_ms=100,
            plan=PLAN,
            slot=slot,
        )

    def transact(self, txn: Txn, *, timeout_ms: int) -> Any:
        self.asked.append(txn)
        if not self.answers:
            raise StoreUnavailable("no answer")
        return self.store.transact(txn, timeout_ms=timeout_ms)

    def follow(self, *times_ms: int) -> int:
        """How often the store was asked."""
        before = len(self.asked)
        for time_ms in times_ms:
            self.shared.follow(self.outcome, time_ms)
        return len(self.asked) - before


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_a_standby_learns_what_slot_0_tells(store: MemoryStore) -> None:
    first, standby = Agent(store, 0, NAMES), Agent(store, None)
    assert standby.follow(0) == 1 and standby.pool.learned == ()
    assert first.follow(1, 2, 3) == 1, "once"
    standby.follow(10 * FIRST_MS)
    assert standby.pool.learned == NAMES and standby.pool.refills == [False]
    first.pool.learned = (*NAMES, "sqlite3")
    assert first.follow(4) == 1
    standby.follow(10 * FIRST_MS + SELDOM_MS)
    assert standby.pool.learned[-1] == "sqlite3"


def test_other_slots_say_nothing(store: MemoryStore) -> None:
    assert Agent(store, 1, NAMES).follow(0, 10 * SELDOM_MS) == 0


def test_what_may_not_have_arrived_is_told_again(store: MemoryStore) -> None:
    first = Agent(store, 0, NAMES)
    first.answers = False
    assert first.follow(0, 1, FIRST_MS - 1) == 1
    first.answers = True
    assert first.follow(FIRST_MS, 2 * FIRST_MS) == 1


def test_a_standby_asks_less_and_less(store: MemoryStore) -> None:
    standby = Agent(store, None)
    every_100_ms = range(0, 10 * SELDOM_MS, 100)
    assert standby.follow(*every_100_ms) < 20


@pytest.mark.parametrize("text", ["", "not packed", "eJwDAAAAAAE=", "\u00e4"])
def test_a_broken_record_teaches_nothing(store: MemoryStore, text: str) -> None:
    store.transact(Txn(success=(Put(key=KEY, value=text),)), timeout_ms=100)
    standby = Agent(store, None)
    assert standby.follow(0) == 1
    assert standby.pool.learned == () and standby.pool.refills == []


def test_too_many_are_not_told(store: MemoryStore) -> None:
    first = Agent(store, 0, tuple(f"m{hash((n, 1)):x}".replace("-", "_") for n in range(8000)))
    first.follow(0, 1)
    assert store.transact(Txn(success=(Get(key=KEY),)), timeout_ms=100).reads == ((),)
