"""Which functions of torch (and of libraries that write checkpoints) begin a phase.

The program's calls pass through a thin layer, in the main thread only; a compiler that traces the program does not see
it. It can stand over or under the layers of ``adapters.resume``: neither knows the other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

from torch.compiler import is_compiling

from lmres.adapters.bootstrap.steps import ImportWatch
from lmres.adapters.watch.marks import BACKWARD, CHECKPOINT_IO, COLLECTIVE, FORWARD, LOADER, OPTIMIZER, Watch

_IO = {
    "torch": ("save", "load"),
    "torch.serialization": ("save", "load"),
}
_IO_LATER = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint.state_dict_loader": ("load", "load_state_dict"),
    "safetensors.torch": ("save_file", "save_model", "load_file", "load_model"),
}
_IO_AGAIN = {"torch.distributed.checkpoint": ("save", "async_save", "save_state_dict", "load", "load_state_dict")}
"""The same functions under another name, where that was imported first."""
_WAITING = (
    "init_process_group",
    "new_group",
    "destroy_process_group",
    "_broadcast_coalesced",
    "_verify_params_across_processes",
)
"""Those that wait for others in C++ or at the store. The rest of the collectives wait in ``Work.wait``."""


def install(torch: Any, watch: Watch) -> None:
    _skip_in_compiler(Watch.within.__code__)
    _skip_in_compiler(Watch.within_backward.__code__)
    _forwards(torch, watch)
    _backwards(torch, watch)
    _optimizers(torch, watch)
    _loaders(watch)
    made: dict[int, Any] = {}
    for name, functions in _IO.items():
        _functions(watch, sys.modules[name], functions, CHECKPOINT_IO, made)
    _later(watch)
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        for owner in (torch.distributed, distributed_c10d):
            _functions(watch, owner, _WAITING, COLLECTIVE, made)
        _waits(torch, watch)


def _layer(original: Any, call: Any) -> Any:
    """``call`` in the place of ``original``. A compiler does not begin with it, only with what it calls."""
    layer = functools.wraps(original)(call)
    _skip_in_compiler(call.__code__)
    return layer


def _skip_in_compiler(code: Any) -> None:
    try:
        from torch._C._dynamo import eval_frame as frames

        frames.set_code_exec_strategy(code, _strategy(frames))
    except (AttributeError, ImportError, TypeError):
        return  # then it begins with our layer, and goes on to what that calls


def _strategy(frames: Any) -> Any:
    return frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)


def _phase(watch: Watch, original: Any, code: int) -> Any:
    codes, main = watch.codes, watch.main

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not watch.on or get_ident() != main or codes[-1] == code:
            return original(*args, **kwargs)
        return watch.within(code, original, args, kwargs)

    return _layer(original, call)


def _functions(watch: Watch, owner: Any, names: tuple[str, ...], code: int, made: dict[int, Any]) -> None:
    """One layer for each function, under all its names."""
    for name in names:
        original = getattr(owner, name, None)
        if original is None or getattr(original, "__lmres_watch__", False):
            continue
        if id(original) not in made:
            layer = _phase(watch, original, code)
            layer.__lmres_watch__ = True
            made[id(original)] = layer
        setattr(owner, name, made[id(original)])


# -- forwards, backwards, steps ---------------------------------------------------------------------------------------


def _forwards(torch: Any, watch: Watch) -> None:
    """Of the modules that the program calls, not of those in them."""
    base = torch.nn.Module
    original = base.__call__
    codes, main = watch.codes, watch.main

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not watch.on or codes[-1] == FORWARD or codes[-1] == BACKWARD or get_ident() != main:
            return original(self, *args, **kwargs)
        return watch.within(FORWARD, original, (self, *args), kwargs)

    base.__call__ = _layer(original, __call__)


def _backwards(torch: Any, watch: Watch) -> None:
    codes, main = watch.codes, watch.main

    def layer(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not watch.on or get_ident() != main or codes[-1] == BACKWARD:
                return original(*args, **kwargs)
            return watch.within_backward(original, args, kwargs)

        return _layer(original, call)

    for owner, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
        setattr(owner, name, layer(getattr(owner, name)))


def _optimizers(torch: Any, watch: Watch) -> None:
    """Torch puts hooks around the ``step`` of each class, with its first object: our layer goes around those."""
    base = torch.optim.Optimizer
    hooked = base.profile_hook_step

    def profile_hook_step(func: Any) -> Any:
        return _phase(watch, hooked(func), OPTIMIZER)

    base.profile_hook_step = staticmethod(functools.wraps(hooked)(profile_hook_step))


# -- input, files -----------------------------------------------------------------------------------------------------


def _loaders(watch: Watch) -> None:
    from torch.utils.data import dataloader

    base = dataloader._BaseDataLoaderIter
    base.__next__ = _phase(watch, base.__next__, LOADER)
    dataloader.DataLoader.__iter__ = _phase(watch, dataloader.DataLoader.__iter__, LOADER)


def _later(watch: Watch) -> None:
    made: dict[int, Any] = {}
    for name, names in _IO_LATER.items():
        then = _then(watch, names, made)
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, ImportWatch(name, then, "its checkpoints are not noted"))
    for name, names in _IO_AGAIN.items():
        if name in sys.modules:
            _functions(watch, sys.modules[name], names, CHECKPOINT_IO, made)


def _then(watch: Watch, names: tuple[str, ...], made: dict[int, Any]) -> Callable[[ModuleType], None]:
    return lambda module: _functions(watch, module, names, CHECKPOINT_IO, made)


# -- waiting ----------------------------------------------------------------------------------------------------------


def _waits(torch: Any, watch: Watch) -> None:
    for kind in (torch.distributed.Work, torch.futures.Future):
        kind.wait = _wait(watch, kind.wait)


def _wait(watch: Watch, original: Any) -> Any:
    main = watch.main

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not watch.on or get_ident() != main:
            return original(self, *args, **kwargs)
        sync, watch.sync = watch.sync, None
        result = watch.within(COLLECTIVE, original, (self, *args), kwargs)
        if sync is not None:
            watch.over(*sync)
        return result

    return _layer(original, wait)
