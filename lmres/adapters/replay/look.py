"""One function of the program by its source: what it does to what it did not make itself.

Names are followed: one that is assigned from ``self.x`` stands for that object, as it is now. What is the function's
own (fresh results, its arguments) stands for nothing, and may be changed.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any

from lmres.adapters.replay import values as kinds
from lmres.adapters.replay.values import GIVEN, UNKNOWN, Unseen

# Called on what is not the function's own:
_CHANGING_WORDS = """
append extend insert add update pop popitem remove discard clear setdefault appendleft popleft write writelines put
put_nowait sendall acquire release register_buffer register_parameter register_module register_hook add_module step
register_forward_hook register_forward_pre_hook register_full_backward_hook zero_grad load_state_dict requires_grad_
train eval apply_ log log_dict log_metric info debug warning error add_scalar
"""
_CHANGING_A_TENSOR = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "set", "resize"})
_CHANGING_A_MODULE = frozenset({"to", "cuda", "cpu", "half", "float", "double", "bfloat16", "apply", "to_empty"})
# Called on anything:
_NEVER_WORDS = """
print open input exec eval setattr delattr breakpoint exit quit globals compile backward manual_seed sleep system
all_reduce all_gather reduce_scatter all_to_all barrier all_gather_into_tensor reduce_scatter_tensor all_to_all_single
isend irecv next anext __next__ __setattr__ __setitem__ seed
"""
_COLLECTIVE = frozenset({"dist", "distributed"})
# They only look at a module or go through it:
_HARMLESS_WORDS = "isinstance type hasattr len enumerate zip reversed list tuple super id callable bool"
_GOING_THROUGH = frozenset({"enumerate", "zip", "reversed", "list", "tuple", "iter", "sorted"})
_FRESH_OF_TENSOR_WORDS = """
clone size dim numel item tolist stride sum mean exp log sqrt rsqrt sigmoid tanh softmax matmul mm mul add sub div pow
norm repeat new_zeros new_ones new_empty index_select gather cos sin neg abs
"""
_VIEWS_WORDS = """
reshape flatten ravel transpose permute unsqueeze squeeze narrow select movedim swapaxes chunk split tensor_split unbind
as_strided real imag view_as_real view_as_complex broadcast_to broadcast_tensors atleast_1d atleast_2d atleast_3d detach
t diagonal asarray as_tensor rearrange dropout
"""
_LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
_NAMING = (
    *(ast.Name, ast.arg, ast.FunctionDef, ast.ClassDef, ast.ExceptHandler, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.withitem, *_LOOPS),
)
_CHANGING = frozenset(_CHANGING_WORDS.split())
_NEVER = frozenset(_NEVER_WORDS.split())
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
_FRESH_OF_TENSOR = frozenset(_FRESH_OF_TENSOR_WORDS.split())
_VIEWS = frozenset(_VIEWS_WORDS.split())


class Look(ast.NodeVisitor):
    """``reason``: the first thing that speaks against calling it. ``judge``: why a value should not be read."""

    def __init__(
        self, node: Any, function: Any, first: list[Any], rest: list[Any], judge: Callable[[Any, bool, bool], str]
    ) -> None:
        self.reason = ""
        self._judge = judge
        self._spaces = [_closure(function), getattr(function, "__globals__", {}), vars(builtins)]
        self._names: dict[str, list[Any]] = _parameters(node.args, function, first, rest)
        self._first = first
        self._known: dict[int, list[Any]] | None = None
        body = node.body if isinstance(node.body, list) else [node.body]
        self._follow_names(_naming(node))
        self._known = {}
        for child in body:
            self.visit(child)

    # -- what names stand for -----------------------------------------------------------------------------------------

    def _follow_names(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.Name):
                self._names.setdefault(node.id, [])
            elif isinstance(node, ast.arg):
                self._names.setdefault(node.arg, [])
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
                self._names.setdefault(node.name or "", [])
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._names.update(_imported(node))
        for _ in range(4):
            before = sum(map(len, self._names.values()))
            for node in nodes:
                self._bind_all(node)
            if sum(map(len, self._names.values())) == before:
                break

    def _bind_all(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, _LOOPS):
            self._bind_each(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr)

    def _bind(self, target: ast.AST, value: ast.expr) -> None:
        pairs = (ast.Tuple, ast.List)
        if isinstance(target, pairs) and isinstance(value, pairs) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._bind(one, other)
        else:
            self._put(target, self.values(value))

    def _bind_each(self, target: ast.AST, iterated: ast.expr) -> None:
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and isinstance(target, ast.Tuple):
            args = iterated.args
            if iterated.func.id == "enumerate" and len(target.elts) == 2 and args:
                return self._bind_each(target.elts[1], args[0])
            if iterated.func.id == "zip" and len(target.elts) == len(args):
                for one, other in zip(target.elts, args, strict=True):
                    self._bind_each(one, other)
                return None
        if isinstance(iterated, (ast.Tuple, ast.List)):
            return self._put(target, [v for each in iterated.elts for v in self.values(each)])
        return self._put(target, [each for value in self.values(iterated) for each in kinds.elements(value)])

    def _put(self, target: ast.AST, found: list[Any]) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = _once([*self._names.get(target.id, []), *found])
        elif isinstance(target, ast.Starred):
            self._put(target.value, found)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._put(part, [each for value in found for each in kinds.elements(value)])

    # -- what an expression stands for --------------------------------------------------------------------------------

    def values(self, node: ast.AST) -> list[Any]:
        """The objects that it may be, or be a view of; none if it is the function's own, or a number."""
        if self._known is not None and id(node) in self._known:
            return self._known[id(node)]
        found = _once(list(self._values(node)))
        if self._known is not None:
            self._known[id(node)] = found
        return found

    def _values(self, node: ast.AST) -> Iterator[Any]:
        if isinstance(node, ast.Name):
            yield from self._named(node.id)
        elif isinstance(node, ast.Attribute):
            for base in self.values(node.value):
                found = kinds.attribute(base, node.attr)
                if isinstance(found, property):
                    why = self._judge(MethodType(found.fget, base), False, True) if found.fget is not None else ""
                    yield Unseen(why) if why else GIVEN
                elif not kinds.is_plain(found):
                    yield found
        elif isinstance(node, ast.Subscript):
            for base in self.values(node.value):
                yield from [base] if isinstance(node.slice, ast.Slice) else kinds.elements(base)
        elif isinstance(node, ast.Call):
            yield from self._given_by(node)
        elif isinstance(node, (ast.Starred, ast.NamedExpr)):
            yield from self.values(node.value)
        elif isinstance(node, ast.IfExp):
            yield from [*self.values(node.body), *self.values(node.orelse)]
        elif isinstance(node, ast.BoolOp):
            yield from [found for each in node.values for found in self.values(each)]
        elif isinstance(node, (ast.List, ast.Set, ast.Tuple)):
            soft = all(kinds.is_soft(found) for each in node.elts for found in self.values(each))
            yield from [] if soft else [UNKNOWN]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            yield from [] if all(map(kinds.is_soft, self.values(node.elt))) else [UNKNOWN]

    def _named(self, name: str) -> list[Any]:
        if name in self._names:
            return self._names[name]
        for space in self._spaces:
            if name in space:
                return [] if kinds.is_plain(space[name]) else [space[name]]
        return [UNKNOWN]

    def _given_by(self, node: ast.Call) -> Iterator[Any]:
        called = node.func
        handed = [found for arg in node.args for found in self.values(arg)]
        if isinstance(called, ast.Name) and called.id == "super" and "super" not in self._names:
            yield self._above(node)
            return
        if isinstance(called, ast.Name) and called.id in _GOING_THROUGH:
            yield from handed
            return
        name = called.attr if isinstance(called, ast.Attribute) else ""
        for base in self.values(called.value) if isinstance(called, ast.Attribute) else ():
            if kinds.is_soft(base):
                if name not in _FRESH_OF_TENSOR:
                    yield base
            elif kinds.is_module(base):
                found = kinds.attribute(base, name)
                if name in ("values", "items"):
                    yield base
                elif isinstance(found, MethodType) and kinds.is_known(found) and name not in ("forward", "keys"):
                    yield UNKNOWN  # its parameters, say
            elif isinstance(base, ModuleType) and name in _VIEWS:
                yield from handed
        if isinstance(called, ast.Name) and called.id in _VIEWS:
            yield from handed
        if any(found is UNKNOWN for found in self.values(called)):
            yield UNKNOWN

    def _above(self, node: ast.Call) -> Any:
        given = [self.values(arg) for arg in node.args]
        kind = given[0][0] if given and given[0] else self._spaces[0].get("__class__")
        try:
            return super(kind, self._first[0])
        except (TypeError, IndexError):
            return UNKNOWN

    # -- what speaks against it ---------------------------------------------------------------------------------------

    def _against(self, node: ast.AST, what: str) -> None:
        self.reason = self.reason or what

    def _read(self, node: ast.Name | ast.Attribute, *, whole: bool, called: bool = False) -> None:
        for value in self.values(node):
            why = self._judge(value, whole, called)
            if why:
                self._against(node, f"{ast.unparse(node)}: {why}")
        if isinstance(node, ast.Attribute):
            self._read_below(node.value)

    def _read_below(self, node: ast.expr) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            self._read(node, whole=False)
        else:
            self.visit(node)

    def _target(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Tuple, ast.List)):
            for part in node.elts:
                self._target(part)
        elif isinstance(node, ast.Starred):
            self._target(node.value)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and self.values(node.value):
            self._against(node, f"{ast.unparse(node)} is assigned to")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node, whole=True)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node, whole=True)
        else:
            self._read_below(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._target(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """``x += 1`` changes a tensor in place, so the name must be the function's own."""
        base = node.target if isinstance(node.target, ast.Name) else node.target.value
        if self.values(base):
            self._against(node, f"{ast.unparse(node.target)} is changed in place")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._target(node.target)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._target(node.optional_vars)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in [*node.args.defaults, *node.decorator_list, *node.body]:
            self.visit(child)

    def visit_Global(self, node: ast.Global) -> None:
        self._against(node, "global")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._against(node, "nonlocal")

    def visit_Yield(self, node: ast.Yield) -> None:
        self._against(node, "yield")

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self._against(node, "yield")

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        shown = ast.unparse(called)
        if name in _NEVER or _root(called) in _COLLECTIVE or ".distributed." in shown:
            self._against(node, f"{shown}() is called")
        if isinstance(called, ast.Attribute) and self._changes(name, self.values(called.value)):
            self._against(node, f"{shown}() is called")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        handed = [found for argument in arguments for found in self.values(argument)]
        into = any(k.arg in ("out", "inplace") and not _is_no(k.value) for k in node.keywords)
        if handed and (into or _is_in_place(name)):
            self._against(node, f"{shown}() changes what it is given")
        if any(_is_object(found) for found in handed) and not self._is_harmless(called):
            self._against(node, f"{shown}() is given a whole object")
        if isinstance(called, (ast.Name, ast.Attribute)):
            self._read(called, whole=False, called=True)
        else:
            self.visit(called)
        for argument in arguments:
            self.visit(argument)

    def _changes(self, name: str, on: list[Any]) -> bool:
        held = [value for value in on if not isinstance(value, ModuleType)]
        if all(kinds.is_soft(value) for value in held):
            return bool(held) and (_is_in_place(name) or name in _CHANGING_A_TENSOR)
        if name in _CHANGING_A_MODULE and any(kinds.is_module(value) for value in held):
            return True
        return _is_in_place(name) or name in _CHANGING

    def _is_harmless(self, called: ast.expr) -> bool:
        """Of functions that are given a module."""
        if isinstance(called, ast.Name) and called.id in _HARMLESS and called.id not in self._names:
            return True
        functions = self.values(called)
        torchs = [f for f in functions if not isinstance(f, type) and kinds.is_function(f) and kinds.is_known(f)]
        return bool(functions) and len(torchs) == len(functions) and getattr(called, "id", "") not in vars(builtins)


@functools.lru_cache(maxsize=1024)
def _naming(function: Any) -> list[ast.AST]:
    """What in it makes or changes what a name stands for."""
    body = function.body if isinstance(function.body, list) else [function.body]
    found = [node for child in body for node in ast.walk(child) if isinstance(node, _NAMING)]
    return [node for node in found if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))]


