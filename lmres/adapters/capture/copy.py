"""Copies a snapshot into a slot's memory while the program goes on.

* The own part (generators, buffers) changes at any moment: it is copied at once.
* The shared part (parameters, optimizer state) changes only in the optimizer's step: a thread copies it while forward
  and backward run, and ``before_step`` waits for it. Tensors on CUDA go through a stream of their own (``copy_cuda``).
* A program may change its parameters where nobody expects it. Each copy is checked: the version counters of all source
  tensors must not have moved, and the first few copies, then every 64th, are compared with the source byte by byte
  (a change through ``.data`` moves no counter). A torn copy is reported, never used, and from then on everything is
  copied at once.
* The interpreter waits for that thread when it ends (an executor's rule): a thread that is cut off inside torch would
  abort the process.

Whether the parameters, and all the rest of the shared part, are finite is read from the copy, in that thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from lmres.adapters.capture.image import Layout
from lmres.adapters.capture.state import Item, Snapshot
from lmres.adapters.capture.tensors import bits, quiet, scalar
from lmres.errors import CaptureError

if TYPE_CHECKING:
    from lmres.adapters.capture.copy_cuda import Lane

FULL_CHECKS_FIRST = 3
FULL_CHECK_EVERY = 64
MAX_MEMORIES = 8
_Pieces: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The end of a copy. ``torn``: why it must not be used, empty when it is whole. ``finite``: the parameters;
    ``all_finite``: the optimizers' state too. ``blocking_ms``: for how long the program stood still for it."""

    torn: str
    finite: bool
    all_finite: bool
    blocking_ms: float


