"""``itertools.cycle`` over a data loader: it keeps the batches of its first pass and hands out the same ones for ever.

The real one keeps them where nobody can look, so on the way back its batches must be the genuine ones from the start.
For everything that is not a loader, ``itertools.cycle`` stays the real one.
"""

from __future__ import annotations

import itertools
from typing import Any

from lmres.adapters.resume.patches.loaders import Loaders


def install(torch: Any, loaders: Loaders) -> None:
    from torch.utils.data import DataLoader

    real = itertools.cycle
    if getattr(real, "__lmres__", False):
        return

    class Meta(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

    class cycle(metaclass=Meta):
        __lmres__ = True

        def __new__(cls, iterable: Any) -> Any:
            if isinstance(iterable, DataLoader):
                loaders.keeping = True
            try:
                return real(iterable)
            finally:
                loaders.keeping = False

    cycle.__doc__ = real.__doc__
    itertools.cycle = cycle  # type: ignore[misc]
