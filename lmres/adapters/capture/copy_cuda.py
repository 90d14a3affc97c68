"""Copies from CUDA devices into a slot's memory, beside the program's own work.

The memory is registered as pinned once, so that the copies run on the device's copy engine. They are queued on a
stream of our own that first waits for what the program has queued; ``hold_back`` lets the program's stream wait for
the copies before the optimizer changes anything, without stopping the host. If the memory can not be registered, the
copies are still correct, but the host waits for each.

Written without a device at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PORTABLE = 1


class Lane:
    """Streams of our own, one for each device, and what is queued on them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._events: dict[torch.device, Any] = {}
        self._finite: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pinned: dict[tuple[int, int], tuple[bool, memoryview]] = {}

    def pin(self, memory: memoryview) -> bool:
        """Register a memory, once. False: not possible, copies will make the host wait."""
        place = (torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), memory.nbytes)
        if place not in self._pinned:
            self._pinned[place] = (int(torch.cuda.cudart().cudaHostRegister(*place, PORTABLE)) == 0, memory)
        return self._pinned[place][0]

    def unpin(self) -> None:
        self.synchronize()
        for place, (registered, _) in self._pinned.items():
            if registered:
                torch.cuda.cudart().cudaHostUnregister(place[0])
        self._pinned.clear()

    def launch(
        self,
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        """Queue the copies, and the checks that the parameters, and the ``others``, are finite."""
        self._finite, self._events = [], {}
        for device in sorted({tensor.device for tensor in tensors}, key=str):
            pairs = [pair for pair in zip(views, tensors, strict=True) if pair[1].device == device]
            into, sources = [view for view, _ in pairs], [tensor for _, tensor in pairs]
            checked = [[t for t in each if t.device == device] for each in (parameters, others)]
            if device.type != "cuda":
                torch._foreach_copy_(into, sources)
                self._finite.append((_all_finite(checked[0], device), _all_finite(checked[1], device)))
                continue
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            with torch.cuda.device(device):
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    torch._foreach_copy_(into, sources, non_blocking=True)
                    self._finite.append((_all_finite(checked[0], device), _all_finite(checked[1], device)))
                    event = self._events[device] = torch.cuda.Event()
                    event.record(stream)

    def hold_back(self) -> None:
        """The program's streams wait for the copies from here on."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    @property
    def done(self) -> bool:
        return all(event.query() for event in self._events.values())

    def synchronize(self) -> None:
        for event in self._events.values():
            event.synchronize()

    def finish(self) -> tuple[bool, bool]:
        """Wait for the copies; whether the parameters, and whether the others are finite."""
        self.synchronize()
        item = torch._C.TensorBase.item
        parameters = all(bool(item(flag)) for flag, _ in self._finite)
        others = all(bool(item(flag)) for _, flag in self._finite)
        self._finite, self._events = [], {}
        return parameters, others


def _all_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether no floating value is infinite or NaN, as a boolean tensor on the device; nothing waits for it."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            wide = torch.view_as_real(wide) if wide.is_complex() else wide
            by_type.setdefault(wide.dtype, []).append(wide)
    flags = [torch.stack(list(torch._foreach_norm(each, float("inf")))).isfinite().all() for each in by_type.values()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device=device)
