"""Records to JSON text and back, strictly.

A record is a frozen dataclass. Its text is one JSON object that names its type as ``record``. Unknown fields are
ignored, so that a newer version may add some; a missing field without default, a wrong type or another kind is a
RecordError. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from functools import lru_cache
from typing import Any, TypeVar

from lmres.errors import RecordError

T = TypeVar("T")
MAX_DEPTH = 12
TYPE_KEY = "record"


def encode(record: object) -> str:
    """One line of JSON with sorted keys: equal records give equal text."""
    fields = _plain(record)
    assert TYPE_KEY not in fields
    body = {TYPE_KEY: type(record).__name__, **fields}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def decode(cls: type[T], text: str) -> T:
    """Raises RecordError if the text is not a whole record of this class."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected a {cls.__name__} record, found text that is not JSON: {text[:80]!r}") from error
    if not isinstance(body, dict) or body.get(TYPE_KEY) != cls.__name__:
        raise RecordError(f"expected a {cls.__name__} record, found {text[:80]!r}")
    try:
        value = _build(cls, body, cls.__name__, 0)
    except RecursionError as error:  # from showing what was found
        raise RecordError(f"expected a {cls.__name__} record, found text that is nested too deeply") from error
    return typing.cast(T, value)


def to_plain(record: object) -> dict[str, Any]:
    """The record as JSON values, for people and events."""
    return _plain(record)


def _plain(record: object) -> dict[str, Any]:
    assert dataclasses.is_dataclass(record)
    return {f.name: _value(getattr(record, f.name)) for f in dataclasses.fields(record)}


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    if isinstance(value, (tuple, list)):
        return [_value(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _value(v) for k, v in value.items()}
    return value


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, body: dict[str, Any], where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise RecordError(f"{where}: nested too deeply")
    values: dict[str, Any] = {}
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in body:
            values[field.name] = _check(hints[field.name], body[field.name], f"{where}.{field.name}", depth)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}.{field.name} is missing")
    try:
        return cls(**values)
    except (TypeError, ValueError, AssertionError) as error:
        raise RecordError(f"{where}: {error}") from error


def _check(hint: Any, value: Any, where: str, depth: int) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _check_union(hint, value, where, depth)
    if origin is tuple:
        return _check_tuple(hint, value, where, depth)
    if origin is typing.Literal:
        for allowed in typing.get_args(hint):
            if type(value) is type(allowed) and value == allowed:
                return value
        raise RecordError(f"{where}: expected one of {typing.get_args(hint)}, found {value!r:.80}")
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object, found {value!r:.80}")
        inner = typing.get_args(hint)[1]
        return {k: _check(inner, v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object, found {value!r:.80}")
        return _build(typing.cast(type, hint), value, where, depth + 1)
    return _check_scalar(hint, value, where)


def _check_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and type(value) in (int, float):
        return _finite(value, where)
    if hint is type(None) and value is None:
        return None
    if hint in (str, int, bool) and type(value) is hint:
        return value
    name = getattr(hint, "__name__", str(hint))
    raise RecordError(f"{where}: expected {name}, found {value!r:.80}")


def _finite(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError as error:
        raise RecordError(f"{where}: expected a float, found an integer that does not fit") from error
    if not math.isfinite(number):
        raise RecordError(f"{where}: expected a finite float, found {number}")
    return number


def _check_union(hint: Any, value: Any, where: str, depth: int) -> Any:
    problems = []
    for option in typing.get_args(hint):
        try:
            return _check(option, value, where, depth)
        except RecordError as error:
            problems.append(str(error))
    raise RecordError(problems[0])


def _check_tuple(hint: Any, value: Any, where: str, depth: int) -> Any:
    if not isinstance(value, list):
        raise RecordError(f"{where}: expected a list, found {value!r:.80}")
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_check(args[0], v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value))
    if len(args) != len(value):
        raise RecordError(f"{where}: expected {len(args)} items, found {len(value)}")
    return tuple(_check(a, v, f"{where}[{i}]", depth + 1) for i, (a, v) in enumerate(zip(args, value, strict=True)))
