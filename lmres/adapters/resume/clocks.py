"""Which names of a program may hold values that no two lives share: clocks, process ids, temporary names.

The certificate of a fast-forward compares the program's Python values with those of the first life. What comes from a
clock differs and means nothing. Where such values go is found in the source: a name that is assigned from an
expression with such a call, or with a name found before, is volatile. Names are taken by themselves, without scope, in
one file: too many rather than too few, since the values that matter are replayed anyway.

A program may also read its tensors by the clock (a line of progress every ten seconds). ``clocked_lines`` finds where;
there a life may read what another one did not.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

VOLATILE_CALLS = frozenset(
    [
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "now",
        "utcnow",
        "today",
        "ctime",
        "strftime",
        "asctime",
        "localtime",
        "gmtime",
        "timer",
        "default_timer",
        "elapsed_time",
        "getpid",
        "getppid",
        "gethostname",
        "mkdtemp",
        "mkstemp",
        "mktemp",
        "gettempdir",
        "TemporaryDirectory",
        "NamedTemporaryFile",
        "uuid1",
        "uuid4",
        "urandom",
        "token_hex",
        "id",
        "data_ptr",
        "seed",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_info",
        "cpu_percent",
    ]
)
_MUTATORS = frozenset(["append", "appendleft", "extend", "insert", "add", "update", "record", "put", "setdefault"])
MAX_ROUNDS = 8


def volatile_names(source: str) -> frozenset[str]:
    """Variables and attributes of one file that may come from a clock. Empty if the source can not be parsed."""
    tree = _parse(source)
    return _volatile(tree) if tree is not None else frozenset()


def clocked_lines(source: str) -> frozenset[int]:
    """The lines of one file that run or not by the clock: what is under a condition on a volatile name or call, and
    what follows when such a condition returns from the function or continues the loop; with the functions called there.
    """
    tree = _parse(source)
    if tree is None:
        return frozenset()
    names = set(_volatile(tree))
    found: set[int] = set()
    called: set[str] = set()

    def mark(nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
            found.update(range(first, last + 1))
            called.update(_callee(call) for call in ast.walk(node) if isinstance(call, ast.Call))

    for node in ast.walk(tree):
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            for at, statement in enumerate(body):
                if isinstance(statement, (ast.If, ast.While)) and _is_volatile(statement.test, names):
                    mark([*statement.body, *statement.orelse])
                    if any(isinstance(last, (ast.Return, ast.Continue)) for last in statement.body[-1:]):
                        mark(body[at + 1 :])
        if isinstance(node, ast.IfExp) and _is_volatile(node.test, names):
            mark([node])
    for _ in range(MAX_ROUNDS):
        before = len(called)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in called:
                mark(node.body)
        if len(called) == before:
            break
    return frozenset(found)


def _callee(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else str(getattr(call.func, "attr", ""))


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _volatile(tree: ast.Module) -> frozenset[str]:
    flows = list(_flows(tree))
    parameters = _parameters(tree)
    found: set[str] = set()
    for _ in range(MAX_ROUNDS):
        before = len(found)
        for targets, value in flows:
            if _is_volatile(value, found):
                found.update(targets)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found.update(_into_parameters(node, parameters, found))
        if len(found) == before:
            break
    return frozenset(found)


def names_from(source: str, constants: Collection[str]) -> frozenset[str]:
    """Variables and attributes that are assigned from an expression with one of these texts in it, such as
    ``int(os.environ["RANK"])``; not what is made of them later."""
    tree = _parse(source)
    found: set[str] = set()
    for targets, value in _flows(tree) if tree is not None else ():
        if any(isinstance(node, ast.Constant) and node.value in constants for node in ast.walk(value)):
            found.update(targets)
    return frozenset(found)


def _flows(tree: ast.AST) -> list[tuple[list[str], ast.expr]]:
    flows: list[tuple[list[str], ast.expr]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    flows += _pairs(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                flows += _pairs(target, value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                flows += _pairs(target, value)
            case ast.With(items=items):
                for item in items:
                    if item.optional_vars is not None:
                        flows += _pairs(item.optional_vars, item.context_expr)
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if method in _MUTATORS:
                flows += [([t for t in _targets(target) if t != "self"], value) for value in _given(node)]
            case _:
                pass
    return flows


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[list[str], ast.expr]]:
    """``a, b = x, y`` flows element by element."""
    same = isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
    if same and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        return [p for t, v in zip(target.elts, value.elts, strict=True) for p in _pairs(t, v)]  # type: ignore[attr-defined]
    return [(_targets(target), value)]


def _targets(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(attr=name):
            return [name]
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _targets(inner)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [name for element in elements for name in _targets(element)]
        case _:
            return []


def _is_volatile(value: ast.expr, names: set[str]) -> bool:
    for node in ast.walk(value):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in VOLATILE_CALLS:
                return True
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) if name in names:
                return True
            case _:
                pass
    return False


def _parameters(tree: ast.AST) -> dict[str, list[list[str]]]:
    """Function name to the parameter names of each function so called, without a method's own object."""
    methods = {f for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            found.setdefault(node.name, []).append(names[1:] if node in methods else names)
    return found


def _into_parameters(call: ast.Call, parameters: dict[str, list[list[str]]], names: set[str]) -> set[str]:
    name = _callee(call)
    found: set[str] = set()
    for own in parameters.get(name, ()):
        found.update(own[i] for i, value in enumerate(call.args) if i < len(own) and _is_volatile(value, names))
        found.update(k.arg for k in call.keywords if k.arg in own and _is_volatile(k.value, names))
    return found