def _is_object(value: Any) -> bool:
    """What the one that gets it could change by its attributes."""
    return not (kinds.is_soft(value) or isinstance(value, (type, ModuleType)) or kinds.is_function(value))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_no(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _parameters(arguments: ast.arguments, function: Any, first: list[Any], rest: list[Any]) -> dict[str, list[Any]]:
    ordered = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    others = [a.arg for a in (arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if a is not None]
    found = {name: [UNKNOWN] if name in ("self", "module", "cls") else rest for name in (*ordered, *others)}
    defaults = dict(zip(reversed(ordered), reversed(function.__defaults__ or ()), strict=False))
    for name, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
        if name in found and not kinds.is_plain(value):
            found[name] = [*rest, value]
    return {**found, **{name: [value] for name, value in zip(ordered, first, strict=False)}}


def _closure(function: Any) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found[name] = UNKNOWN
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for alias in node.names:
        if isinstance(node, ast.Import):
            whole = sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0], UNKNOWN)
            found[alias.asname or alias.name.partition(".")[0]] = [whole]
        else:
            source = sys.modules.get(node.module or "") if not node.level else None
            value = getattr(source, alias.name, UNKNOWN)
            found[alias.asname or alias.name] = [] if kinds.is_plain(value) else [value]
    return found


def _once(found: list[Any]) -> list[Any]:
    return list({id(value): value for value in found}.values())


def _root(node: ast.AST) -> str:
    """The name at the beginning of ``a.b[c].d``; empty if it is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
