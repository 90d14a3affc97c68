"""Puts a captured state back in place.

First everything is compared and prepared, without a change to the program: names, shapes, types, shards, the classes
and groups of the optimizers. Then values are copied into the tensors that are there (the program, or a compiled graph,
may hold them), and what is not there yet, such as the state that an optimizer makes in its first step, is made. The
random generators come last, since whatever else happens here could draw from them.

A setting of an optimizer that only this program has (a newer torch) keeps its value, and a note says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lmres.adapters.capture import rng
from lmres.adapters.capture.collect import SCALER_VALUES
from lmres.adapters.capture.copy import contiguous
from lmres.adapters.capture.loaded import Loaded, read
from lmres.adapters.capture.program import class_name, fsdp_parameters, is_code, sharded_parameters, walk
from lmres.adapters.capture.state import State
from lmres.adapters.capture.tensors import core, dtensor_class, local, quiet, spec_of
from lmres.adapters.capture.values import decode
from lmres.errors import CaptureError

__all__ = ["Loaded", "apply", "read"]

MAX_DIFFERENCES = 4


def apply(state: State, loaded: Loaded) -> tuple[str, ...]:
    """Make this program's state the loaded one, and say what could not be taken over exactly.

    Raises CaptureError, with the first differences, before anything has changed; or later, if an object of the
    program refuses its own state: then the program must not go on.
    """
    with quiet():
        work = _Restore(state, loaded)
        work.prepare()
        if work.differences:
            more = len(work.differences) - MAX_DIFFERENCES
            raise CaptureError(
                "the captured state does not fit this program: "
                + "; ".join(work.differences[:MAX_DIFFERENCES])
                + (f"; and {more} more" if more > 0 else "")
            )
        work.copy()
    # Methods of the program and of torch: they run as the program would call them.
    try:
        with torch.no_grad():
            for act in work.then:
                act()
        rng.put_back(work.generators)
    except CaptureError:
        raise
    except Exception as problem:
        raise CaptureError(f"the state is restored only in part: {type(problem).__name__}: {problem}") from problem
    return tuple(work.notes)


def with_code(state: Any, current: Any) -> Any:
    """A scheduler's state with the functions that the program's own has, at the places they were left out."""
    if type(state) is dict and isinstance(current, Mapping):
        found = {key: with_code(value, current.get(key)) for key, value in state.items()}
        return found | {key: value for key, value in current.items() if key not in state and is_code(value)}
    if type(state) is list and isinstance(current, (list, tuple)) and len(state) == len(current):
        return [with_code(part, here) for part, here in zip(state, current, strict=True)]
    return state


class _Restore:
    def __init__(self, state: State, loaded: Loaded) -> None:
        self._state = state
        self._loaded = loaded
        self._meta = loaded.meta
        self._notes_of: dict[str, dict[str, Any]] = loaded.meta["items"] | loaded.meta["changing_items"]
        self._into: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        self._targets: dict[Any, str] = {}
        self._made: dict[tuple[str, Any], torch.Tensor] = {}
        self._parameters: dict[str, list[torch.Tensor]] = {}
        self.differences: list[str] = []
        self.notes: list[str] = []
        self.then: list[Callable[[], object]] = []
        self.generators = _generators(loaded)

    def prepare(self) -> None:
        state, meta = self._state, self._meta
        for what, here in (
            ("roots", state.roots),
            ("optimizers", state.optimizers),
            ("schedulers", state.schedulers),
            ("scalers", state.scalers),
            ("generators", state.generators),
        ):
            if len(meta[what]) != len(here):
                self.differences.append(f"{len(meta[what])} {what} were captured, {len(here)} are here")
        if self.differences:
            return
        shards = sharded_parameters(state.roots)
        for index, root in enumerate(state.roots):
            self._root(index, root, meta["roots"][index], shards)
        for index, scheduler in enumerate(state.schedulers):
            self._scheduler(index, scheduler, meta["schedulers"][index])
        for index, optimizer in enumerate(state.optimizers):
            self._optimizer(index, optimizer)
        self._gradients()
        for index, scaler in enumerate(state.scalers):
            self._scaler(index, scaler, meta["scalers"][index])
        for index, generator in enumerate(state.generators):
            self._generator(index, generator, meta["generators"][index])
        self._named("extra tensors", "extra tensor", dict(meta["extra_tensors"]), state.extra_tensors)
        self._states()
        problem = rng.problem(self.generators)
        if problem is not None:
            self.differences.append(problem)

    def copy(self) -> None:
        inference = [index for index, into in enumerate(self._into) if into.is_inference()]
        if inference:
            with torch.inference_mode():
                for index in reversed(inference):
                    self._into.pop(index).copy_(self._from.pop(index))
        if self._into:
            torch._foreach_copy_(self._into, self._from)
        for root in self._state.roots:
            for _, module in walk(root):
                # A gathered copy of the parameters would be used in place of the shards that have just changed.
                if any(hasattr(each, "_unsharded_param") for each in fsdp_parameters(module)):
                    self.then.append(module.reshard)

    # ---- tensors

    def _describe(self, tensor: torch.Tensor, spec: dict[str, Any] | None) -> str:
        text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if spec is None:
            return text
        placements = ", ".join(spec["placements"])
        return f"{text} of {spec['shape']} as ({placements}) on mesh {spec['mesh']} at {spec['coordinate']}"

    def _pair(self, item: str, tensor: torch.Tensor, where: str) -> None:
        """Copy an item into a tensor that is there, or say what differs."""
        source, spec = self._loaded.tensors[item], self._notes_of.get(item, {}).get("shard")
        try:
            into = core(local(tensor, where))
        except CaptureError as problem:
            self.differences.append(str(problem))
            return
        here = spec_of(tensor)
        if source.shape != into.shape or source.dtype != into.dtype or spec != here:
            was, now = self._describe(source, spec), self._describe(into, here)
            self.differences.append(f"{where} was captured as {was}, here it is {now}")
            return
        self._copy_later(item, into, where)

    def _copy_later(self, item: str, into: torch.Tensor, where: str) -> None:
        memory = (into.data_ptr(), into.shape, into.stride(), into.dtype, into.device)
        known = self._targets.setdefault(memory, item) if into.numel() else item
        if known != item:
            self.differences.append(f"{where} is one tensor here with what was captured apart as '{known}'")
        self._into.append(into)
        self._from.append(self._loaded.tensors[item])

    def _named(self, plural: str, what: str, captured: Mapping[str, str], here: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in captured if name not in here]
        added = [name for name in here if name not in captured]
        if missing:
            self.differences.append(f"{plural} captured, but not here: {_some(missing)}")
        if added:
            self.differences.append(f"{plural} here, but not captured: {_some(added)}")
        for name, item in captured.items():
            if name in here:
                self._pair(item, here[name], f"{what} '{name}'")

    def _make(self, item: str, near: torch.Tensor | None) -> torch.Tensor:
        """A new tensor with an item's values, of the captured strides; on the device of ``near`` if it was on one."""
        source, note = self._loaded.tensors[item], self._notes_of.get(item, {})
        device = torch.device("cpu")
        if "device" in note:
            device = near.device if near is not None else torch.device("cuda", torch.cuda.current_device())
        stride = note.get("stride")
        if stride is None or not _dense(source.shape, stride):
            stride = contiguous(source.shape)
        made = torch.empty_strided(source.shape, stride, dtype=source.dtype, device=device)
        made.copy_(source)
        shard = note.get("shard")
        return made if shard is None else self._shard(made, shard, near, item)

    def _shard(self, made: torch.Tensor, shard: dict[str, Any], near: torch.Tensor | None, item: str) -> torch.Tensor:
        sharded: Any = dtensor_class()
        here: Any = None if near is None else spec_of(near)
        if (
            sharded is None
            or here is None
            or (here["mesh"], here["coordinate"]) != (shard["mesh"], shard["coordinate"])
        ):
            self.differences.append(f"'{item}' was captured as a shard on mesh {shard['mesh']}, here is no such mesh")
            return made
        whole: Any = near
        same = shard == here
        placements = whole.placements if same else _placements(shard["placements"])
        if placements is None:
            self.differences.append(
                f"'{item}' was captured as ({', '.join(shard['placements'])}), which can not be made"
            )
            return made
        stride = whole.stride() if same else contiguous(shard["shape"])
        shape = torch.Size(shard["shape"])
        found: torch.Tensor = sharded.from_local(
            made, whole.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return found

    def _getter(self, near: torch.Tensor | None, *, in_place: bool = True) -> Callable[[str, object], torch.Tensor]:
        def get(item: str, into: object) -> torch.Tensor:
            source, shard = self._loaded.tensors[item], self._notes_of.get(item, {}).get("shard")
            if in_place and isinstance(into, torch.Tensor) and spec_of(into) == shard:
                part = core(local(into, f"'{item}'"))
                if part.shape == source.shape and part.dtype == source.dtype:
                    self._copy_later(item, part, f"'{item}'")
                    return into
            if not in_place:
                return self._make(item, near)
            # Two places that were one tensor stay one.
            key = (item, None if near is None else near.device)
            if key not in self._made:
                self._made[key] = self._make(item, near)
            return self._made[key]

        return get

    # ---- what a state is made of

    def _root(
        self, index: int, root: torch.nn.Module, captured: dict[str, Any], shards: Mapping[int, torch.Tensor]
    ) -> None:
        parameters: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for prefix, module in walk(root):
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    parameters[prefix + key] = shards.get(id(tensor), tensor)
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    buffers[prefix + key] = tensor
        items = dict(captured["parameters"])
        self._named(f"parameters of root {index}", "parameter", items, parameters)
        self._named(f"buffers of root {index}", "buffer", dict(captured["buffers"]), buffers)
        for name, tensor in parameters.items():
            self._remember(items.get(name), tensor)

    def _remember(self, item: str | None, tensor: torch.Tensor) -> None:
        if item is not None:
            known = self._parameters.setdefault(item, [])
            if not any(tensor is each for each in known):
                known.append(tensor)

    def _optimizer(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        what = f"optimizer {index}"
        meta = self._meta
        captured = meta["optimizers"][index]
        groups = captured["groups"]
        if captured["class"] != class_name(optimizer):
            self.differences.append(f"{what} was captured as {captured['class']}, here it is {class_name(optimizer)}")
            return
        sizes = [len(items) for items in groups]
        here = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            self.differences.append(f"{what} was captured with groups of {sizes} parameters, here it has {here}")
            return
        states = {(group, position): value for group, position, value in captured["state"] + meta["changing"][index]}
        for number, (items, settings) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            near = settings["params"][0] if settings["params"] else None
            values = decode(meta["settings"][index][number], self._getter(near), settings)
            kept = [key for key in settings if key not in values and key != "params"]
            if kept:
                text = ", ".join(f"{key}={settings[key]!r}" for key in kept)
                self.notes.append(f"{what}, group {number}: settings that were not captured keep their values: {text}")
            for position, (item, tensor) in enumerate(zip(items, settings["params"], strict=True)):
                if not any(tensor is each for each in self._parameters.get(item, ())):
                    if item in self._parameters:
                        self.differences.append(
                            f"{what}: parameter {position} of group {number} is another than '{item}'"
                        )
                        continue
                    self._pair(item, tensor, f"{what}: parameter {position} of group {number}")
                    self._remember(item, tensor)
                present = optimizer.state.get(tensor)
                value = states.get((number, position))
                found = None if value is None else decode(value, self._getter(tensor), present)
                self.then.append(partial(_set_state, optimizer, tensor, found))
            self.then.append(partial(settings.update, values))
        others = decode(meta["others"][index], self._getter(None), dict(optimizer.state))
        self.then.append(lambda: optimizer.state.update(others))

    def _gradients(self) -> None:
        grads = self._meta["grads"]
        for item, tensors in self._parameters.items():
            for tensor in tensors:
                if not tensor.is_leaf:
                    continue
                if item not in grads:
                    self.then.append(partial(setattr, tensor, "grad", None))
                    continue
                present, source = tensor.grad, grads[item]
                if source is not None:
                    found = self._getter(tensor)(source, present)
                elif present is not None and present.layout is torch.strided and spec_of(present) == spec_of(tensor):
                    found = present
                    self.then.append(local(present, "gradient").zero_)
                else:
                    found = torch.zeros_like(local(tensor, "parameter"))
                    spec = spec_of(tensor)
                    found = found if spec is None else self._shard(found, spec, tensor, item)
                self.then.append(partial(setattr, tensor, "grad", found))

    def _scheduler(self, index: int, scheduler: Any, captured: dict[str, Any]) -> None:
        if captured["class"] != class_name(scheduler):
            self.differences.append(
                f"scheduler {index} was captured as {captured['class']}, here it is {class_name(scheduler)}"
            )
            return
        found = decode(captured["state"], self._getter(None, in_place=False))
        self.then.append(lambda: scheduler.load_state_dict(with_code(found, scheduler.state_dict())))

    def _scaler(self, index: int, scaler: Any, captured: dict[str, Any]) -> None:
        present = {key: getattr(scaler, key, None) for key in ("_scale", "_growth_tracker")}
        near = present["_scale"]
        if near is None and scaler.is_enabled():
            near = torch.empty((), device=getattr(scaler, "_device", "cuda"))
        found = decode(captured["state"], self._getter(near), present)
        if set(found) != {"_scale", "_growth_tracker", "_enabled", *SCALER_VALUES}:
            self.differences.append(f"gradient scaler {index} was captured with other fields: {sorted(found)}")
            return
        if found.pop("_enabled") != scaler.is_enabled():
            on = "off" if scaler.is_enabled() else "on"
            self.differences.append(f"gradient scaler {index} was captured switched {on}, here it is not")
            return
        for key, value in found.items():
            if hasattr(scaler, key):
                self.then.append(partial(setattr, scaler, key, value))

    def _generator(self, index: int, generator: torch.Generator, captured: list[str]) -> None:
        kind, item = captured
        if kind != generator.device.type:
            self.differences.append(f"generator {index} was captured on {kind}, here it is on {generator.device.type}")
            return
        try:
            torch.Generator(generator.device).set_state(source := self._loaded.tensors[item].clone())
        except RuntimeError as problem:
            self.differences.append(f"generator {index} has no valid state: {problem}")
            return
        self.then.append(lambda: generator.set_state(source))

    def _states(self) -> None:
        captured, here = dict(self._meta["states"]), self._state.states
        if set(captured) != set(here):
            self.differences.append(f"added states captured: {_some(captured)}; here: {_some(here)}")
            return
        for name, added in here.items():
            value = captured[name]
            single = isinstance(value, dict) and "tensor" in value
            if single and isinstance(added, torch.Tensor):
                self._pair(value["tensor"], added, f"state '{name}'")
            elif isinstance(added, torch.Tensor) or not callable(getattr(added, "load_state_dict", None)):
                self.differences.append(f"state '{name}' was captured from another kind of object: {class_name(added)}")
            else:
                found = decode(value, self._getter(None, in_place=False))
                self.then.append(partial(added.load_state_dict, found))


def _set_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, found: dict[str, Any] | None) -> None:
    if found is None:
        optimizer.state.pop(parameter, None)
        return
    present = optimizer.state.get(parameter)
    if isinstance(present, dict):
        present.clear()
        present.update(found)
    else:
        optimizer.state[parameter] = found


def _generators(loaded: Loaded) -> rng.Generators:
    tensors, captured = loaded.tensors, loaded.meta["rng"]

    def words(item: str) -> array[int]:
        return array("I", bytes(tensors[item].tolist()))

    item, version, gauss = captured["python"]
    numpy = captured["numpy"]
    if numpy is not None:
        import numpy as np

        numpy = ("MT19937", np.array(words(numpy[0]), dtype=np.uint32), *numpy[1:])
    return rng.Generators(
        torch=tensors[captured["torch"]].clone(),
        cuda=tuple((index, tensors[name].clone()) for index, name in captured["cuda"]),
        python=(version, tuple(words(item)), gauss),
        numpy=numpy,
    )


def _some(names: Any) -> str:
    shown = [f"'{name}'" for name in names]
    return ", ".join(shown[:MAX_DIFFERENCES]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "") or "none"


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides put every element into its own place, without holes."""
    step = 1
    for size, found in sorted((pair for pair in zip(shape, stride, strict=True) if pair[0] != 1), key=lambda p: p[1]):
        if found != step:
            return False
        step *= size
    return True


def _placements(names: Sequence[str]) -> list[Any] | None:
    from torch.distributed.tensor import Replicate, Shard

    found: list[Any] = []
    for name in names:
        if name == "R":
            found.append(Replicate())
        elif name.startswith("S(") and name[2:-1].isdigit():
            found.append(Shard(int(name[2:-1])))
        else:
            return None
    return found
