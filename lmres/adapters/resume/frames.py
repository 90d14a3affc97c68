"""What the program itself holds at a boundary: the values in the frames of its functions.

A program keeps more than model and optimizer: averaged weights in a dictionary, meters, permutations, a batch fetched
ahead, counters. All of it hangs on the local and global variables of the functions that are on the stack when a
training forward begins, on the globals of the program's modules, and on closures. ``walk`` collects it by path:
tensors, arrays and random generators, to be put back in place, and plain values, to be compared (``certificate``).
Code of installed packages and of the standard library is not the program's; of objects of their classes only the
tensors are taken.

Not seen: C objects, sets of objects, and containers with more than 4096 items (a longer list of plain values counts by
its length and its last items).
"""

from __future__ import annotations

import enum
import functools
import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Collection, Iterable
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
_PLAIN = (bool, int, float, complex, str, type(None))
_INERT = (types.ModuleType, types.BuiltinFunctionType)

_users: dict[str, bool] = {}
_user_types: dict[type, bool] = {}
_slots: dict[type, tuple[str, ...]] = {}
_global_names: dict[int, tuple[Any, int, list[str]]] = {}


def is_program(filename: str) -> bool:
    """Whether a source file is the user's own, not an installed package's, the interpreter's or this package's."""
    known = _users.get(filename)
    if known is None:
        foreign = filename.startswith(("<frozen", "<string>")) or any(p in filename for p in _PACKAGES)
        known = _users[filename] = not foreign and not os.path.abspath(filename).startswith(_FOREIGN)  # noqa: PTH100
    return known


@dataclass(slots=True)
class Held:
    """By path. ``files``: the sources whose code or classes were met. ``attributes``: of the program's own modules, the
    module and the attribute that a path begins with."""

    tensors: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    attributes: dict[str, tuple[Any, str]] = field(default_factory=dict)


class Captured:
    """Modules all of whose parameters and buffers are captured by other ways. ``parts`` of one: the modules in it that
    may hold something else, by name; torch's own do not."""

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        self._ids = frozenset(map(id, modules))
        self._parts: dict[int, list[tuple[str, Any]]] = {}

    def __contains__(self, module: Any) -> bool:
        return id(module) in self._ids

    def parts(self, module: Any) -> list[tuple[str, Any]]:
        found = self._parts.get(id(module))
        if found is None:
            found = [(n, m) for n, m in module.named_modules() if not type(m).__module__.startswith("torch.")]
            self._parts[id(module)] = found
        return found


def walk(torch: Any, known: Collection[int], modules: Captured | None = None) -> Held:
    """The program's frames, from the innermost out, then its modules. ``known``: ids of tensors that are captured by
    other ways."""
    walker = _Walker(torch, known, modules if modules is not None else Captured())
    files = walker.held.files
    frame: Any = sys._getframe(1)
    done: set[int] = set()
    number = 0
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            files.add(code.co_filename)
            names = frame.f_locals
            if names is not frame.f_globals:
                for key, value in list(names.items()):
                    if not key.startswith("__"):
                        walker.visit(f"{number}:{code.co_name}.{key}", value, MAX_DEPTH)
            number += 1
            _walk_globals(walker, frame.f_globals, done)
        frame = frame.f_back
    for source, names in _program_modules():
        files.add(source)
        _walk_globals(walker, names, done)
    return walker.held


class _Beside:
    """The program's modules as of the last look: their files and globals."""

    count = -1
    main: Any = None
    found: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012


def _program_modules() -> list[tuple[str, dict[str, Any]]]:
    """Whose files lie where the program's first file lies, or below. Looked for again after each import."""
    main = sys.modules.get("__main__")
    if _Beside.count == len(sys.modules) and _Beside.main is main:
        return _Beside.found
    _Beside.count, _Beside.main, _Beside.found = len(sys.modules), main, []
    first = getattr(main, "__file__", None)
    if first is not None:
        folder = os.path.join(os.path.dirname(os.path.abspath(first)), "")  # noqa: PTH100, PTH118, PTH120
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            source = names.get("__file__") if isinstance(names, dict) else None
            if isinstance(source, str) and is_program(source) and os.path.abspath(source).startswith(folder):  # noqa: PTH100
                assert isinstance(names, dict)
                _Beside.found.append((source, names))
    return _Beside.found


def _walk_globals(walker: _Walker, names: dict[str, Any], done: set[int]) -> None:
    """Which of them can hold anything is looked at again when one has been added."""
    if id(names) in done:
        return
    done.add(id(names))
    where = str(names.get("__name__", "?")).replace(".", "/")
    known = _global_names.get(id(names))
    if known is None or known[0] is not names or known[1] != len(names):
        live = [k for k, v in list(names.items()) if not k.startswith("__") and not _is_inert(v)]
        known = _global_names[id(names)] = (names, len(names), live)
    for key in known[2]:
        if key in names:
            walker.visit(f"{where}.{key}", names[key], MAX_DEPTH)


def _is_inert(value: Any) -> bool:
    """What can not hold state: a name that has stood for it is not looked at again."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and not hasattr(value, "__wrapped__")
    return isinstance(value, _INERT) or (isinstance(value, type) and not _is_looked_into(value))


def _is_looked_into(kind: type) -> bool:
    """A class of the program's, for what it holds itself."""
    source = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return source is not None and is_program(source) and not issubclass(kind, enum.Enum)


