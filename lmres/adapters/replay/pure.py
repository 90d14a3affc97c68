"""Whether a function may be called an extra time: by its source and what it reads, as far as that can tell.

What is looked for is whatever outlives the call: assignments to attributes or to items of what the function did not
make itself, ``global`` and ``nonlocal``, methods that change what they are called on, output, collectives
(``look.py``); generators, iterators and containers that it reads from its module or elsewhere (``values.py``).
Functions of the program that it calls are looked at too. torch's own are known: they change nothing but buffers, which
are put back. In doubt the answer is no.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import MethodType
from typing import Any

from lmres.adapters.replay import values
from lmres.adapters.replay.look import Look
from lmres.adapters.replay.values import GIVEN

MAX_DEPTH = 12


def why_not(function: Callable[..., Any], module: Any = None, *, hook: bool = False) -> str:
    """Why this function should not be called an extra time; empty if nothing speaks against it. ``module``: on whose
    behalf it is called; a ``hook`` is given it as its first argument."""
    inside = frozenset(id(m) for m in module.modules()) if module is not None else None
    if inside is None and values.is_module(getattr(function, "__self__", None)):
        inside = frozenset(id(m) for m in getattr(function, "__self__").modules())  # noqa: B009
    return _Check(inside or frozenset()).function(function, [module] if hook else [], [])


class _Check:
    """``inside``: the modules that may be called, which are looked at by themselves."""

    def __init__(self, inside: frozenset[int]) -> None:
        self._inside = inside
        self._seen: set[tuple[int, ...]] = set()

    def function(self, function: Any, first: list[Any], rest: list[Any], depth: int = 0) -> str:
        """``first``: what its first arguments are; ``rest``: what the others stand for."""
        while isinstance(function, functools.partial):
            for held in (*function.args, *function.keywords.values()):
                why = self._value(held, True, False, depth)
                if why:
                    return why
            function = function.func
        if _is_own_gradient(function):
            return self._own_gradient(function.__self__, depth)
        kept = values.is_kept(getattr(function, "__self__", None))
        shown = f"{getattr(function, '__qualname__', type(function).__name__)}"
        if depth > MAX_DEPTH:
            return f"{shown} is called too deep"
        if isinstance(function, MethodType):
            first, function = [function.__self__, *first], function.__func__
        wrapped = getattr(function, "__wrapped__", None)
        if inspect.isfunction(function) and inspect.isfunction(wrapped):
            why = self.function(wrapped, first, rest, depth + 1)
            if why:
                return why
        if kept or values.is_known(function):
            return ""
        code = getattr(function, "__code__", None)
        if code is None:
            call: Any = getattr(type(function), "__call__")  # noqa: B004, B009
            if hasattr(call, "__code__"):
                return self.function(MethodType(call, function), first, rest, depth + 1)
            return f"{function!r:.80} has no source"
        key = (id(function), *map(id, first))
        if key in self._seen:
            return ""
        self._seen.add(key)
        node = _node_of(code)
        if isinstance(node, str):
            return node
        look = Look(node, function, first, rest, functools.partial(self._value, depth=depth + 1))
        return f"{shown}: {look.reason}" if look.reason else ""

    def _value(self, value: Any, whole: bool, called: bool, depth: int) -> str:
        why = values.problem_of_value(value, self._inside, whole=whole and not called)
        if why or isinstance(value, values.Unseen) or values.is_module(value) or isinstance(value, type):
            return why
        if values.is_function(value):
            holder = getattr(value, "__self__", None)
            if values.is_module(holder) and id(holder) not in self._inside:
                return "it is of a module of elsewhere"
            return self.function(value, [], [GIVEN], depth)
        return self.function(value, [], [GIVEN], depth) if called and not values.is_tensor(value) else ""

    def _own_gradient(self, kind: Any, depth: int) -> str:
        """What a ``torch.autograd.Function`` does; its context is its own."""
        for name in ("forward", "setup_context", "backward", "vjp"):
            function = getattr(kind, name, None)
            why = self.function(function, [], [], depth + 1) if function is not None else ""
            if why:
                return why
        return ""


def _is_own_gradient(function: Any) -> bool:
    import torch

    kind = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") != "apply" or not isinstance(kind, type):
        return False
    return issubclass(kind, torch.autograd.Function)


@functools.lru_cache(maxsize=1024)
def _node_of(code: Any) -> Any:
    """Its function in the source, or why there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return f"the source of {code.co_name} can not be read"
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    named = [n for n in found if getattr(n, "name", "<lambda>") == code.co_name]
    return named[0] if len(named) == 1 else f"the source of {code.co_name} is not clear"
