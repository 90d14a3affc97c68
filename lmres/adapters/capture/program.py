"""How a program's objects are looked through: modules, the shards behind them, code among the state."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    partial,
    type,
)


def walk(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of a tree once, with its dotted prefix; past methods that frameworks replace."""
    seen = set()
    waiting = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        waiting.extend(
            (f"{prefix}{name}.", child) for name, child in reversed(module._modules.items()) if child is not None
        )


def sharded_parameters(roots: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The shards behind gathered parameters, by the id of the gathered one (FSDP2)."""
    found = {}
    for root in roots:
        for _, module in walk(root):
            for parameter in fsdp_parameters(module):
                gathered = getattr(parameter, "_unsharded_param", None)
                if gathered is not None:
                    found[id(gathered)] = parameter.sharded_param
    return found


def fsdp_parameters(module: torch.nn.Module) -> list[Any]:
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def class_name(value: object) -> str:
    return type(value).__qualname__


def is_code(value: Any) -> bool:
    """Whether a value is the program's own code, or holds some, rather than state."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(part, _CODE) for part in value)
    return isinstance(value, (*_CODE, torch.optim.Optimizer))


def without_code(state: Any) -> Any:
    """A scheduler's state without functions, and without lists that hold one."""
    if type(state) is dict:
        return {key: without_code(value) for key, value in state.items() if not is_code(value)}
    if type(state) in (list, tuple):
        return type(state)(without_code(part) for part in state)
    return state