class Copier:
    """Copies snapshots, one after the other. ``blocking``: everything at once, nothing in the background."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self._copies = 0
        self._views: dict[tuple[int, int], tuple[object, list[torch.Tensor], _Pieces]] = {}
        self._lane: Lane | None = None
        self._pending: Pending | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="lmres-capture")

    def start(self, snapshot: Snapshot, layout: Layout, *, shared: memoryview, own: memoryview) -> Pending:
        """Copy into two writable memories of at least the layout's lengths. One copy at a time: the one before must
        have come to its ``finish``. Raises CaptureError."""
        began = time.perf_counter()
        if self._pending is not None and not self._pending.finished:
            raise CaptureError("a copy is under way already")
        if len(shared) < layout.shared_bytes or len(own) < layout.own_bytes:
            raise CaptureError(
                f"the slot has {len(shared)} and {len(own)} bytes, but the state needs {layout.shared_bytes} "
                f"and {layout.own_bytes}"
            )
        try:
            with quiet():
                return self._start(snapshot, layout, shared, own, began)
        except (RuntimeError, TypeError, ValueError, BufferError, MemoryError) as problem:
            raise CaptureError(f"the state could not be copied: {problem}") from problem

    def _start(self, snapshot: Snapshot, layout: Layout, shared: memoryview, own: memoryview, began: float) -> Pending:
        own[: len(layout.header)] = layout.header
        own_views, _ = self._views_of(own, snapshot.own, layout.own_offsets, layout.keys[1])
        views, pieces = self._views_of(shared, snapshot.shared, layout.shared_offsets, layout.keys[0])
        _copy(own_views, [item.tensor for item in snapshot.own])
        on_cuda = any(item.tensor.is_cuda for item in snapshot.shared)
        full_check = self._copies < FULL_CHECKS_FIRST or self._copies % FULL_CHECK_EVERY == 0
        self._copies += 1
        self._pending = pending = Pending(self, snapshot.shared, views, pieces, full_check and not self.blocking)
        if on_cuda:
            pending.lane = self._cuda_lane(shared)
        pending.launch(blocking=self.blocking)
        pending.blocking_s = time.perf_counter() - began
        return pending

    def _views_of(
        self, memory: memoryview, items: Sequence[Item], offsets: Sequence[int], key: object
    ) -> tuple[list[torch.Tensor], _Pieces]:
        """A tensor over the memory for each item, and the pieces of parameters and of the rest; kept, since there are
        few slots and making them takes longer than small copies do."""
        if not memory.nbytes:
            return [torch.empty_like(item.tensor) for item in items], ([], [])
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        place = (flat.data_ptr(), flat.numel())
        known = self._views.get(place)
        wanted = (key, tuple(offsets))
        if known is not None and known[0] == wanted:
            return known[1], known[2]
        typed: dict[torch.dtype, torch.Tensor] = {}
        views = []
        for item, at in zip(items, offsets, strict=True):
            tensor = item.tensor
            dtype, size = tensor.dtype, tensor.element_size()
            if dtype not in typed:
                typed[dtype] = flat[: flat.numel() // size * size].view(dtype)
            views.append(typed[dtype].as_strided(tensor.shape, contiguous(tensor.shape), at // size))
        if len(self._views) >= MAX_MEMORIES:
            self.forget()
        pieces = runs(flat, items, offsets), runs(flat, items, offsets, parameters=False)
        self._views[place] = (wanted, views, pieces)
        return views, pieces

    def _cuda_lane(self, memory: memoryview) -> Lane:
        from lmres.adapters.capture.copy_cuda import Lane

        self._lane = self._lane or Lane()
        self._lane.pin(memory)
        return self._lane

    def forget(self) -> None:
        """Let go of all memories: needed before they can be unmapped."""
        if self._pending is not None:
            self._pending.let_go()
        self._views.clear()
        if self._lane is not None:
            self._lane.unpin()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _copy(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, tensors)


class Pending:
    """A copy under way: ``before_step`` before the parameters may change, then ``finish``."""

    def __init__(
        self,
        copier: Copier,
        items: Sequence[Item],
        views: list[torch.Tensor],
        pieces: _Pieces,
        full_check: bool,
    ) -> None:
        self._copier = copier
        self._items = items
        self._views = views
        self._pieces = pieces
        self._full_check = full_check
        self._versions: list[int] = []
        self._thread: Future[None] | None = None
        self._error: BaseException | None = None
        self._finite = self._all_finite = True
        self._torn: str | None = None
        self.lane: Lane | None = None
        self.blocking_s = 0.0
        self.finished = False

    def launch(self, *, blocking: bool) -> None:
        tensors = [item.tensor for item in self._items]
        self._versions = _versions(tensors)
        if self.lane is not None:
            sources = [item.tensor for item in self._items if item.parameter]
            self.lane.launch(self._views, tensors, sources, [i.tensor for i in self._items if not i.parameter])
            if blocking:
                self.lane.synchronize()
            return
        if blocking:
            _copy(self._views, tensors)
            self._run(lambda: None)
        else:
            views = self._views
            self._run(lambda: _copy(views, tensors))

    def _run(self, copy: Callable[[], None]) -> None:
        def run() -> None:
            with quiet():
                copy()
                parameters, others = self._pieces
                self._finite = all_finite(parameters)
                self._all_finite = self._finite and all_finite(others)

        self._thread = self._copier.thread.submit(run)

    @property
    def done(self) -> bool:
        """Whether ``finish`` would not wait."""
        if self.lane is not None:
            return self.lane.done
        return self._thread is None or self._thread.done()

    def before_step(self) -> None:
        """Return when the parameters may change: on CUDA the stream waits, not this thread. Checks the copy."""
        if self._torn is not None:
            return
        began = time.perf_counter()
        self._join()
        try:
            with quiet():
                if self.lane is not None:
                    self.lane.hold_back()
                self._torn = self._check()
        except RuntimeError as problem:
            self._error = problem
            self._torn = str(problem)
        self.blocking_s += time.perf_counter() - began

    def finish(self) -> Copied:
        """Wait for the end. A torn copy makes the copier copy everything at once from now on. Raises CaptureError."""
        self.before_step()
        self.finished = True
        finite, whole = self._finite, self._all_finite
        try:
            if self.lane is not None:
                with quiet():
                    finite, whole = self.lane.finish()
        except RuntimeError as problem:
            self._error = self._error or problem
        torn = self._torn or ""
        self.let_go()
        if self._error is not None:
            raise CaptureError(f"the state could not be copied: {self._error}") from self._error
        if torn:
            self._copier.blocking = True
        return Copied(torn=torn, finite=finite, all_finite=finite and whole, blocking_ms=self.blocking_s * 1000)

    def let_go(self) -> None:
        """Wait for the thread and forget the tensors."""
        self._join()
        self.finished = True
        self._items, self._views, self._pieces = (), [], ([], [])

    def _join(self) -> None:
        if self._thread is not None:
            self._error = self._error or self._thread.exception()

    def _check(self) -> str:
        versions = _versions([item.tensor for item in self._items])
        if versions != self._versions:
            moved = next(index for index, version in enumerate(versions) if version != self._versions[index])
            return f"'{self._items[moved].name}' changed while it was copied, before the optimizer's step"
        if self._full_check and self._error is None:
            if self.lane is not None:
                self.lane.synchronize()
            for item, view in zip(self._items, self._views, strict=True):
                source = item.tensor.cpu() if item.tensor.is_cuda else item.tensor
                if not torch.equal(bits(source), bits(view)):
                    return f"'{item.name}' changed without a trace while it was copied, before the optimizer's step"
        return ""


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of inference mode count no changes
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def runs(
    memory: torch.Tensor, items: Sequence[Item], offsets: Sequence[int], *, parameters: bool = True
) -> list[torch.Tensor]:
    """The floating parameters of a memory, or all that are none, in as few pieces as possible: neighbours of one type
    are one piece."""
    found: list[tuple[torch.dtype, int, int]] = []
    for at, item in sorted(zip(offsets, items, strict=True), key=lambda pair: pair[0]):
        tensor = item.tensor
        size = tensor.numel() * tensor.element_size()
        if item.parameter is not parameters or not size or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        dtype = tensor.dtype.to_real()
        if found and found[-1][0] == dtype and found[-1][2] == at:
            found[-1] = (dtype, found[-1][1], at + size)
        else:
            found.append((dtype, at, at + size))
    return [memory[start:end].view(dtype) for dtype, start, end in found]


def all_finite(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether no floating value is infinite or NaN. A sum is the fastest way to see that all are finite; one that is
    not may have overflown, so that the extremes decide."""
    for piece in pieces:
        wide = piece.float() if piece.element_size() == 1 else piece
        if math.isfinite(scalar(wide.sum())):
            continue
        if not all(math.isfinite(scalar(extreme)) for extreme in torch.aminmax(wide)):
            return False
    return True
