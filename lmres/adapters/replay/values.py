"""What a function of the program reads that it did not make: which of it a replay may read an extra time.

Numbers, text, tensors, modules inside the part, torch's own things: yes. A generator, an iterator, or a container that
can be changed: no, it may be advanced in more ways than can be seen. Of other objects only the attributes are read.
"""

from __future__ import annotations

import collections
import enum
import functools
import random
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, slice, range)
_MUTABLE = (list, dict, set, bytearray, collections.deque, MutableMapping, MutableSequence, MutableSet, Iterator)
_KNOWN = ("torch", "numpy", "math", "einops")
_OPS = ("torch._ops", "torch._C")


class Unseen:
    """Stands for a value that can not be told."""

    def __init__(self, why: str = "it can not be told what it is") -> None:
        self.why = why


UNKNOWN = Unseen()
GIVEN = Unseen("")
"""What the caller handed over: it was looked at there, and is not the function's own."""


def is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    if type(value).__module__ == "numpy":  # its numbers, dtypes and functions
        return type(value).__name__ != "ndarray"
    return type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "Size", "layout")


def is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def is_soft(value: Any) -> bool:
    """A tensor, or what may be one: only what changes it in place harms."""
    return value is GIVEN or is_tensor(value)


def is_function(value: Any) -> bool:
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, functools.partial)):
        return True
    return type(value).__module__ in _OPS and callable(value)


def is_known(function: Any) -> bool:
    """Of torch, of the standard library's C code, or of a library that works on arrays alone."""
    if isinstance(function, type):
        return True
    name = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    if name.startswith("torch.distributed"):
        return False
    if isinstance(function, BuiltinFunctionType):
        return _may_advance(getattr(function, "__self__", None))
    if is_kept(getattr(function, "__self__", None)):
        return True
    return name.partition(".")[0] in _KNOWN or type(function).__module__ in _OPS


def is_kept(value: Any) -> bool:
    """The process's generators, whose state is put back."""
    numpy = sys.modules.get("numpy")
    legacy = getattr(getattr(getattr(numpy, "random", None), "mtrand", None), "_rand", None)
    return value is not None and (value is getattr(random, "_inst", None) or value is legacy)


def _may_advance(holder: Any) -> bool:
    """What a method written in C is called on."""
    if holder is None or isinstance(holder, (ModuleType, type)) or is_plain(holder) or is_tensor(holder):
        return True
    return is_kept(holder) or _is_torchs(holder)


def _is_torchs(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and type(value).__name__ != "Generator"


def problem_of_value(value: Any, inside: frozenset[int], *, whole: bool) -> str:
    """Why this should not be read; functions are not looked at. ``whole``: not only an attribute of it."""
    if isinstance(value, Unseen):
        return value.why
    if is_module(value):
        return "" if id(value) in inside else "it is a module of elsewhere"
    if is_plain(value) or is_tensor(value) or isinstance(value, (ModuleType, type, super)) or is_function(value):
        return ""
    if isinstance(value, (tuple, frozenset)):
        return next((why for v in value if (why := problem_of_value(v, inside, whole=True))), "")
    name = type(value).__name__
    if isinstance(value, _MUTABLE) or name in ("Generator", "ndarray"):
        return f"it is a {name}"
    if _is_torchs(value) or not whole:
        return ""
    return f"it is a {name}"


def elements(value: Any) -> list[Any]:
    """What is read by iterating over it, or by an index."""
    import torch

    nn = torch.nn
    if is_soft(value):
        return [value]
    if isinstance(value, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return list(value._modules.values())
    if isinstance(value, nn.ParameterDict):
        return list(value.values())
    if isinstance(value, (tuple, nn.ParameterList)):
        return [each for each in value if not is_plain(each)]
    return [] if is_plain(value) else [value if isinstance(value, Unseen) else UNKNOWN]


def attribute(value: Any, name: str) -> Any:
    """``value.name``; a property is given as itself."""
    if isinstance(value, Unseen):
        return value
    if not isinstance(value, (ModuleType, type, super)) and not is_tensor(value):
        static = getattr_static(type(value), name, None)
        if isinstance(static, property):
            return static
        if isinstance(static, functools.cached_property) and name not in vars(value):
            return UNKNOWN
    try:
        return getattr(value, name)
    except Exception:  # an attribute that comes later, or the program's own __getattr__
        return UNKNOWN
