"""Notices that a program reads its resume step from the environment, and so starts its loop there by itself.

Whoever copies the whole environment (to start a subprocess, say) reads the variable too, and means nothing by it. So
a read counts if it asks for this one name: through ``get`` or ``getenv``, or with the name in the code that asks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from lmres.adapters.resume.engine import Engine

NAMES = ("LMRES_RESUME_STEP", "LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP")
_LIBRARY = (os.__file__, getattr(sys.modules.get("_collections_abc"), "__file__", ""))


def watch(engine: Engine) -> None:
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def __getitem__(self: Any, key: Any) -> Any:
        if key in NAMES and engine.phase == "setup" and self is os.environ and _is_meant(key):
            engine.jump = True
        return original(self, key)

    kind.__getitem__ = __getitem__


def _is_meant(key: str) -> bool:
    frame: Any = sys._getframe(2)
    via_get = False
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", *_LIBRARY)):
        via_get = via_get or frame.f_code.co_name in ("get", "getenv")
        frame = frame.f_back
    if frame is None:
        return False
    if via_get:
        return "lmres" not in frame.f_globals.get("__name__", "").split(".")[0]
    names = frame.f_code.co_consts
    return key in names or key in frame.f_globals.values() or key in frame.f_locals.values()
