"""The parts of a model that can be computed anew by themselves.

A part is a module that computes something: each one without children, and those with children that hold no more than a
quarter of the model (a larger one costs too much, and its own parts are there). It is covered when nothing speaks
against calling it an extra time (``pure``) and its inputs can be made up: floating tensors, and whole numbers for
embeddings. Of a layer whose parameters are sharded (``shards``) the rows that this rank holds are a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lmres.adapters.replay import shards
from lmres.adapters.replay.pure import why_not

LARGEST_SHARE = 0.25
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict", "Identity", "ParameterList", "ParameterDict"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = (bool, int, float, str, type(None))
# The only modules of torch that are computed; another kind is a wrapper, which does something with what is below it.
_TORCHS = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.nn.")
_SHARDERS = frozenset({"FullyShardedDataParallel", shards.FULLY_SHARDED})
_WRAPPERS = _SHARDERS | {"DistributedDataParallel", "SyncBatchNorm"}
_LIBRARIES = frozenset({"deepspeed", "fairscale", "megatron", "apex", "horovod", "colossalai"})
_SHARDED = ("_handle", "_flat_param", "_fsdp_wrapped_module")


@dataclass(slots=True, eq=False)
class Part:
    """``seen``: the leaves of what it was called with (a tensor as ``Like``), their tree, and how many elements.
    ``by_rows``: only the rows of its parameters that this rank holds are computed, without its hooks.
    ``gathered``: so many turns in a row its parameters were whole when they were to be computed."""

    name: str
    module: Any
    problem: str = ""
    by_rows: bool = False
    gathered: int = 0
    seen: tuple[list[Any], Any, int] | None = None

    def problem_now(self, torch: Any) -> str:
        """In its turn. Hooks may have been added, parameters replaced; and what is never in shards then would pass for
        ever without being computed."""
        if not self.by_rows:
            return problem_of(torch, self.module)
        self.gathered = 0 if shards.holds_rows(self.module) else self.gathered + 1
        stays = f"{shards.SHARDED}, and its parameters stay gathered between the steps" if self.gathered > 1 else ""
        return shards.problem_of_shard(torch, self.module) or stays

    def to_compute(self, torch: Any) -> Any:
        """The module to be called; None if there is nothing to compute on this rank."""
        if not self.by_rows:
            return self.module
        likes = [leaf for leaf in (self.seen[0] if self.seen is not None else []) if isinstance(leaf, Like)]
        dtype = next((like.dtype for like in likes if like.grad), None)
        return shards.rows_of(torch, self.module, dtype=dtype, device=likes[0].device if likes else None)


@dataclass(frozen=True, slots=True)
class Like:
    """What a made-up tensor has to be like."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any
    grad: bool


@dataclass(slots=True)
class Parts:
    """``batch``: the size of the batch in the step that was looked at."""

    torch: Any
    all: list[Part] = field(default_factory=list)
    batch: int = 0

    @staticmethod
    def of(torch: Any, roots: list[Any]) -> Parts:
        return Parts(torch, [part for i, root in enumerate(roots) for part in _parts(torch, i, root)])

    @property
    def covered(self) -> list[Part]:
        return [part for part in self.all if not part.problem and part.seen is not None]

    def look(self, part: Part, args: Any, kwargs: Any) -> None:
        """It was called with this."""
        from torch.utils import _pytree as pytree

        leaves, tree = pytree.tree_flatten((args, kwargs))
        torch = self.torch
        size = sum(leaf.numel() for leaf in leaves if torch.is_tensor(leaf))
        if part.seen is not None and part.seen[2] >= size:
            return
        likes: list[Any] = []
        for leaf in leaves:
            if torch.is_tensor(leaf) and type(leaf) in (torch.Tensor, torch.nn.Parameter):
                likes.append(Like(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.is_floating_point()))
            elif isinstance(leaf, _PLAIN):
                likes.append(leaf)
            else:
                part.problem = f"an argument is a {type(leaf).__name__}"
                return
        numbers = [like for like in likes if isinstance(like, Like) and not like.grad]
        if numbers and (embedding_size(torch, part.module) is None or any(n.dtype == torch.bool for n in numbers)):
            part.problem = f"an argument is a tensor of {numbers[0].dtype}"
            return
        part.seen = likes, tree, size


