"""Values of a training state as JSON, and back with their exact types.

Nothing is pickled. ``None``, booleans, strings, whole numbers, finite floats (their shortest form is exact) and lists
stand for themselves; everything else is an object with the one key of its kind:

| kind | holds |
| --- | --- |
| ``float`` | ``"nan"``, ``"inf"`` or ``"-inf"`` |
| ``tuple``, ``set``, ``frozenset``, ``size`` | a list |
| ``dict``, ``ordered``, ``counter`` | pairs of key and value, in order |
| ``deque`` | its limit, then its elements |
| ``bytes`` | hexadecimal digits |
| ``dtype``, ``device`` | its name |
| ``numpy`` | type, shape or null (a scalar), hexadecimal digits |
| ``tensor`` | the name of the item that has the bytes |

A value of any other type is refused, and the message says where it was found.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from lmres.adapters.capture.tensors import DTYPES
from lmres.errors import CaptureError

Path = tuple[object, ...]
Put = Callable[[torch.Tensor, Path], str]
Get = Callable[[str, object], torch.Tensor]

MAX_DEPTH = 64
_AS_IS = (type(None), bool, int, str)
_SEQUENCES: dict[Any, str] = {tuple: "tuple", frozenset: "frozenset", set: "set", torch.Size: "size"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKE: dict[str, Any] = {name: made for made, name in (_SEQUENCES | _MAPPINGS).items()}
_NUMPY_KINDS = "biufc"


def spelled(path: Path) -> str:
    """A path as a message shows it."""
    return ": ".join(str(part) for part in path)


def encode(value: Any, path: Path, put: Put, depth: int = 0) -> Any:
    """A value as JSON. ``put`` stores a tensor and answers with the name of its item."""
    kind: Any = type(value)
    if kind in _AS_IS:
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": put(value, path)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if depth >= MAX_DEPTH:
        raise CaptureError(f"{spelled(path)} is nested deeper than {MAX_DEPTH} levels, or holds itself")
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        # The elements of a set have no order of their own.
        parts: Iterable[Any] = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [encode(part, (*path, index), put, depth + 1) for index, part in enumerate(parts)]
        if kind is list:
            return encoded
        if isinstance(value, deque):
            return {"deque": [value.maxlen, encoded]}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: encoded}
    if kind in _MAPPINGS:
        items: dict[Any, Any] = value
        pairs = [
            [encode(key, (*path, "key"), put, depth + 1), encode(part, (*path, key), put, depth + 1)]
            for key, part in items.items()
        ]
        return {_MAPPINGS[kind]: pairs}
    if kind in (bytes, bytearray):
        return {"bytes" if kind is bytes else "bytearray": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return _encode_numpy(value, path)


def _encode_numpy(value: Any, path: Path) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, None, value.tobytes().hex()]}
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    kind = type(value)
    raise CaptureError(
        f"{spelled(path)} is a {kind.__module__}.{kind.__qualname__}: only tensors, numbers, text, None and "
        "lists, tuples, sets and dictionaries of those can be captured"
    )


def check(value: object, tensors: Container[str] = (), depth: int = 0) -> None:
    """Raise CaptureError unless this is JSON that ``encode`` could have written, with these items."""
    if type(value) in _AS_IS or type(value) is float:
        return
    if depth > 2 * MAX_DEPTH:
        raise CaptureError("the captured values are nested too deeply")
    if isinstance(value, list):
        for part in value:
            check(part, tensors, depth + 1)
        return
    if not isinstance(value, dict) or len(value) != 1:
        raise CaptureError(f"the captured values hold {_short(value)}, which is no value of this format")
    ((kind, body),) = value.items()
    if not _body_fits(kind, body, tensors, depth):
        raise CaptureError(f"the captured values hold a '{kind}' of {_short(body)}, which is no value of this format")


def _body_fits(kind: str, body: Any, tensors: Container[str], depth: int) -> bool:
    if kind in ("tuple", "set", "frozenset", "size") and isinstance(body, list):
        check(body, tensors, depth + 1)
        return kind != "size" or all(type(part) is int and part >= 0 for part in body)
    if kind in ("dict", "ordered", "counter") and isinstance(body, list):
        for pair in body:
            if not isinstance(pair, list) or len(pair) != 2 or not _hashable(pair[0]):
                return False
            check(pair[0], (), depth + 1)
            check(pair[1], tensors, depth + 1)
        return True
    if kind == "deque":
        if not isinstance(body, list) or len(body) != 2 or not isinstance(body[1], list):
            return False
        check(body[1], tensors, depth + 1)
        return body[0] is None or (type(body[0]) is int and body[0] >= len(body[1]))
    if kind == "numpy":
        return _numpy_fits(body)
    if not isinstance(body, str):
        return False
    match kind:
        case "tensor":
            return body in tensors
        case "float":
            return body in ("nan", "inf", "-inf")
        case "bytes" | "bytearray":
            return _is_hex(body)
        case "dtype":
            return isinstance(getattr(torch, body, None), torch.dtype)
        case "device":
            return body.partition(":")[0] in ("cpu", "cuda", "meta")
    return False


def _hashable(key: object) -> bool:
    return not isinstance(key, list) and (
        not isinstance(key, dict)
        or all(
            kind in ("tuple", "frozenset", "float", "bytes", "dtype", "device", "size", "numpy")
            and (not isinstance(body, list) or kind == "numpy" or all(_hashable(part) for part in body))
            for kind, body in key.items()
        )
    )


def _is_hex(text: object) -> bool:
    try:
        return isinstance(text, str) and bytes.fromhex(text) is not None
    except ValueError:
        return False


def _numpy_fits(body: Any) -> bool:
    if not isinstance(body, list) or len(body) != 3 or not isinstance(body[0], str) or not _is_hex(body[2]):
        return False
    kind = body[0]
    if len(kind) not in (3, 4) or kind[0] not in "<>|" or kind[1] not in _NUMPY_KINDS or not kind[2:].isdigit():
        return False
    shape = [] if body[1] is None else body[1]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return False
    return bool(math.prod(shape) * int(kind[2:]) == len(body[2]) // 2)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def decode(value: Any, get: Get, into: object = None) -> Any:
    """The value again. ``get(item, into)`` answers for a tensor; ``into`` is what stands in its place now."""
    if isinstance(value, list):
        return [decode(part, get, _at(into, index)) for index, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    match kind:
        case "tensor":
            return get(body, into)
        case "float":
            return float(body)
        case "tuple" | "set" | "frozenset" | "size":
            return _MAKE[kind](decode(body, get, into if kind == "tuple" else None))
        case "dict" | "ordered" | "counter":
            keys = [decode(key, get) for key, _ in body]
            here: dict[Any, Any] = into if isinstance(into, dict) else {}
            found = {key: decode(part, get, here.get(key)) for key, (_, part) in zip(keys, body, strict=True)}
            return _MAKE[kind](found)
        case "deque":
            return deque(decode(body[1], get), maxlen=body[0])
        case "bytes":
            return bytes.fromhex(body)
        case "bytearray":
            return bytearray.fromhex(body)
        case "dtype":
            return DTYPES[body] if body in DTYPES else getattr(torch, body)
        case "device":
            return torch.device(body)
        case "numpy":
            return _decode_numpy(body)
    raise CaptureError(f"'{kind}' is no kind of value of this format")


def _at(into: object, index: int) -> object:
    return into[index] if isinstance(into, (list, tuple)) and index < len(into) else None


def _decode_numpy(body: list[Any]) -> Any:
    import numpy

    array = numpy.frombuffer(bytes.fromhex(body[2]), dtype=body[0])
    return array[0] if body[1] is None else array.reshape(body[1]).copy()
