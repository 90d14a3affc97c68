"""Reads of plain values from tensors."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from torch.compiler import is_compiling

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.patches.wrap import reads, shield

METHODS = ("item", "__float__", "__bool__", "__int__", "__index__", "__complex__", "equal", "allclose", "is_nonzero")
FUNCTIONS = ("equal", "allclose", "is_nonzero")
MAX_LIST = 4096
MAX_ARRAY = 64


def install(torch: Any, engine: Engine) -> None:
    for name in METHODS:
        reads(engine, torch.Tensor, name)
    for name in FUNCTIONS:
        reads(engine, torch, name)
    reads(engine, torch.amp.GradScaler, "get_scale")
    shield(engine, torch.Tensor, "__repr__")
    _whole(torch, engine, "tolist", MAX_LIST)
    _arrays(torch, engine)


def _whole(torch: Any, engine: Engine, name: str, most: int) -> None:
    """Of small tensors it is a read; big ones are data."""
    original = getattr(torch.Tensor, name)
    logged_owner = type("_Logged", (), {name: original})
    reads(engine, logged_owner, name)
    logged: Any = logged_owner.__dict__[name]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return logged(self, *args, **kwargs) if self.numel() <= most else original(self, *args, **kwargs)

    setattr(torch.Tensor, name, call)


def _arrays(torch: Any, engine: Engine) -> None:
    """``numpy()`` shares the tensor's memory: on the way back the values that were read go into it."""
    original = torch.Tensor.numpy
    main = threading.get_ident()

    @functools.wraps(original)
    def numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        array = original(self, *args, **kwargs)
        if is_compiling() or engine.inside or not engine.logging or threading.get_ident() != main:
            return array
        if array.size > MAX_ARRAY or array.dtype.kind not in "biuf":
            return array
        known = engine.read(lambda found: found.tolist(), (array,), sys._getframe(1).f_lineno)
        if engine.skipping:
            array[...] = known
        return array

    torch.Tensor.numpy = numpy
