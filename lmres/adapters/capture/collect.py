"""Finds all of a training state, without copying it.

* Each memory is an item once: tied parameters, and a tensor that several places refer to, share one item. Two tensors
  are the same when address, shape, strides and type are; views that only overlap are kept one by one.
* Names are built from positions (``r0.p.layer.weight``: root 0, parameter; ``o0.g1.3.exp_avg``: optimizer 0, group 1,
  parameter 3), so that every life of the program, and every replica, gives the same names in the same order.
* Parameters come first, as the roots have them, then what only optimizers have, then the optimizers' state.
* A gradient is nothing, all zero, or values; only values are items.
* Fully sharded modules may have their gathered parameters registered at this moment: the shards behind them count.
* What the program defines in code (functions of a scheduler) stays the program's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from lmres.adapters.capture import rng
from lmres.adapters.capture.program import class_name, sharded_parameters, walk, without_code
from lmres.adapters.capture.state import FORMAT, FixedDict, FixedList, Item, Snapshot, State
from lmres.adapters.capture.tensors import core, is_zero, local, quiet, spec_of
from lmres.adapters.capture.values import Path, encode, spelled
from lmres.errors import CaptureError

SCALER_VALUES = ("_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")


class Collector:
    """Collects one state after the other, and remembers what does not change between steps.

    Modules, parameters and optimizer state are mostly the same objects at the same addresses from one step to the
    next; then only that is checked, and the items are those of before. Everything else is looked at each time.
    """

    def __init__(self) -> None:
        self._fixed: _Fixed | None = None

    def collect(self, state: State) -> Snapshot:
        """All of a training state as items and meta data.

        Call it where nothing is under way: after the optimizer step and what follows it, before the next forward.
        Raises CaptureError, naming the place, when something can not be captured exactly.
        """
        try:
            with quiet():
                if self._fixed is None or not self._fixed.holds(state):
                    self._fixed = None
                    self._fixed = _Fixed(state)
                return _Changing(state, self._fixed).snapshot()
        except CaptureError:
            raise
        except Exception as problem:
            text = f"the training state can not be captured: {type(problem).__name__}: {problem}"
            raise CaptureError(text) from problem


def collect(state: State) -> Snapshot:
    """``Collector.collect``, once."""
    return Collector().collect(state)


class _Items:
    """Items under construction: each memory once, each name once."""

    def __init__(self, before: _Items | None = None) -> None:
        self.items: list[Item] = []
        self.notes: dict[str, dict[str, Any]] = {}
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._by_memory: dict[Any, str] = {} if before is None else dict(before._by_memory)
        self._names: set[str] = set() if before is None else set(before._names)

    def put(self, name: str, tensor: torch.Tensor, where: str, *, parameter: bool = False) -> str:
        """The name of the item that has this tensor's memory, a new one if there is none yet."""
        source = local(tensor, where)
        self.sources.append((tensor, source))
        part = core(source)
        shape, stride = part.shape, part.stride()
        memory = (part.data_ptr(), shape, stride, part.dtype, part.device) if part.numel() else None
        if memory is not None:
            known = self._by_memory.get(memory)
            if known is not None:
                return known
        while name in self._names:
            name += "'"
        self._names.add(name)
        if memory is not None:
            self._by_memory[memory] = name
        note = _note(tensor, part, stride)
        if note:
            self.notes[name] = note
        self.items.append(Item(name=name, tensor=part, parameter=parameter))
        return name

    def value(self, prefix: str, value: object, path: Path) -> Any:
        """A value as JSON; its tensors become items under the prefix."""
        depth = len(path)

        def put(tensor: torch.Tensor, found: Path) -> str:
            return self.put(".".join([prefix, *(str(part) for part in found[depth:])]), tensor, spelled(found))

        return encode(value, path, put)


