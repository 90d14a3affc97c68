"""Layers whose parameters are sharded over their rows (FSDP2, HSDP): computed with the rows that a rank holds.

Peers along the replicated dimension hold the same rows. No parameter is gathered, so there is no collective that could
hang. Only kinds of layers of which some rows are a layer of the same kind.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

SHARDED = "it is sharded"
FULLY_SHARDED = "FSDPModule"
_ALL_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "_local_tensor")


def holds_rows(module: Any) -> bool:
    """Some parameter of its own is sharded now."""
    return any(map(is_sharded, module._parameters.values()))


def is_fully_sharded(module: Any) -> bool:
    """It was itself given to FSDP2's ``fully_shard``."""
    return any(kind.__name__ == FULLY_SHARDED for kind in type(module).__mro__)


def kind_of(module: Any) -> type:
    """Its class before ``fully_shard`` changed it, which puts one of its own and ``FSDPModule`` in front."""
    above = type(module).__mro__
    names = [kind.__name__ for kind in above]
    return above[names.index(FULLY_SHARDED) + 1] if FULLY_SHARDED in names else above[0]


def problem_of_shard(torch: Any, module: Any) -> str:
    """Why the rows of this module can not be computed by themselves; empty if they can, or if it can not be told now
    because its parameters are gathered."""
    if kind_of(module) not in _kinds(torch) or "forward" in vars(module):
        return f"{SHARDED}, and only plain linear layers, convolutions and embeddings are computed by their rows"
    if getattr(module, "groups", 1) != 1 or getattr(module, "max_norm", None) is not None:
        return f"{SHARDED}, and its rows are no layer of their own"
    if not module._parameters.keys() <= {"weight", "bias"} or "weight" in vars(module):
        return f"{SHARDED}, and its weight is made of something else"
    held = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not any(map(is_sharded, held)):
        return ""
    if not all(_is_by_rows(torch, parameter) for parameter in held):
        return f"{SHARDED} in another way than by its rows"
    if not any(map(_has_replicas, held)):
        return f"{SHARDED}, and nobody else holds the same rows"
    return ""


def rows_of(torch: Any, module: Any, *, dtype: Any, device: Any) -> Any:
    """A layer of the rows that this rank holds now, without hooks; on the same memory if they are of this type and on
    this device (None: whatever they are). None if it holds no rows, or the parameters are gathered at the moment."""
    held: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        held[name] = None
        if parameter is not None:
            local = getattr(parameter, "_local_tensor", None)
            if local is None or not local.numel():
                return None
            local = local.detach().to(device=device or local.device, dtype=dtype or local.dtype)
            held[name] = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    kind: Any = kind_of(module)
    layer = kind.__new__(kind)
    vars(layer).update(vars(module))
    vars(layer).update({hooks: OrderedDict() for hooks in _ALL_HOOKS}, _parameters=held, _compiled_call_impl=None)
    if kind is torch.nn.Embedding:
        vars(layer).update(num_embeddings=len(held["weight"]), padding_idx=None)
    return layer


def _kinds(torch: Any) -> tuple[type, ...]:
    nn = torch.nn
    return nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding


def _is_by_rows(torch: Any, parameter: Any) -> bool:
    if type(getattr(parameter, "_local_tensor", None)) is not torch.Tensor:
        return False
    return all(
        type(place).__name__ == "Replicate" or (type(place).__name__ == "Shard" and place.dim == 0)
        for place in parameter.placements
    )


def _has_replicas(parameter: Any) -> bool:
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(type(place).__name__ == "Replicate" and size > 1 for place, size in sizes)
