"""Which images belong to the same past. Pure.

A generation begins from an image (its base) and captures images after it. An image of an older generation is in the
past of a key only up to the step where the next generation left it: later ones belong to a run that did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmres.gemini.inventory import Key


def in_past(key: Key, of: Key, bases: Mapping[int, Key]) -> bool:
    """True if ``key`` is ``of`` or lies on the way to it. ``bases``: what each generation known here began from."""
    while key.origin < of.origin:
        base = bases.get(of.origin)
        if base is None or base.origin >= of.origin:
            return False
        of = base
    return key.origin == of.origin and key.step <= of.step
