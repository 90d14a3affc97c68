"""The program's own collectives on tensors. All ranks are on their way back together, and what such a collective
changes is garbage there anyway: scalars come from the log, tensors are put in place at the end. Collectives on objects
run, since the program may decide by them."""

from __future__ import annotations

from typing import Any

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.patches.wrap import shield, stand_in

TENSORS = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class DoneWork:
    """Stands for a ``Work`` that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> DoneWork:
        return self

    def value(self) -> list[Any]:
        return []


def install(torch: Any, engine: Engine) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        return

    def fake(*args: Any, **kwargs: Any) -> Any:
        return DoneWork() if kwargs.get("async_op") else None

    for name in TENSORS:
        stand_in(engine, distributed, name, fake)
    for name in OBJECTS:
        shield(engine, distributed, name)
