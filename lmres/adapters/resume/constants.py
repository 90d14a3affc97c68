"""Tensors of the program that have not changed since its loop began: data sets held in memory, masks, tables.

They are made again by the program's own set-up, so they need not be captured. A tensor is constant while it is the
same object with the same version counter. (What a program changes behind that counter, through ``.data`` or a shared
array, is not seen.)
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any


class Constants:
    def __init__(self) -> None:
        self._first: dict[int, tuple[Any, int]] = {}

    def begin(self, tensors: Mapping[str, Any]) -> None:
        """What is there when the loop begins."""
        for tensor in tensors.values():
            self._first[id(tensor)] = (weakref.ref(tensor), tensor._version)

    def __contains__(self, tensor: Any) -> bool:
        known = self._first.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == tensor._version