def embedding_size(torch: Any, module: Any) -> int | None:
    """Whole numbers below this are valid for all its embeddings; None if it has none."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return min((m.num_embeddings for m in module.modules() if isinstance(m, kinds)), default=None)


def _parts(torch: Any, index: int, root: Any) -> Iterator[Part]:
    inner = root.module if _is_parallel(root) else root
    most = LARGEST_SHARE * sum(p.numel() for p in inner.parameters())
    shut: set[int] = set()
    for name, module in inner.named_modules():
        if id(module) in shut:
            continue
        shown = f"{index}.{name}" if index else name or type(module).__name__
        compiled = _is_compiled(module)
        why = "it is compiled" if compiled else _wrapped(torch, module)
        if compiled or (why and not shards.is_fully_sharded(module)):
            shut |= {id(m) for m in module.modules()}
            yield Part(shown, module, why)
            continue
        children = any(True for _ in module.children())
        if not children and (shards.holds_rows(module) or _is_managed(module)):
            yield Part(shown, module, shards.problem_of_shard(torch, module), by_rows=True)
            continue
        if shards.kind_of(module).__name__ in _CONTAINERS or (module is inner and children):
            continue
        if children and sum(p.numel() for p in module.parameters()) > most:
            continue
        yield Part(shown, module, problem_of(torch, module))


def _is_managed(module: Any) -> bool:
    """FSDP2 cares for its parameters, whether they are gathered at the moment or not. (FSDP1 marks modules so too.)"""
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    return has_parameters and not _is_flattened(module) and getattr(module, "_is_fsdp_managed_module", False) is True


def _is_flattened(module: Any) -> bool:
    """FSDP1 keeps its parameters as pieces of a larger one."""
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in module._parameters.values())


def _is_parallel(root: Any) -> bool:
    """torch's own: its modules can be computed without it, and gradients that are asked for do not reach its hooks."""
    kinds = [kind for kind in type(root).__mro__ if kind.__name__ == "DistributedDataParallel"]
    return any(kind.__module__.startswith("torch.nn.parallel") for kind in kinds)


def _is_compiled(module: Any) -> bool:
    return (
        shards.kind_of(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    )


def _wrapped(torch: Any, module: Any) -> str:
    """Why nothing of it and below it can be computed by itself: it is not a plain module."""
    own = vars(module)
    if any(name in own or name in module._parameters or name in module._modules for name in _SHARDED):
        return shards.SHARDED
    for kind in type(module).__mro__:
        where = f"{kind.__module__}."
        if kind.__name__ in _WRAPPERS:
            return shards.SHARDED if kind.__name__ in _SHARDERS else f"{kind.__name__} talks to other ranks"
        if where.partition(".")[0] in _LIBRARIES or (where.startswith("torch.") and not where.startswith(_TORCHS)):
            return f"{kind.__name__} is not a plain module"
    groups = _groups(torch)
    if groups and any(isinstance(value, groups) for value in own.values()):
        return "it holds a process group"
    return shards.SHARDED if _is_flattened(module) else ""


def _groups(torch: Any) -> tuple[type, ...]:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.device_mesh import DeviceMesh

    return torch.distributed.ProcessGroup, DeviceMesh


def problem_of(torch: Any, module: Any) -> str:
    """Why this module should not be computed an extra time; empty if nothing speaks against it."""
    for each in module.modules():
        why = _wrapped(torch, each)
        if why:
            return why
        for parameter in each._parameters.values():
            if parameter is None:
                continue
            if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
                return shards.SHARDED if shards.is_sharded(parameter) else "a parameter is of its own kind"
            for hook in (parameter._backward_hooks or {}).values():
                why = why_not(hook)
                if why:
                    return why
        why = _problem_of_calls(torch, each)
        if why:
            return why
    return ""


def _problem_of_calls(torch: Any, module: Any) -> str:
    why = why_not(module.forward, module)
    if not why and type(module).__call__ is not torch.nn.Module.__call__:
        why = why_not(type(module).__call__.__get__(module), module)
    for name in _HOOKS:
        for hook in getattr(module, name, {}).values():
            why = why or why_not(hook, module, hook=True)
    return why
