"""Notices that the program's set-up loads a checkpoint."""

from __future__ import annotations

import functools
import sys
from typing import Any

from lmres.adapters.resume.engine import Engine

_LOADS = {
    "torch": ("load",),
    "torch.distributed.checkpoint": ("load",),
    "safetensors.torch": ("load_file", "load_model"),
}


def watch(engine: Engine) -> None:
    """Only in a life that has to come back. A library that is imported later is not seen: ``torch.load`` is behind
    nearly all of them."""
    for name, functions in _LOADS.items():
        module = sys.modules.get(name)
        for function in functions if module is not None else ():
            _watch(engine, module, function)


def _watch(engine: Engine, module: Any, name: str) -> None:
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if engine.phase == "setup":
            engine.has_loaded = True
        return original(*args, **kwargs)

    setattr(module, name, load)
