"""Forwards, backwards, optimizer steps and gradient scaling."""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch.compiler import is_compiling

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.patches.wrap import shield, stand_in

SMALL_BYTES = 1 << 16
NEAR_STEPS = 3


def install(torch: Any, engine: Engine) -> None:
    _forwards(torch, engine)
    _backwards(torch, engine)
    _optimizers(torch, engine)
    _scalers(torch, engine)
    _schedulers(torch, engine)
    _clipping(torch, engine)
    _hooks(engine)


# -- forwards ---------------------------------------------------------------------------------------------------------


def _forwards(torch: Any, engine: Engine) -> None:
    base = torch.nn.Module
    original = base.__call__
    outputs = FakeOutputs(torch, engine, original)
    main = threading.get_ident()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or engine.inside or threading.get_ident() != main:
            return original(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            engine.forward(self, (args, kwargs))
        if engine.skipping:
            return outputs.of(self, args, kwargs)
        with engine.ours:
            return original(self, *args, **kwargs)

    base.__call__ = functools.wraps(original)(__call__)


def _hooks(engine: Engine) -> None:
    """Hooks of DDP that change what is sent, with a memory of their own (PowerSGD), are not captured."""
    from torch.distributed import is_available

    if not is_available():
        return
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> Any:
        if state is not None and not isinstance(state, ProcessGroup):
            engine.refuse(f"a communication hook of DDP with a state of its own ({type(state).__name__})")
        return original(self, state, hook)

    DistributedDataParallel.register_comm_hook = register_comm_hook


class FakeOutputs:
    """Zeros of the shapes that a module gives for inputs of these shapes: found by one forward without gradients.

    A DDP forward without gradients does not arm the reducer, so that no backward is owed. Each call gives tensors of
    its own, since the program may keep several, into which different values will be put; but large ones only in the
    last steps before it is back.
    """

    def __init__(self, torch: Any, engine: Engine, call: Any) -> None:
        self._torch = torch
        self._engine = engine
        self._call = call
        self._known: dict[Any, tuple[list[Any], Any, Any]] = {}
        """With the module, so that its id stays its own."""
        self._ddp: dict[int, list[Any]] = {}
        engine.on_arrival.append(self._known.clear)
        engine.on_arrival.append(self._ddp.clear)

    def of(self, module: Any, args: Any, kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        torch = self._torch
        grad = torch.is_grad_enabled()
        shapes = tuple(_shape(torch, leaf) for leaf in pytree.tree_leaves((args, kwargs)))
        casts = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda"))
        key = (id(module), module.training, grad, casts, shapes)
        if key not in self._known:
            leaves, spec = pytree.tree_flatten(self._once(module, args, kwargs))
            self._known[key] = ([self._zeros(leaf, grad) for leaf in leaves], spec, module)
        for part in self._parallel(module):  # as a forward of it would: whether the next one sends the buffers
            part.require_forward_param_sync = grad and part.require_backward_grad_sync
        leaves, spec, _ = self._known[key]
        near = self._engine.steps >= self._engine.resume_step - NEAR_STEPS
        return pytree.tree_unflatten([self._fresh(leaf, near) for leaf in leaves], spec)

    def _parallel(self, module: Any) -> list[Any]:
        """The DDP modules in it."""
        found = self._ddp.get(id(module))
        if found is None:
            found = self._ddp[id(module)] = [m for m in module.modules() if hasattr(m, "require_forward_param_sync")]
        return found

    def _once(self, module: Any, args: Any, kwargs: Any) -> Any:
        from lmres.adapters.resume.rng import kept_rng

        with self._engine.ours:
            with kept_rng(self._torch), self._torch.no_grad():
                output = self._call(module, *args, **kwargs)
                for part in module.modules():
                    if hasattr(part, "reshard") and hasattr(part, "unshard"):  # FSDP2 leaves the root unsharded
                        part.reshard()
            return output

    def _zeros(self, leaf: Any, grad: bool) -> Any:
        if not self._torch.is_tensor(leaf):
            return leaf
        zeros = self._torch.zeros_like(leaf)
        return zeros.requires_grad_() * 1 if grad and leaf.is_floating_point() else zeros

    def _fresh(self, leaf: Any, near: bool) -> Any:
        if not self._torch.is_tensor(leaf):
            return leaf
        return leaf.clone() if near or leaf.numel() * leaf.element_size() <= SMALL_BYTES else leaf


def _shape(torch: Any, leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if torch.is_tensor(leaf) else type(leaf).__name__


# -- backwards --------------------------------------------------------------------------------------------------------


def _backwards(torch: Any, engine: Engine) -> None:
    stand_in(engine, torch.Tensor, "backward", _nothing)
    stand_in(engine, torch.autograd, "backward", _nothing)

    def no_gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        single = torch.is_tensor(inputs)
        return tuple(torch.zeros_like(i).requires_grad_() * 1 for i in ([inputs] if single else inputs))

    stand_in(engine, torch.autograd, "grad", no_gradients)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# -- optimizers -------------------------------------------------------------------------------------------------------


def _optimizers(torch: Any, engine: Engine) -> None:
    """The step of each class is wrapped with its first object; a container's own step counts, not its parts'."""
    base = torch.optim.Optimizer
    make = base.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not any(known is self for known in engine.optimizers):
            engine.optimizers.append(self)
        for kind in type(self).__mro__:
            if "step" in kind.__dict__ and kind is not base:
                _wrap_step(engine, kind)

    base.__init__ = __init__


def _wrap_step(engine: Engine, kind: Any) -> None:
    original = kind.__dict__["step"]
    if getattr(original, "__lmres__", False):
        return
    main = threading.get_ident()

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or engine.inside or threading.get_ident() != main:
            return original(self, *args, **kwargs)
        closure = kwargs.get("closure", args[0] if args and callable(args[0]) else None)
        if not engine.skipping:
            result = _real_step(engine, original, self, closure, args, kwargs)
        else:
            result = closure() if closure is not None else None
            if engine.phase == "live":  # the program came back to its place in the closure: this step is its own again
                result = _real_step(engine, original, self, _Begun(closure, result), args, kwargs)
        engine.attempted(self)
        return result

    step.__lmres__ = True  # type: ignore[attr-defined]
    kind.step = step


class _Begun:
    """A closure that has been called once: the first call gives what came of that."""

    def __init__(self, closure: Any, result: Any) -> None:
        self._closure = closure
        self._results = [result]

    def __call__(self) -> Any:
        return self._results.pop() if self._results else self._closure()


def _real_step(engine: Engine, original: Any, optimizer: Any, closure: Any, args: Any, kwargs: Any) -> Any:
    if closure is None:
        engine.before_step()
        with engine.ours:
            return original(optimizer, *args, **kwargs)

    def user_closure() -> Any:
        """The program's code again: its forward may be a boundary."""
        outer, engine.inside = engine.inside, 0
        try:
            return closure()
        finally:
            engine.inside = outer
            engine.before_step()

    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": user_closure}
    else:
        args = (user_closure, *args[1:])
    with engine.ours:
        return original(optimizer, *args, **kwargs)


def _scalers(torch: Any, engine: Engine) -> None:
    kind = torch.amp.GradScaler
    make, step = kind.__init__, kind.step

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        engine.scalers.append(self)

    @functools.wraps(step)
    def scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.outside():
            return step(self, optimizer, *args, **kwargs)
        result = None
        if not engine.skipping:
            engine.before_step()
            with engine.ours:
                result = step(self, optimizer, *args, **kwargs)
        engine.attempted(optimizer)
        return result

    kind.__init__, kind.step = __init__, scaled_step
    stand_in(engine, kind, "scale", lambda self, outputs: outputs)
    stand_in(engine, kind, "unscale_", _nothing)
    stand_in(engine, kind, "update", _nothing)


def _schedulers(torch: Any, engine: Engine) -> None:
    for kind in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        make = kind.__dict__.get("__init__")
        if make is None:
            continue

        def with_register(make: Any = make) -> Any:
            @functools.wraps(make)
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                make(self, *args, **kwargs)
                if not any(known is self for known in engine.schedulers):
                    engine.schedulers.append(self)

            return __init__

        kind.__init__ = with_register()


def _clipping(torch: Any, engine: Engine) -> None:
    def zero(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """As the real norm: sharded parameters have a replicated one."""
        first = parameters if torch.is_tensor(parameters) else next(iter(parameters), None)
        mesh = getattr(first, "device_mesh", None)
        if first is None or mesh is None:
            return torch.zeros((), device=first.device if first is not None else None)
        from torch.distributed.tensor import DTensor, Replicate

        local = torch.zeros((), device=first.to_local().device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        stand_in(engine, owner, "clip_grad_norm_", zero)
        stand_in(engine, owner, "get_total_norm", zero)
        stand_in(engine, owner, "clip_grad_value_", _nothing)
        stand_in(engine, owner, "clip_grads_with_norm_", _nothing)
    checkpoint = getattr(torch.distributed, "checkpoint", None)
    if checkpoint is not None and hasattr(checkpoint, "state_dict"):
        shield(engine, checkpoint.state_dict, "_init_optim_state")
