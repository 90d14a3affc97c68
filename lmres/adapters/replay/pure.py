"""Whether a function may be called an extra time: by its source, as far as that can tell.

What is looked for is whatever outlives the call: assignments to attributes or to items of what the function did not
make itself, ``global`` and ``nonlocal``, methods that change what they are called on, output, collectives. Functions of
the program that it calls are looked at too. torch's own are known: they change nothing but buffers, which are put back.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 4

# Called on what is not the function's own:
_CHANGING_WORDS = """
append extend insert add update pop popitem remove discard clear setdefault appendleft popleft write writelines put
put_nowait sendall acquire release register_buffer register_parameter register_module register_hook add_module step
register_forward_hook register_forward_pre_hook register_full_backward_hook zero_grad load_state_dict requires_grad_
train eval apply_ log log_dict log_metric info debug warning error add_scalar
"""
# Called on anything:
_NEVER_WORDS = """
print open input exec eval setattr delattr breakpoint exit quit globals compile backward manual_seed sleep system
all_reduce all_gather reduce_scatter all_to_all barrier all_gather_into_tensor reduce_scatter_tensor all_to_all_single
isend irecv
"""
_CHANGING = frozenset(_CHANGING_WORDS.split())
_NEVER = frozenset(_NEVER_WORDS.split())
_LIBRARIES = frozenset({"torch", "F", "nn", "math", "np", "numpy", "functional", "einops"})
_COLLECTIVE = frozenset({"dist", "distributed"})


def why_not(function: Callable[..., Any], owner: Any = None, *, depth: int = 0) -> str:
    """Why this function should not be called an extra time; empty if nothing speaks against it. ``owner``: its self."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", owner)
    function = getattr(function, "__func__", function)
    if _is_known(function):
        return ""
    code = getattr(function, "__code__", None)
    if code is None:
        call: Any = getattr(type(function), "__call__")  # noqa: B004, B009
        if depth < MAX_DEPTH and hasattr(call, "__code__"):
            return why_not(call, function, depth=depth + 1)
        return f"{function!r:.80} has no source"
    looked = _of_code(code)
    if isinstance(looked, str):
        return looked
    if looked.reason:
        return f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}: {looked.reason}"
    if depth >= MAX_DEPTH:
        return ""
    for called in _called(looked, function, owner):
        why = why_not(called, depth=depth + 1)
        if why:
            return why
    return ""


def _is_known(function: Any) -> bool:
    """Of torch, of the standard library's C code, or of a library that works on arrays alone."""
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if module in ("torch", "numpy", "math", "einops") or isinstance(function, type):
        return True
    return inspect.isbuiltin(function) or type(function).__module__ in ("torch._ops", "torch._C", "builtins.ufunc")


def _called(looked: _Look, function: Any, owner: Any) -> Iterator[Callable[..., Any]]:
    """The program's own functions among those that are called by name, or on ``self``."""
    spaces = [getattr(function, "__globals__", {}), vars(builtins)]
    closure = inspect.getclosurevars(function).nonlocals if getattr(function, "__closure__", None) else {}
    for name in looked.names:
        found = closure.get(name, next((space[name] for space in spaces if name in space), None))
        if inspect.isfunction(found):
            yield found
    for name in looked.methods if owner is not None else ():
        found = getattr(owner, name, None)
        if inspect.ismethod(found) or inspect.isfunction(found):
            yield found


@functools.lru_cache(maxsize=1024)
def _of_code(code: Any) -> _Look | str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return f"the source of {code.co_name} can not be read"
    kinds = (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)
    named = [n for n in ast.walk(tree) if isinstance(n, kinds) and getattr(n, "name", "<lambda>") == code.co_name]
    return _Look(named[0]) if len(named) == 1 else f"the source of {code.co_name} is not clear"


class _Look(ast.NodeVisitor):
    """One function. ``reason``: the first thing that speaks against it. ``names``, ``methods``: what it calls by name,
    and on ``self``."""

    def __init__(self, function: ast.AST) -> None:
        self.reason = ""
        self.names: set[str] = set()
        self.methods: set[str] = set()
        self._own = _made_here(function)
        body = getattr(function, "body", [])
        for child in body if isinstance(body, list) else [body]:
            self.visit(child)

    def _against(self, node: ast.AST, what: str) -> None:
        self.reason = self.reason or what

    def _target(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Tuple, ast.List)):
            for part in node.elts:
                self._target(part)
        elif isinstance(node, ast.Starred):
            self._target(node.value)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and _root(node) not in self._own:
            self._against(node, f"{ast.unparse(node)} is assigned to")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._target(node.target)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """``x += 1`` changes a tensor in place, so the name must be the function's own."""
        if _root(node.target) not in self._own:
            self._against(node, f"{ast.unparse(node.target)} is changed in place")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target)

    def visit_Global(self, node: ast.Global) -> None:
        self._against(node, "global")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._against(node, "nonlocal")

    def visit_Yield(self, node: ast.Yield) -> None:
        self._against(node, "yield")

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        root = _root(called)
        if name in _NEVER or root in _COLLECTIVE or ".distributed." in ast.unparse(called):
            self._against(node, f"{ast.unparse(called)}() is called")
        elif isinstance(called, ast.Name):
            self.names.add(name)
        elif isinstance(called, ast.Attribute):
            if isinstance(called.value, ast.Name) and called.value.id == "self":
                self.methods.add(name)
            if root not in self._own and root not in _LIBRARIES:
                in_place = name.endswith("_") and not name.endswith("__")
                if in_place or name in _CHANGING:
                    self._against(node, f"{ast.unparse(called)}() is called")
        self.generic_visit(node)


def _made_here(function: ast.AST) -> frozenset[str]:
    """Names that the function assigns, and its arguments but the module: a replay makes these up, so that changing them
    harms nobody. A name for something else (``x = self.cache``) is not followed."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return frozenset(found - {"self", "module", "cls"})


def _root(node: ast.AST) -> str:
    """The name at the beginning of ``a.b[c].d``; empty if it is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
