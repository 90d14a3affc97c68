"""Which names of a program may hold values that no two lives share: clocks, process ids, temporary names.

The certificate of a fast-forward compares the program's Python values with those of the first life. What comes from a
clock differs and means nothing. Where such values go is found in the source: a name that is assigned from an
expression with such a call, or with a name found before, is volatile. Names are taken by themselves, without scope, in
one file: too many rather than too few, since the values that matter are replayed anyway.
"""

from __future__ import annotations

import ast

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
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_info",
        "cpu_percent",
    ]
)
MAX_ROUNDS = 8


def volatile_names(source: str) -> frozenset[str]:
    """Variables and attributes of one file that may come from a clock. Empty if the source can not be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
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
            case _:
                pass
    return flows


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
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    found: set[str] = set()
    for own in parameters.get(name, ()):
        found.update(own[i] for i, value in enumerate(call.args) if i < len(own) and _is_volatile(value, names))
        found.update(k.arg for k in call.keywords if k.arg in own and _is_volatile(k.value, names))
    return found
