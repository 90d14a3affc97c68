"""The records of a capture: what a program's state is made of, and what was found in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FORMAT = 1


class FixedList(list[Any]):
    """A list that nobody changes any more: whoever writes it as text may keep the text with it."""

    __slots__ = ("text",)
    text: str


class FixedDict(dict[str, Any]):
    """The same for a dictionary."""

    __slots__ = ("text",)
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that makes up the training state of this process, in an order that every life of it repeats.

    ``extra_tensors`` are tensors of the program itself (moving averages, meters), ``extra`` is any JSON value, and
    ``states`` are the objects the program added: tensors, or objects with ``state_dict`` and ``load_state_dict``.
    The generators of the process (torch, each CUDA device in use, ``random``, NumPy) are always part of it.
    """

    roots: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scalers: tuple[Any, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    extra_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None
    states: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor to copy: the local shard, without repetitions. ``parameter``: its values must stay finite."""

    name: str
    tensor: torch.Tensor
    parameter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was found, still in the program's own tensors: copy it before the program goes on.

    ``shared``: parameters and optimizer state, which replicas of this process would have bit for bit; ``own``: the
    rest. ``meta`` is JSON and says what each item is.
    """

    meta: dict[str, Any]
    shared: tuple[Item, ...]
    own: tuple[Item, ...]
