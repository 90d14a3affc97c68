"""``lmres.session()``."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lmres
from lmres.adapters.bootstrap import session as attached
from lmres.adapters.session import Session


class Inner:
    """An attached worker's session."""

    def __init__(self, attachment: Any = None) -> None:
        self.attachment = attachment
        self.step = 12
        self.marked = 0
        self.attached = True

    def mark_progress(self) -> None:
        self.marked += 1


def attachment() -> Any:
    keeper = SimpleNamespace(states={}, capture_next=False)
    return SimpleNamespace(keeper=keeper, engine=SimpleNamespace(keeper=keeper))


def of(inner: Inner) -> Session:
    return Session(inner)  # type: ignore[arg-type]


def test_there_is_none_outside() -> None:
    assert lmres.session() is None


def test_there_is_one_in_an_attached_worker_until_it_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Inner()
    monkeypatch.setattr(attached, "_session", inner)
    assert isinstance(lmres.session(), Session)
    inner.attached = False
    assert lmres.session() is None


def test_it_tells_steps_and_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMRES_RESUME_STEP", "7")
    monkeypatch.setenv("LMRES_GENERATION", "3")
    found = of(Inner())
    assert (found.step, found.resume_step, found.generation, found.protected) == (12, 7, 3, False)


def test_without_the_variables_it_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMRES_RESUME_STEP", raising=False)
    monkeypatch.delenv("LMRES_GENERATION", raising=False)
    assert (of(Inner()).resume_step, of(Inner()).generation) == (0, 0)


def test_protected_while_the_engine_has_a_keeper() -> None:
    made = attachment()
    found = of(Inner(made))
    assert found.protected
    made.engine.keeper = None
    assert not found.protected


@pytest.mark.parametrize("refused", [3, "text", None, {"a": 1}, [torch.zeros(1)], object()])
def test_kinds_that_can_not_be_added(refused: Any) -> None:
    for inner in (Inner(), Inner(attachment())):
        with pytest.raises(ValueError, match=r"add_state\('it'\): expected a tensor"):
            of(inner).add_state("it", refused)


def test_added_states() -> None:
    made = attachment()
    tensor, model = torch.zeros(2), torch.nn.Linear(1, 1)
    found = of(Inner(made))
    found.add_state("tensor", tensor)
    found.add_state("model", model)
    found.add_state("tensor", tensor)
    assert made.keeper.states == {"tensor": tensor, "model": model}
    with pytest.raises(ValueError, match="another object"):
        found.add_state("tensor", torch.zeros(2))


def test_without_protection_adding_and_capturing_do_nothing() -> None:
    of(Inner()).add_state("it", torch.zeros(1))
    of(Inner()).checkpoint()


def test_checkpoint_asks_for_the_next_boundary() -> None:
    made = attachment()
    of(Inner(made)).checkpoint()
    assert made.keeper.capture_next


def test_progress_is_marked() -> None:
    inner = Inner()
    of(inner).mark_progress()
    assert inner.marked == 1


def test_progress_on_the_page() -> None:
    import os
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, attached.PAGE_BYTES) as page:
        session = attached.Session(ours.fileno(), page)
        attached.COUNTERS.pack_into(page, attached.COUNTERS_AT, 5, 0)
        Session(session).mark_progress()
        step, moment = attached.COUNTERS.unpack_from(page, attached.COUNTERS_AT)
        assert step == 5
        assert moment > 0
        session.page = bytearray(attached.PAGE_BYTES)
    assert os.getpid()
