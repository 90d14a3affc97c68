"""States of the generators and of living iterators as bytes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmres.adapters.resume.patches.loaders import REAL_DELIVERIES, Loaders
from lmres.adapters.resume.rng import get_rng, kept_rng, pack, set_rng, unpack


def draws() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_packed_and_unpacked_is_the_same_state() -> None:
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.randn()
    packed = pack(get_rng(torch))
    first = draws()
    set_rng(torch, unpack(torch, packed))
    assert draws() == first
    set_rng(torch, unpack(torch, packed))
    assert pack(get_rng(torch)) == packed


def test_torn_states_are_refused() -> None:
    with pytest.raises(ValueError, match="torn"):
        unpack(torch, pack(get_rng(torch))[:8])


def test_what_happens_inside_is_undone() -> None:
    before = pack(get_rng(torch))
    with kept_rng(torch):
        draws()
    assert pack(get_rng(torch)) == before


def loaders(*, returning: bool = False) -> Loaders:
    engine: Any = SimpleNamespace(
        on_arrival=[], resume_step=5 if returning else 0, jump=False, phase="skip" if returning else "live",
        started_at=0, iterators=0,
    )  # fmt: skip
    return Loaders(torch, engine)


def test_notes_go_out_and_in() -> None:
    first = loaders()
    number, _ = first.made()
    for _ in range(REAL_DELIVERIES + 3):
        first.note_delivery(number)
        torch.rand(1)
    table, states = first.notes()
    second = loaders(returning=True)
    second.want(table, states)
    _, known = second.made()
    assert known is not None
    assert known["delivered"] == REAL_DELIVERIES + 3
    assert len(known["rng_last"]) == REAL_DELIVERIES
    assert second.rng_of_delivery(known, 3) is None
    assert second.rng_of_delivery(known, 4) is known["rng_last"][0]
    assert second.rng_of_delivery(known, REAL_DELIVERIES + 4) is None
    assert second.rng_of_delivery(None, 4) is None


def test_an_iterator_is_made_with_the_state_of_its_first_life() -> None:
    first = loaders()
    torch.manual_seed(3)
    first.made()
    wanted = torch.rand(1)
    table, states = first.notes()
    second = loaders(returning=True)
    second.want(table, states)
    torch.manual_seed(4)
    second.made()
    assert torch.equal(torch.rand(1), wanted)


def test_iterators_that_are_gone_are_not_noted() -> None:
    class Iterator:
        pass

    noted = loaders()
    kept, gone = Iterator(), Iterator()
    for iterator in (kept, gone):
        number, _ = noted.made()
        noted.watch(number, iterator)
    del gone, iterator
    assert [row[0] for row in noted.notes()[0]] == [1]


def test_torn_notes_are_refused() -> None:
    noted = loaders()
    noted.made()
    table, states = noted.notes()
    with pytest.raises(ValueError, match="torn"):
        loaders(returning=True).want(table, states[:4])