def _note(tensor: torch.Tensor, part: torch.Tensor, stride: tuple[int, ...]) -> dict[str, Any]:
    note: dict[str, Any] = {}
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        spec = spec_of(tensor)
        if spec is not None:
            note["shard"] = spec
    if not part.is_contiguous():
        note["stride"] = list(stride)
    if part.is_cuda:
        note["device"] = "cuda"
    return note


class _Fixed:
    """What the modules and optimizers hold, and how to see that they still hold the same."""

    def __init__(self, state: State) -> None:
        self.shared = _Items()
        self.buffers = _Items()
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.changing: list[list[tuple[int, int, torch.Tensor]]] = []
        self.others: list[dict[Any, Any]] = []
        self._by_parameter: dict[int, str] = {}
        self._shards = sharded_parameters(state.roots)
        self._holders = (state.roots, state.optimizers)
        self._modules = [module for root in state.roots for _, module in walk(root)]
        self.roots = FixedList(self._root(index, root) for index, root in enumerate(state.roots))
        optimizers = list(enumerate(state.optimizers))
        groups = [self._groups(index, optimizer) for index, optimizer in optimizers]
        self._steady: list[dict[Any, Any]] = []
        states = [self._states(index, optimizer) for index, optimizer in optimizers]
        self.optimizers = FixedList(
            {"class": class_name(optimizer), "groups": groups[index], "state": states[index]}
            for index, optimizer in optimizers
        )
        self.items = tuple(self.shared.items)
        self.notes = FixedDict(self.shared.notes | self.buffers.notes)
        self._kept = self._held()
        self._ids = list(map(id, self._kept))
        self._sources = [*self.shared.sources, *self.buffers.sources]
        self._locals = [source for _, source in self._sources]
        self._sharded = [(tensor, source) for tensor, source in self._sources if tensor is not source]
        self._places = self._memory()

    def holds(self, state: State) -> bool:
        """Whether the same objects hold the same tensors, at the same places."""
        roots, optimizers = self._holders
        return (
            len(roots) == len(state.roots)
            and len(optimizers) == len(state.optimizers)
            and all(map(is_, roots, state.roots))
            and all(map(is_, optimizers, state.optimizers))
            and list(map(id, self._held())) == self._ids
            and all(tensor._local_tensor is source for tensor, source in self._sharded)
            and self._memory() == self._places
        )

    def _held(self) -> list[Any]:
        """Everything whose replacement would change the items. They are kept, so that no id is used twice."""
        held: list[Any] = []
        for module in self._modules:
            held += module._parameters.values()
            held += module._buffers.values()
            held += module._modules.values()
        for optimizer in self._holders[1]:
            for settings in optimizer.param_groups:
                held += settings["params"]
                held.append(None)
            held += optimizer.state.keys()
            held += optimizer.state.values()
        for values in self._steady:
            held += values.values()
        return held

    def _memory(self) -> list[Any]:
        return [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in self._locals]

    def _parameter(self, name: str, tensor: torch.Tensor, where: str) -> str:
        item = self._by_parameter.get(id(tensor))
        if item is None:
            item = self.shared.put(name, tensor, where, parameter=True)
            self._by_parameter[id(tensor)] = item
            self.parameters.append((item, tensor))
        return item

    def _root(self, index: int, root: torch.nn.Module) -> dict[str, Any]:
        parameters, buffers = [], []
        shards = self._shards
        for prefix, module in walk(root):
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    name = prefix + key
                    shard = shards.get(id(tensor), tensor) if shards else tensor
                    item = self._parameter(f"r{index}.p.{name}", shard, f"parameter '{name}' of root {index}")
                    parameters.append([name, item])
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    name = prefix + key
                    item = self.buffers.put(f"r{index}.b.{name}", tensor, f"buffer '{name}' of root {index}")
                    buffers.append([name, item])
        return {"class": class_name(root), "parameters": parameters, "buffers": buffers}

    def _groups(self, index: int, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        found = []
        for group, settings in enumerate(optimizer.param_groups):
            items = []
            for position, tensor in enumerate(settings["params"]):
                where = f"parameter {position} of group {group} of optimizer {index}"
                items.append(self._parameter(f"o{index}.g{group}.p{position}", tensor, where))
            found.append(items)
        return found

    def _states(self, index: int, optimizer: torch.optim.Optimizer) -> list[Any]:
        """State of nothing but tensors is fixed; where numbers are kept beside them, it is looked at each time."""
        what = _named(index, optimizer)
        fixed: list[Any] = []
        changing, known = [], set()
        for group, settings in enumerate(optimizer.param_groups):
            for position, tensor in enumerate(settings["params"]):
                found = optimizer.state.get(tensor)
                known.add(id(tensor))
                if not found:
                    continue
                if type(found) is dict and all(map(_is_steady, found.values())):
                    path = (what, f"group {group}", f"state of '{self._by_parameter[id(tensor)]}'")
                    fixed.append([group, position, self.shared.value(f"o{index}.g{group}.{position}", found, path)])
                    self._steady.append(found)
                else:
                    changing.append((group, position, tensor))
        others = {key: value for key, value in optimizer.state.items() if id(key) not in known}
        for key in [key for key, value in others.items() if isinstance(key, torch.Tensor)]:
            left = others.pop(key)
            if not isinstance(left, dict) or left:
                raise CaptureError(f"{what} has state for a tensor of shape {list(key.shape)} that is in no group")
        self.changing.append(changing)
        self.others.append(others)
        return fixed


def _named(index: int, optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer {index} ({class_name(optimizer)})"


def _is_steady(value: object) -> bool:
    return value is None or isinstance(value, (bool, str, torch.Tensor))


class _Changing:
    """One snapshot: what is fixed, and all the rest as it is now."""

    def __init__(self, state: State, fixed: _Fixed) -> None:
        self._state = state
        self._fixed = fixed
        self._shared = _Items(fixed.shared)
        self._own = _Items(fixed.buffers)
        self._own._by_memory |= fixed.shared._by_memory

    def snapshot(self) -> Snapshot:
        state = self._state
        fixed = self._fixed
        meta: dict[str, Any] = {"format": FORMAT, "torch": torch.__version__}
        meta["roots"], meta["optimizers"], meta["items"] = fixed.roots, fixed.optimizers, fixed.notes
        optimizers = list(enumerate(state.optimizers))
        meta["settings"] = [self._settings(index, optimizer) for index, optimizer in optimizers]
        meta["changing"] = [self._changing(index, optimizer) for index, optimizer in optimizers]
        meta["others"] = [self._others(index, optimizer) for index, optimizer in optimizers]
        meta["grads"] = self._gradients()
        meta["schedulers"] = [self._scheduler(index, scheduler) for index, scheduler in enumerate(state.schedulers)]
        meta["scalers"] = [self._scaler(index, scaler) for index, scaler in enumerate(state.scalers)]
        meta["generators"] = [self._generator(index, made) for index, made in enumerate(state.generators)]
        meta["extra_tensors"] = [
            [name, self._own.put(f"x.{name}", tensor, f"extra tensor '{name}'")]
            for name, tensor in state.extra_tensors.items()
        ]
        meta["states"] = [[name, self._added(name, added)] for name, added in state.states.items()]
        meta["extra"] = _json(state.extra)
        meta["rng"] = self._rng()
        meta["changing_items"] = self._shared.notes | self._own.notes
        shared = fixed.items
        return Snapshot(
            meta=meta,
            shared=shared + tuple(self._shared.items) if self._shared.items else shared,
            own=(*fixed.buffers.items, *self._own.items),
        )

    def _settings(self, index: int, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            self._own.value(
                f"o{index}.g{group}",
                {key: value for key, value in settings.items() if key != "params"},
                (_named(index, optimizer), f"group {group}"),
            )
            for group, settings in enumerate(optimizer.param_groups)
        ]

    def _changing(self, index: int, optimizer: torch.optim.Optimizer) -> list[Any]:
        found = []
        for group, position, tensor in self._fixed.changing[index]:
            path = (_named(index, optimizer), f"group {group}", f"state of parameter {position}")
            value = self._shared.value(f"o{index}.g{group}.{position}", optimizer.state[tensor], path)
            found.append([group, position, value])
        return found

    def _others(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        path = (_named(index, optimizer), "state")
        return self._shared.value(f"o{index}.others", self._fixed.others[index], path)

    def _gradients(self) -> dict[str, Any]:
        gradients: dict[str, Any] = {}
        for item, tensor in self._fixed.parameters:
            if not tensor.is_leaf:
                continue
            gradient = tensor.grad
            if gradient is None:
                continue
            where = f"the gradient of '{item}'"
            # The flag stands for a gradient that is laid out as its parameter is.
            zero = spec_of(gradient) == spec_of(tensor) and is_zero(local(gradient, where))
            gradients[item] = None if zero else self._own.put(f"grad.{item}", gradient, where)
        return gradients

    def _scheduler(self, index: int, scheduler: Any) -> dict[str, Any]:
        what = f"scheduler {index} ({class_name(scheduler)})"
        state = without_code(scheduler.state_dict())
        return {"class": class_name(scheduler), "state": self._own.value(f"s{index}", state, (what,))}

    def _scaler(self, index: int, scaler: Any) -> dict[str, Any]:
        what = f"gradient scaler {index}"
        for stages in getattr(scaler, "_per_optimizer_states", {}).values():
            stage = getattr(stages.get("stage"), "name", "READY")
            if stage != "READY" or stages.get("found_inf_per_device"):
                raise CaptureError(f"{what} is between 'unscale_' and 'update' ({stage}): capture after 'update'")
        values = {key: getattr(scaler, key, None) for key in SCALER_VALUES}
        values |= {key: getattr(scaler, key, None) for key in ("_scale", "_growth_tracker")}  # no value is read
        values["_enabled"] = scaler.is_enabled()
        return {"class": class_name(scaler), "state": self._own.value(f"a{index}", values, (what,))}

    def _generator(self, index: int, made: torch.Generator) -> list[str]:
        return [made.device.type, self._own.put(f"g{index}", made.get_state(), f"generator {index}")]

    def _added(self, name: str, added: Any) -> Any:
        path = (f"state '{name}'",)
        if isinstance(added, torch.Tensor):
            return self._own.value(f"u.{name}", added, path)
        state_dict: Callable[[], Any] | None = getattr(added, "state_dict", None)
        if not callable(state_dict) or not callable(getattr(added, "load_state_dict", None)):
            raise CaptureError(
                f"{path[0]} is a {class_name(added)}: a tensor, or an object with state_dict and load_state_dict"
            )
        return self._own.value(f"u.{name}", state_dict(), path)

    def _rng(self) -> dict[str, Any]:
        devices = {item.tensor.device.index for item in self._fixed.items if item.tensor.is_cuda}
        found = rng.current(devices)
        return {
            "torch": self._own.put("rng.torch", found.torch, "rng"),
            "cuda": [[index, self._own.put(f"rng.cuda{index}", value, "rng")] for index, value in found.cuda],
            "python": [
                self._own.put("rng.python", _bytes(array("I", found.python[1])), "rng"),
                found.python[0],
                found.python[2],
            ],
            "numpy": None
            if found.numpy is None
            else [self._own.put("rng.numpy", _bytes(found.numpy[1]), "rng"), *found.numpy[2:]],
        }


def _bytes(words: Any) -> torch.Tensor:
    """An array of 32-bit words as its bytes."""
    return torch.frombuffer(bytearray(words.tobytes()), dtype=torch.uint8)


def _json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise CaptureError(f"the extra values are no JSON: {problem}") from problem
    return value
