"""What the program itself holds at a boundary: the values in the frames of its functions.

A program keeps more than model and optimizer: averaged weights in a dictionary, meters, permutations, a batch fetched
ahead, counters. All of it hangs on the local and global variables of the functions that are on the stack when a
training forward begins. ``walk`` collects it by path: tensors, arrays and random generators, to be put back in place,
and plain values, to be compared (``certificate``). Code of installed packages and of the standard library is not the
program's; objects of their classes are not looked into.

Not seen: what hangs on globals of modules that are not on the stack, closures, slots, C objects, sets, and containers
with more than 4096 items (a longer list of plain values counts by its length and its last items).
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 6
MAX_ITEMS = 4096
MAX_WALKED_ITEMS = 256
LAST_ITEMS = 8
MAX_VALUES = 50_000
MAX_TEXT = 500
MAX_ARRAY_BYTES = 16 << 20

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
_FOREIGN = tuple(
    {
        *(os.path.join(p, "") for k, p in sysconfig.get_paths().items() if k in ("stdlib", "platstdlib")),  # noqa: PTH118
        os.path.join(_HERE, ""),  # noqa: PTH118
    }
)
_PACKAGES = ("site-packages" + os.sep, "dist-packages" + os.sep)
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

_users: dict[str, bool] = {}
_user_types: dict[type, bool] = {}


def is_program(filename: str) -> bool:
    """Whether a source file is the user's own, not an installed package's, the interpreter's or this package's."""
    known = _users.get(filename)
    if known is None:
        foreign = filename.startswith(("<frozen", "<string>")) or any(p in filename for p in _PACKAGES)
        known = _users[filename] = not foreign and not os.path.abspath(filename).startswith(_FOREIGN)  # noqa: PTH100
    return known


@dataclass(slots=True)
class Held:
    """By path. ``files``: the sources whose code or classes were met."""

    tensors: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


def walk(torch: Any, known: set[int]) -> Held:
    """The program's frames, from the innermost out. ``known``: ids of tensors that are captured by other ways."""
    walker = _Walker(torch, known)
    frame: Any = sys._getframe(1)
    globals_seen: set[int] = set()
    number = 0
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            walker.held.files.add(code.co_filename)
            name = f"{number}:{code.co_name}"
            number += 1
            for where, names in ((name, frame.f_locals), (frame.f_globals.get("__name__", "?"), frame.f_globals)):
                if id(names) in globals_seen:
                    continue
                if names is frame.f_globals:
                    globals_seen.add(id(names))
                for key, value in list(names.items()):
                    if not key.startswith("__"):
                        walker.visit(f"{where}.{key}", value, MAX_DEPTH)
        frame = frame.f_back
    return walker.held


class _Walker:
    def __init__(self, torch: Any, known: set[int]) -> None:
        self.held = Held()
        self._seen = set(known)
        self._tensor = torch.Tensor
        self._module = torch.nn.Module
        self._generator = torch.Generator
        self._left = MAX_VALUES

    def visit(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, float, complex):
            self.held.values[path] = value
            return
        if kind is str:
            self.held.values[path] = value if len(value) <= MAX_TEXT else (len(value), hash_text(value))
            return
        key = id(value)
        if key in self._seen or self._left <= 0:
            return
        if isinstance(value, self._tensor):
            self._seen.add(key)
            self.held.tensors[path] = value
            return
        if isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            return
        self._seen.add(key)
        self._left -= 1
        if depth > 0:
            self._inside(path, value, depth - 1)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            if len(value) <= MAX_ITEMS:
                for key, item in list(value.items()):
                    if isinstance(key, (str, int, float, bool, tuple)) and not str(key).startswith("__"):
                        self.visit(f"{path}[{key!r}]", item, depth)
        elif isinstance(value, (list, tuple, deque)):
            self._sequence(path, value, depth)
        elif isinstance(value, self._module):
            self._modules(path, value, depth)
        elif isinstance(value, (self._generator, random.Random)) or _is_numpy_generator(value):
            self.held.generators[path] = value
        elif _is_array(value):
            if value.nbytes <= MAX_ARRAY_BYTES and value.dtype.kind in "biufc" and type(value).__name__ == "ndarray":
                self.held.arrays[path] = value
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            if frame is not None and is_program(frame.f_code.co_filename):
                for name, item in list(frame.f_locals.items()):
                    self.visit(f"{path}<{frame.f_code.co_name}>.{name}", item, depth)
        elif hasattr(value, "item") and type(value).__module__ == "numpy":
            self.held.values[path] = value.item()
        else:
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and self._is_program_type(type(value)):
                for name, item in list(attributes.items()):
                    self.visit(f"{path}.{name}", item, depth)

    def _sequence(self, path: str, value: Any, depth: int) -> None:
        count = len(value)
        if count <= MAX_WALKED_ITEMS:
            self.held.values[f"{path}.len"] = count
            for i, item in enumerate(list(value)):
                self.visit(f"{path}[{i}]", item, depth)
            return
        first = value[0]
        if first is None or isinstance(first, (bool, int, float, str)):
            self.held.values[f"{path}.len"] = count
            for i in range(count - LAST_ITEMS, count):
                self.visit(f"{path}[{i}]", value[i], 0)
        elif count <= MAX_ITEMS and isinstance(first, self._tensor):
            for i, item in enumerate(list(value)):
                self.visit(f"{path}[{i}]", item, 0)

    def _modules(self, path: str, root: Any, depth: int) -> None:
        for name, module in root.named_modules():
            where = f"{path}.{name}" if name else path
            self._seen.add(id(module))
            for own in ("_parameters", "_buffers"):
                for key, tensor in (module.__dict__.get(own) or {}).items():
                    if tensor is not None:
                        self.visit(f"{where}.{key}", tensor, 0)
            if self._is_program_type(type(module)):
                for key, item in list(vars(module).items()):
                    if not key.startswith("_") and key != "training":
                        self.visit(f"{where}.{key}", item, min(depth, 2))

    def _is_program_type(self, kind: type) -> bool:
        known = _user_types.get(kind)
        if known is None:
            if f"{kind.__module__}.{kind.__qualname__}" in _NAMESPACES:
                known = True
            else:
                module = sys.modules.get(kind.__module__)
                source = getattr(module, "__file__", None)
                known = source is not None and is_program(source)
            _user_types[kind] = known
        if known:
            source = getattr(sys.modules.get(kind.__module__), "__file__", None)
            if source is not None and is_program(source):
                self.held.files.add(source)
        return known


def hash_text(text: str) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