class _Walker:
    def __init__(self, torch: Any, known: Collection[int], modules: Captured) -> None:
        self.held = Held()
        self._seen = set(known)
        self._captured = modules
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
        if key in self._seen or self._left <= 0 or isinstance(value, _INERT):
            return
        self._seen.add(key)
        if isinstance(value, self._tensor):
            self.held.tensors[path] = value
            return
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
        elif isinstance(value, (set, frozenset)):
            self._set(path, value)
        elif isinstance(value, self._module):
            self._modules(path, value, depth)
        elif isinstance(value, (self._generator, random.Random)) or _is_numpy_generator(value):
            if not isinstance(value, random.SystemRandom):
                self.held.generators[path] = value
        elif _is_array(value):
            if value.nbytes <= MAX_ARRAY_BYTES and value.dtype.kind in "biufc" and type(value).__name__ == "ndarray":
                self.held.arrays[path] = value
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            if frame is not None and is_program(frame.f_code.co_filename):
                for name, item in list(frame.f_locals.items()):
                    self.visit(f"{path}<{frame.f_code.co_name}>.{name}", item, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(path, value, depth)
        elif isinstance(value, type):
            if _is_looked_into(value):
                self._attributes(path, dict(vars(value)), depth)
        elif hasattr(value, "item") and type(value).__module__ == "numpy":
            self.held.values[path] = value.item()
        else:
            self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        own = getattr(value, "__dict__", None)
        if self._is_program_type(kind):
            if isinstance(own, dict):
                self._attributes(path, own, depth)
            for name in _slots_of(kind):
                if hasattr(value, name):
                    self.visit(f"{path}.{name}", getattr(value, name), depth)
        elif isinstance(own, dict) and not kind.__module__.startswith("torch."):
            self._foreign(path, own)

    def _attributes(self, path: str, attributes: dict[str, Any], depth: int) -> None:
        for name, item in list(attributes.items()):
            if not name.startswith("__"):
                self.visit(f"{path}.{name}", item, depth)

    def _foreign(self, path: str, attributes: dict[str, Any]) -> None:
        """Of an installed package's object: tensors and generators that it holds itself, or in a list."""
        for name, item in list(attributes.items()):
            if isinstance(item, (self._tensor, self._generator)):
                self.visit(f"{path}.{name}", item, 1)
            elif type(item) is list and item and len(item) <= MAX_WALKED_ITEMS and isinstance(item[0], self._tensor):
                for i, part in enumerate(item):
                    if isinstance(part, self._tensor):
                        self.visit(f"{path}.{name}[{i}]", part, 0)

    def _function(self, path: str, value: Any, depth: int) -> None:
        """What a function holds: its closure, the object it belongs to, the arguments it was given beforehand."""
        if isinstance(value, types.MethodType):
            self.visit(f"{path}.self", value.__self__, depth)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self.visit(f"{path}.{name}", getattr(value, name), depth)
        elif is_program(value.__code__.co_filename):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                try:
                    item = cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
                self.visit(f"{path}<{value.__name__}>.{name}", item, depth)
        elif hasattr(value, "__wrapped__"):
            self.visit(path, value.__wrapped__, depth)

    def _sequence(self, path: str, value: Any, depth: int) -> None:
        count = len(value)
        if count <= MAX_WALKED_ITEMS:
            self.held.values[f"{path}.len"] = count
            for i, item in enumerate(list(value)):
                self.visit(f"{path}[{i}]", item, depth)
            return
        first = value[0]
        if isinstance(first, _PLAIN):
            self.held.values[f"{path}.len"] = count
            for i in range(count - LAST_ITEMS, count):
                self.visit(f"{path}[{i}]", value[i], 0)
        elif count <= MAX_ITEMS and isinstance(first, self._tensor):
            for i, item in enumerate(list(value)):
                self.visit(f"{path}[{i}]", item, 0)

    def _set(self, path: str, value: Any) -> None:
        self.held.values[f"{path}.len"] = len(value)
        if len(value) <= MAX_WALKED_ITEMS and all(isinstance(item, _PLAIN) for item in value):
            self.held.values[f"{path}.set"] = hash_text(repr(sorted(map(repr, value))))

    def _modules(self, path: str, root: Any, depth: int) -> None:
        is_captured = root in self._captured
        for name, module in self._captured.parts(root) if is_captured else root.named_modules():
            where = f"{path}.{name}" if name else path
            self._seen.add(id(module))
            if not is_captured:
                for own in ("_parameters", "_buffers"):
                    for key, tensor in (module.__dict__.get(own) or {}).items():
                        if tensor is not None:
                            self.visit(f"{where}.{key}", tensor, 0)
            kind = type(module)
            if self._is_program_type(kind):
                for key, item in list(vars(module).items()):
                    if not key.startswith("_") and key != "training":
                        self.held.attributes[f"{where}.{key}"] = (module, key)
                        self.visit(f"{where}.{key}", item, min(depth, 2))
            elif not kind.__module__.startswith("torch."):
                self._foreign(where, {k: v for k, v in vars(module).items() if not k.startswith("_")})

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


def _slots_of(kind: type) -> tuple[str, ...]:
    known = _slots.get(kind)
    if known is None:
        found: list[str] = []
        for base in kind.__mro__:
            names = base.__dict__.get("__slots__", ())
            found += [names] if isinstance(names, str) else list(names)
        known = _slots[kind] = tuple(n for n in found if not n.startswith("__"))
    return known


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
