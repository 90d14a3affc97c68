"""Collectives, seen below Python: also those that DDP's reducer or a compiled graph begins.

Each operation of the ``c10d`` library passes through torch's dispatcher. At one key that all of them pass, and that
nobody uses for them, a function of ours notes the operation and hands it on. Operations that a backend is asked for
directly, without torch, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from lmres.adapters.watch.marks import BACKWARD, COLLECTIVE, OP_BYTES, SHAPE_BYTES, Group, Watch, ranks_of, ranks_text

NOT_COUNTED = ("send", "recv", "recv_any_source")
"""Ranks of a group legitimately differ in their numbers of these."""
BLOCKING = ("monitored_barrier",)
_KEY = "BackendSelect"
_MAX_SHAPES = 4096
_MAX_GROUPS = 4096
_UNEQUAL = "alltoall"
"""Here the members' shapes legitimately differ: only the type is noted."""
_SECOND = ("gather",)
"""The first list is empty where nothing is received."""


class Collectives:
    """``library`` has to be kept, or torch takes our functions out again."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._groups: dict[tuple[str, int], Group | None] = {}
        self._shapes: dict[Any, bytes] = {}
        self._unbox = torch.distributed.ProcessGroup.unbox
        self._key = getattr(torch._C.DispatchKey, _KEY)
        self._modes = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
        self.libraries: list[Any] = []

    def install(self) -> list[str]:
        """The names of what is seen."""
        seen = []
        library = self._torch.library.Library("c10d", "IMPL")
        self.libraries.append(library)
        for name in _names(self._torch, "c10d"):
            op = getattr(self._torch.ops.c10d, name).default
            arguments = op._schema.arguments
            places = [i for i, a in enumerate(arguments) if "ProcessGroup" in str(a.type)]
            if not places or self._taken(f"c10d::{name}"):
                continue
            flags = [i for i, a in enumerate(arguments) if a.name == "async_op"]
            kernel = self._kernel(op, name.strip("_"), places[0], flags[0] if flags else len(arguments))
            library.impl(name, kernel, _KEY, with_keyset=True)
            seen.append(name)
        self._install_wait()
        return seen

    def _install_wait(self) -> None:
        """What compiled graphs and distributed tensors wait with."""
        if "wait_tensor" not in _names(self._torch, "_c10d_functional") or self._taken("_c10d_functional::wait_tensor"):
            return
        library = self._torch.library.Library("_c10d_functional", "IMPL")
        self.libraries.append(library)
        op = self._torch.ops._c10d_functional.wait_tensor.default
        watch, key = self._watch, self._key

        def wait(keyset: Any, *args: Any) -> Any:
            if not watch.on or get_ident() != watch.main:
                return op.redispatch(keyset.remove(key), *args)
            return watch.within(COLLECTIVE, op.redispatch, (keyset.remove(key), *args), {})

        library.impl("wait_tensor", wait, _KEY, with_keyset=True)

    def _taken(self, name: str) -> bool:
        return bool(self._torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY))

    def _kernel(self, op: Any, name: str, group_at: int, flag_at: int) -> Callable[..., Any]:
        watch, key, note, codes = self._watch, self._key, self._note, self._watch.codes
        encoded = name.encode()[:OP_BYTES]
        counts = name not in NOT_COUNTED
        tensor_at = 1 if name in _SECOND else 0
        typed = _UNEQUAL in name
        blocking = name in BLOCKING

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            keyset = keyset.remove(key)
            if not watch.on:
                return op.redispatch(keyset, *args, **kwargs)
            group, number, on_host = note(encoded, args, group_at, tensor_at, counts, typed)
            waits = blocking or (flag_at < len(args) and args[flag_at] is False)
            if group is None or (codes[-1] == BACKWARD and not waits) or get_ident() != watch.main:
                return op.redispatch(keyset, *args, **kwargs)
            result = watch.within(COLLECTIVE, op.redispatch, (keyset, *args), kwargs)
            if waits and number and on_host:  # on a device, what was waited for may only be ordered
                if blocking:
                    watch.over(group, number)
                else:
                    watch.sync = (group, number)
            return result

        return kernel

    def _note(
        self, op: bytes, args: Any, group_at: int, tensor_at: int, counts: bool, typed: bool
    ) -> tuple[Group | None, int, bool]:
        """The group (None: of this rank alone), the operation's number, and whether its tensors are the host's."""
        try:
            self._watch.sync = None
            process_group = self._unbox(args[group_at])
            key = (process_group.group_name, process_group.size())
            group = self._groups[key] if key in self._groups else self._new_group(key, process_group)
            if group is None:
                return None, 0, False
            shape, on_host = self._look(args[tensor_at], typed)
            return group, self._watch.entered(group, op, shape, counts=counts), on_host
        except Exception as error:
            self._watch.failed(error)
            return None, 0, False

    def _new_group(self, key: tuple[str, int], process_group: Any) -> Group | None:
        """None for a group of one."""
        if len(self._groups) >= _MAX_GROUPS:
            self._groups.clear()
        group = None
        if key[1] > 1:
            group = Group(key[0], ranks_text(ranks_of(self._torch, process_group)))
        self._groups[key] = group
        return group

    def _look(self, tensors: Any, typed: bool) -> tuple[bytes, bool]:
        while isinstance(tensors, (list, tuple)):
            if not tensors:
                return b"", False
            tensors = tensors[0]
        if self._modes():  # the program looks at what is done with tensors: this is not the program's
            with self._torch._C.DisableTorchFunction():
                return self._text(tensors, typed), tensors.is_cpu
        return self._text(tensors, typed), tensors.is_cpu

    def _text(self, tensor: Any, typed: bool) -> bytes:
        key = (tensor.dtype, None if typed else tensor.shape)
        text = self._shapes.get(key)
        if text is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            dtype, shape = key
            name = str(dtype).removeprefix("torch.")
            text = (name if shape is None else f"{name}{list(shape)}").encode()[:SHAPE_BYTES]
            self._shapes[key] = text
        return text


def _names(torch: Any, library: str) -> list[str]:
    """Operations of a library, without overloads of their own."""
    start = f"{library}::"
    found = {name[len(start) :] for name in torch._C._dispatch_get_all_op_names() if name.startswith(start)}
    return sorted(name for name in found if "." not in name)
