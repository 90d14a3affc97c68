"""A quick number for the values of a program's parameters.

It tells which of the past steps a loaded checkpoint holds; it is no digest, and certifies nothing. A few elements at
fixed places of a few parameters are hashed, which an optimizer's step changes nearly always.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from lmres.adapters.capture.program import sharded_parameters, walk
from lmres.adapters.capture.tensors import core, local, quiet

MAX_TENSORS = 16
MAX_ELEMENTS = 64


def fingerprint(roots: Iterable[torch.nn.Module]) -> int:
    """A 64-bit number: equal for equal parameters. Raises CaptureError for parameters that can not be captured."""
    return digest(*sampled(roots))


def sampled(roots: Iterable[torch.nn.Module]) -> tuple[int, list[tuple[dict[str, Any], str, torch.Tensor]]]:
    """How many parameters there are, and those that the number is made of: each with its place in its module."""
    roots = tuple(roots)
    with quiet():
        shards = sharded_parameters(roots)
        found = [
            (module._parameters, key, shards.get(id(tensor), tensor))
            for root in roots
            for _, module in walk(root)
            for key, tensor in module._parameters.items()
            if tensor is not None
        ]
        step = max(1, -(-len(found) // MAX_TENSORS))
        return len(found), found[::step]


def digest(count: int, chosen: Iterable[tuple[Any, str, torch.Tensor]]) -> int:
    """Of what ``sampled`` gave."""
    with quiet():
        hashed = xxhash.xxh3_64(str(count).encode())
        for _, _, tensor in chosen:
            part = core(local(tensor, "a parameter"))
            hashed.update(b"%d," % part.numel())
            hashed.update(_sample(part))
        return hashed.intdigest()


def _sample(tensor: torch.Tensor) -> bytes:
    """The bytes of some elements, evenly spread."""
    if tensor.numel() == 0:
        return b""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        chosen = flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))].contiguous()
    else:
        # Along the longest dimension, at the start of the others.
        dim = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        for other in reversed(range(tensor.dim())):
            if other != dim:
                tensor = tensor.select(other, 0)
        chosen = tensor[:: max(1, -(-tensor.numel() // MAX_ELEMENTS))].resolve_conj().resolve_neg().contiguous()
    chosen = chosen.cpu() if chosen.is_cuda else chosen
    return ctypes.string_at(chosen.data_ptr(), chosen.numel() * chosen.element_size())
