"""Copies beside the program: whole, or said to be torn."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lmres.adapters.capture import copy as under_test
from lmres.adapters.capture.collect import collect
from lmres.adapters.capture.copy import FULL_CHECKS_FIRST, Copier, Pending
from lmres.adapters.capture.image import plan_layout
from lmres.adapters.capture.state import State
from lmres.errors import CaptureError
from tests.unit.adapters import capture_kit as kit


class Slot:
    """A program with one slot to copy into."""

    def __init__(self, model: nn.Module | None = None, **options: bool) -> None:
        self.model = model or nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        self.state = State(roots=(self.model,))
        layout = plan_layout(collect(self.state))
        self.shared, self.own = memoryview(bytearray(layout.shared_bytes)), memoryview(bytearray(layout.own_bytes))
        self.copier = Copier(**options)

    def start(self) -> Pending:
        snapshot = collect(self.state)
        return self.copier.start(snapshot, plan_layout(snapshot), shared=self.shared, own=self.own)

    def first(self) -> torch.Tensor:
        return next(self.model.parameters())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread's copies wait for this event."""
    go = threading.Event()
    real = under_test._copy

    def slow(into: list, tensors: list) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(60)
        real(into, tensors)

    monkeypatch.setattr(under_test, "_copy", slow)
    return go


def test_a_copy_runs_beside_the_program_and_is_whole(held: threading.Event) -> None:
    slot = Slot()
    pending = slot.start()
    assert not pending.done
    slot.model(torch.ones(2, 40)).sum().backward()
    held.set()
    pending.before_step()
    assert pending.done
    copied = pending.finish()
    assert (copied.torn, copied.finite) == ("", True)
    assert copied.blocking_ms > 0
    kit.from_bytes(State(roots=(Slot().model,)), (bytes(slot.own), bytes(slot.shared)))


def test_what_must_not_wait_is_copied_at_once(held: threading.Event) -> None:
    slot = Slot(kit.Net())
    pending = slot.start()
    layout = plan_layout(collect(slot.state))
    own = bytes(slot.own)
    slot.model.norm.running_mean.add_(1)
    held.set()
    pending.finish()
    assert bytes(slot.own) == own
    assert own.startswith(layout.header[:8])


def test_a_change_meanwhile_is_a_torn_copy_and_ends_copies_beside_the_program(held: threading.Event) -> None:
    slot = Slot()
    pending = slot.start()
    with torch.no_grad():
        slot.first().add_(1)
    held.set()
    assert "'r0.p.0.weight' changed while it was copied" in pending.finish().torn
    assert slot.copier.blocking
    again = slot.start()
    slot.first().data.add_(1)
    assert again.finish().torn == ""


@pytest.mark.parametrize("earlier", [0, FULL_CHECKS_FIRST - 1])
def test_a_change_that_no_counter_shows_is_found_in_the_first_copies(held: threading.Event, earlier: int) -> None:
    slot = Slot()
    held.set()
    for _ in range(earlier):
        assert not slot.start().finish().torn
    pending = slot.start()
    pending._join()
    slot.first().data[3, 3] += 1
    assert "without a trace" in pending.finish().torn


def test_not_a_number_is_no_change(held: threading.Event) -> None:
    slot = Slot()
    slot.first().data[0, 0] = float("nan")
    held.set()
    copied = slot.start().finish()
    assert (copied.torn, copied.finite) == ("", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    ("value", "finite"),
    [(1.0, True), (6e4, True), (float("inf"), False), (float("-inf"), False), (float("nan"), False)],
)
def test_parameters_must_be_finite(dtype: torch.dtype, value: float, finite: bool) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.full((70,), value, dtype=dtype))
    model.b = nn.Parameter(torch.ones(3))
    model.c = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    assert Slot(model).start().finish().finite == finite


def test_sums_that_overflow_are_finite_and_eight_bits_are_read() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.full((100,), 3e38))
    model.b = nn.Parameter(torch.ones(9).to(torch.float8_e4m3fn), requires_grad=False)
    assert Slot(model).start().finish().finite
    model.b.data = torch.full((9,), float("nan")).to(torch.float8_e4m3fn)
    assert not Slot(model).start().finish().finite


def test_buffers_may_be_infinite() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    assert Slot(model).start().finish().finite


def test_a_slot_that_is_too_small_is_refused() -> None:
    slot = Slot()
    slot.shared = slot.shared[:-1]
    with pytest.raises(CaptureError, match="but the state needs"):
        slot.start()


def test_a_slot_that_can_not_be_written_is_refused() -> None:
    slot = Slot()
    slot.own = slot.own.toreadonly()
    with pytest.raises(CaptureError):
        slot.start()


def test_one_copy_at_a_time(held: threading.Event) -> None:
    slot = Slot()
    pending = slot.start()
    with pytest.raises(CaptureError, match="under way"):
        slot.start()
    held.set()
    pending.finish()
    slot.start().finish()


def test_an_error_in_the_thread_comes_out_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> bool:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(under_test, "all_finite", broken)
    slot = Slot()
    pending = slot.start()
    pending.before_step()
    with pytest.raises(CaptureError, match="no more memory"):
        pending.finish()


def test_finish_twice_says_the_same() -> None:
    slot = Slot()
    pending = slot.start()
    assert pending.finish().torn == pending.finish().torn == ""


@pytest.mark.parametrize("end", [Pending.finish, lambda pending: None], ids=["finished", "given up"])
def test_memory_can_be_unmapped_once_it_is_forgotten(end: Callable[[Pending], object]) -> None:
    slot = Slot()
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, len(slot.shared))
    mapped = mmap.mmap(descriptor, len(slot.shared))
    os.close(descriptor)
    slot.shared = memoryview(mapped)
    pending = slot.start()
    end(pending)
    slot.copier.forget()
    slot.shared.release()
    del pending
    gc.collect()
    mapped.close()


def test_a_finished_copy_keeps_no_tensor_alive() -> None:
    slot = Slot()
    pending = slot.start()
    gone = weakref.ref(slot.model)
    pending.finish()
    slot.model = None
    slot.state = State()
    gc.collect()
    assert gone() is None


def test_many_slots_do_not_pile_up() -> None:
    slot = Slot()
    for _ in range(3 * under_test.MAX_MEMORIES):
        slot.shared = memoryview(bytearray(len(slot.shared)))
        slot.start().finish()
    assert len(slot.copier._views) <= under_test.MAX_MEMORIES + 1


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    slot = Slot(model)
    assert slot.start().finish().torn == ""
    kit.from_bytes(slot.state, (bytes(slot.own), bytes(slot.shared)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_copies_beside_the_program() -> None:
    """Never run where this was written: there was no device."""
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(8, 512, device="cuda")
    model(data).sum().backward()
    optimizer.step()
    state = State(roots=(model,), optimizers=(optimizer,))
    expected = [value.clone() for value in model.parameters()]
    image = kit.to_bytes(state)
    for _ in range(3):
        model(data).sum().backward()
        optimizer.step()
    kit.from_bytes(state, image)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
