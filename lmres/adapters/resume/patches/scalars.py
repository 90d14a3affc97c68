"""Reads of plain values from tensors."""

from __future__ import annotations

import functools
from typing import Any

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.patches.wrap import reads, shield

METHODS = ("item", "__float__", "__bool__", "__int__", "__index__", "__complex__", "equal", "allclose", "is_nonzero")
FUNCTIONS = ("equal", "allclose", "is_nonzero")
MAX_LIST = 4096


def install(torch: Any, engine: Engine) -> None:
    for name in METHODS:
        reads(engine, torch.Tensor, name)
    for name in FUNCTIONS:
        reads(engine, torch, name)
    reads(engine, torch.amp.GradScaler, "get_scale")
    shield(engine, torch.Tensor, "__repr__")
    _lists(torch, engine)


def _lists(torch: Any, engine: Engine) -> None:
    """``tolist`` of small tensors is a read; big ones are data."""
    original = torch.Tensor.tolist
    logged_owner = type("_Lists", (), {"tolist": original})
    reads(engine, logged_owner, "tolist")
    logged: Any = logged_owner.__dict__["tolist"]

    @functools.wraps(original)
    def tolist(self: Any) -> Any:
        return logged(self) if self.numel() <= MAX_LIST else original(self)

    torch.Tensor.tolist = tolist
