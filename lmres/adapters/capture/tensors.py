"""What is known about single tensors: which kinds can be captured, and which memory of theirs counts.

* A sharded tensor is its local shard; where the shard belongs (mesh, placements, whole shape) is kept for the check.
* A dimension of stride 0 repeats the same memory: only one of the repetitions counts (``core``), since torch refuses
  to write into the others.
* What can not be captured exactly is refused by name: sparse, quantized, of unknown size, on no device, or of a class
  that has its own idea of what an operation does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lmres.errors import CaptureError

# The names that the safetensors format knows since 0.4. Others are stored as bytes, their true type in the meta data.
FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
AS_BYTES = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*FORMAT_NAMES, *AS_BYTES) if hasattr(torch, name)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PLAIN_FUNCTION = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Operations in here are the machine's own: no gradient, no subclass, no mode of the program sees them."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if not torch._C._len_torch_dispatch_stack():  # the usual case, and much faster
            yield
            return
        with _disable_current_modes():
            yield


def scalar(tensor: torch.Tensor) -> Any:
    """The value of a tensor of one element, past whatever a program (or another part of ours) put over ``item``."""
    return torch._C.TensorBase.item(tensor)


def dtensor_class() -> type | None:
    """DTensor, if this process ever loaded it: without it no tensor can be one."""
    import sys

    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_plain(kind: type) -> bool:
    """Whether tensors of this class behave as ``torch.Tensor`` does (a subclass that only adds attributes)."""
    like: Any = kind
    function, dispatch = like.__torch_function__, like.__torch_dispatch__
    return getattr(function, "__func__", function) in _PLAIN_FUNCTION and bool(dispatch is _PLAIN_DISPATCH)


_plain: dict[type, bool] = {torch.Tensor: True, torch.nn.Parameter: True}


def local(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The part of a tensor that this process holds; refuses what can not be captured exactly."""
    kind = type(tensor)
    plain = _plain.get(kind)
    if plain is None:
        if issubclass(kind, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(f"{where} has no size yet ({kind.__name__}): run one forward first")
        sharded = dtensor_class()
        if sharded is not None and issubclass(kind, sharded):
            return local(tensor._local_tensor, where)
        plain = _plain[kind] = is_plain(kind)
    if not plain:
        raise CaptureError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, a tensor class with its own operations: "
            "plain tensors and DTensor can be captured"
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{where} is sparse ({tensor.layout}): dense tensors can be captured")
    if tensor.dtype not in NAMES:
        raise CaptureError(f"{where} has the type {tensor.dtype}, which can not be captured")
    if tensor.device.type not in ("cpu", "cuda"):
        raise CaptureError(f"{where} is on the device '{tensor.device}': tensors on cpu and cuda can be captured")
    return tensor


def core(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with one of each repetition: a dimension of stride 0 becomes one of size 1."""
    if tensor.is_contiguous() or 0 not in tensor.stride():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for comparisons that tell -0.0 from 0.0 and hold for NaN."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(SAME_SIZE_INTEGER[tensor.element_size()])


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every element is +0."""
    return tensor.numel() == 0 or not scalar(bits(tensor).any())


def spec_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Where a shard belongs, as JSON; None for a plain tensor."""
    sharded = dtensor_class()
    if sharded is None or not isinstance(tensor, sharded):
        return None
    whole: Any = tensor
    mesh = whole.device_mesh
    return {
        "shape": list(whole.shape),
        "placements": [str(placement) for placement in whole.placements],
        "mesh": list(mesh.shape),
        "coordinate": list(mesh.get_coordinate() or ()),
    }
