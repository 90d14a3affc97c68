from __future__ import annotations

from lmres.gemini.limits import Room, container_room

GIB = 1 << 30


def test_the_limit_does_not_shrink_by_what_the_vault_holds() -> None:
    before = Room(available=100 * GIB, held=0, fraction=0.5)
    after = Room(available=70 * GIB, held=30 * GIB, fraction=0.5)
    assert before.limit == after.limit == 50 * GIB


def test_what_fits() -> None:
    room = Room(available=70 * GIB, held=30 * GIB, fraction=0.5)
    assert room.fits(20 * GIB)
    assert not room.fits(20 * GIB + 1)


def test_a_refusal_has_the_numbers() -> None:
    text = Room(available=10 * GIB, held=2 * GIB, fraction=0.25).refusal(4 * GIB, "rank 0: two slots")
    for part in ("rank 0", "4.00 GiB", "2.00 GiB", "3.00 GiB", "memory_limit_fraction 0.25"):
        assert part in text


def test_a_container_gives_what_its_limit_leaves() -> None:
    assert container_room(limit=None, used=5, reclaimable=0) is None
    assert container_room(limit=10 * GIB, used=4 * GIB, reclaimable=GIB) == 7 * GIB
    assert container_room(limit=GIB, used=2 * GIB, reclaimable=0) == 0
    assert container_room(limit=GIB, used=0, reclaimable=5) == GIB
