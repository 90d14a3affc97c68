"""The table of leases, with a clock that is only an argument."""

from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.state import Lease

INTERVAL, TIMEOUT = 500, 3000


def table() -> LeaseTable:
    return LeaseTable(interval_ms=INTERVAL, timeout_ms=TIMEOUT)


def beat(node: str, revision: int, *, counter: int = 1, step: int | None = None) -> tuple[str, Entry]:
    value = encode(Lease(incarnation=f"{node}.1", counter=counter, step=step))
    return node, Entry(key=node, value=value, create_revision=1, mod_revision=revision)


def torn(node: str, revision: int) -> tuple[str, Entry]:
    return node, Entry(key=node, value='{"record":"Lease","cou', create_revision=1, mod_revision=revision)


def look(leases: LeaseTable, start_ms: int, end_ms: int, *entries: tuple[str, Entry]) -> None:
    for now_ms in range(start_ms, end_ms + 1, INTERVAL):
        leases.observe(entries, now_ms)


def test_never_seen_is_neither_quiet_nor_over() -> None:
    leases = table()
    assert leases.quiet_ms("a", 10**9) == 0
    assert not leases.is_over("a", 10**9)
    assert leases.revision("a") == 0
    assert leases.heard_ms("a") is None


def test_over_exactly_at_the_timeout() -> None:
    leases = table()
    look(leases, 0, TIMEOUT, beat("a", 5))
    assert not leases.is_over("a", TIMEOUT - 1)
    assert leases.is_over("a", TIMEOUT)


def test_silent_before_over() -> None:
    leases = table()
    look(leases, 0, 2 * INTERVAL, beat("a", 5))
    assert not leases.is_silent("a", 2 * INTERVAL)
    assert leases.is_silent("a", 3 * INTERVAL)
    assert not leases.is_over("a", 3 * INTERVAL)


def test_any_new_revision_is_a_sign_of_life() -> None:
    leases = table()
    look(leases, 0, 2500, beat("a", 5, counter=7))
    leases.observe((beat("a", 6, counter=7),), 3000)  # its answer was lost, so it counted the same beat twice
    assert leases.quiet_ms("a", 3000) == 0


def test_time_in_which_nobody_could_look_does_not_count() -> None:
    leases = table()
    look(leases, 0, 1000, beat("a", 5))
    leases.observe((beat("a", 5),), 61_000)
    assert leases.quiet_ms("a", 61_000) == 1000 + INTERVAL
    assert not leases.is_over("a", 61_000)
    assert leases.attended_ms(61_000) == 1000 + INTERVAL


def test_a_small_delay_counts() -> None:
    leases = table()
    leases.observe((beat("a", 5),), 0)
    leases.observe((beat("a", 5),), INTERVAL + INTERVAL // 2)
    assert leases.quiet_ms("a", 750) == 750
    assert leases.attended_ms(750) == 750


def test_a_slow_observer_still_finds_the_dead() -> None:
    leases = table()
    for now_ms in range(0, 30_001, 5_000):
        leases.observe((beat("a", 5),), now_ms)
    assert leases.is_over("a", 30_000)


def test_heard_again_after_a_gap() -> None:
    leases = table()
    leases.observe((beat("a", 5),), 0)
    assert not leases.heard_since_gap("a"), "it may be an old beat"
    leases.observe((beat("a", 6),), 500)
    assert leases.heard_since_gap("a")
    leases.observe((beat("a", 7),), 20_000)
    assert not leases.heard_since_gap("a")
    leases.observe((beat("a", 8),), 20_500)
    assert leases.heard_since_gap("a")
    assert not leases.heard_since_gap("b")


def test_what_was_heard_is_not_put_off() -> None:
    leases = table()
    leases.observe((beat("a", 5),), 100)
    leases.observe((beat("a", 5),), 60_000)
    assert leases.heard_ms("a") == 100


def test_a_torn_lease_has_not_moved_but_can_be_compared() -> None:
    leases = table()
    look(leases, 0, 2500, beat("a", 5, counter=3))
    leases.observe((torn("a", 9),), 3000)
    assert leases.is_over("a", 3000)
    assert leases.revision("a") == 9
    assert leases.counter("a") == 3


def test_a_lease_first_seen_torn_runs_from_then() -> None:
    leases = table()
    look(leases, 0, TIMEOUT, torn("a", 9))
    assert leases.revision("a") == 9
    assert leases.is_over("a", TIMEOUT)


def test_next_expiry() -> None:
    leases = table()
    assert leases.next_expiry_ms(["a"], 0) == TIMEOUT
    leases.observe((beat("a", 5), beat("b", 6)), 0)
    leases.observe((beat("a", 5), beat("b", 7)), 500)
    assert leases.next_expiry_ms(["a", "b"], 600) == TIMEOUT - 600
    assert leases.next_expiry_ms(["b"], 600) == TIMEOUT - 100
    assert leases.next_expiry_ms(["a"], 10**6) == 0


def test_forgotten_starts_anew() -> None:
    leases = table()
    look(leases, 0, TIMEOUT, beat("a", 5, step=12))
    assert leases.step("a") == 12
    leases.forget("a")
    assert not leases.is_over("a", TIMEOUT)
    leases.observe((beat("a", 5),), TIMEOUT + 500)
    assert leases.quiet_ms("a", TIMEOUT + 500) == 0
