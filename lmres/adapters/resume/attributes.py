"""Plain values that the forwards of the program's own modules have changed: counters, temperatures, histories.

No forward runs on the way back, so these are the one kind of plain value that the program does not come to by itself.
What was captured is put back: into attributes of modules only, and only where the first life had changed the value
since its loop began. Values of any other shape than a plain one, or a list or dictionary of plain ones, are left alone,
and the certificate finds them.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from lmres.adapters.resume.certificate import same

_MISSING = object()


class _Unfit(Exception):
    """It can not be put back."""


def put_back(
    attributes: Mapping[str, tuple[Any, str]],
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    settled: Collection[str],
    tensors: Collection[str],
) -> bool:
    """``attributes``: path to module and name. ``settled``: paths whose values the first life had not changed.
    ``tensors``: paths of captured tensors. Says whether anything was put back."""
    changed = False
    differing = [p for p in {*then, *now} if p not in settled and not same(then.get(p, _MISSING), now.get(p, _MISSING))]
    for path, (module, name) in attributes.items():
        if not any(_is_below(p, path) for p in differing) or any(_is_below(p, path) for p in tensors):
            continue
        try:
            _put(module, name, path, then)
        except _Unfit:
            continue
        changed = True
    return changed


def _is_below(path: str, top: str) -> bool:
    return path.startswith(top) and path[len(top) : len(top) + 1] in ("", "[", ".")


def _put(module: Any, name: str, path: str, then: Mapping[str, Any]) -> None:
    value = vars(module)[name]
    if path in then:
        setattr(module, name, _plain(value, then[path]))
    elif isinstance(value, (list, deque, tuple)):
        items = [_plain(None, _find(then, f"{path}[{i}]")) for i in range(_find(then, f"{path}.len"))]
        if isinstance(value, tuple):
            setattr(module, name, tuple(items))
        else:
            value.clear()
            value.extend(items)
    elif isinstance(value, dict):
        found = {_key(p[len(path) :]): _plain(None, v) for p, v in then.items() if _is_below(p, path)}
        value.clear()
        value.update(found)
    else:
        raise _Unfit


def _find(then: Mapping[str, Any], path: str) -> Any:
    if path not in then:
        raise _Unfit
    return then[path]


def _plain(value: Any, captured: Any) -> Any:
    if isinstance(captured, tuple):  # a long text is known by its hash
        raise _Unfit
    return type(value)(captured) if type(value).__module__ == "numpy" else captured


def _key(text: str) -> Any:
    """Of ``['name']``."""
    try:
        key = ast.literal_eval(text[1:-1])
    except (SyntaxError, ValueError):
        raise _Unfit from None
    if f"[{key!r}]" != text:
        raise _Unfit
    return key
