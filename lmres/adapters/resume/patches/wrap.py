"""The kinds of patches. A compiler that traces the program sees none of them: it asks ``is_compiling`` first."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from lmres.adapters.resume.engine import Engine


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts ``make(original)`` in the place of a function, once; where there is none, nothing."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "__lmres__", False):
        return
    call: Any = functools.wraps(original)(make(original))
    call.__lmres__ = True
    setattr(owner, name, call)


def stand_in(engine: Engine, owner: Any, name: str, fake: Callable[..., Any]) -> None:
    """While the program is on its way back, ``fake`` answers. What the real one reads inside is not the program's."""
    main = threading.get_ident()

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or engine.inside or threading.get_ident() != main:
                return original(*args, **kwargs)
            if engine.skipping:
                return fake(*args, **kwargs)
            with engine.ours:
                return original(*args, **kwargs)

        return call

    _replace(owner, name, make)


def shield(engine: Engine, owner: Any, name: str) -> None:
    """What the real one reads inside is not the program's; it always runs."""

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            with engine.ours:
                return original(*args, **kwargs)

        return call

    _replace(owner, name, make)


def reads(engine: Engine, owner: Any, name: str) -> None:
    """A function that gives the program a plain value out of tensors."""
    main = threading.get_ident()

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or engine.inside or not engine.logging or kwargs or threading.get_ident() != main:
                return original(*args, **kwargs)
            if type(args[0]).__name__ == "FakeTensor":  # a compiler looks at it, not the program
                return original(*args, **kwargs)
            return engine.read(original, args, sys._getframe(1).f_lineno)

        return call

    _replace(owner, name, make)
