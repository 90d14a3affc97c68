"""The random generators of the process, as one value that can be put back."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Any


def get_rng(torch: Any) -> tuple[Any, Any, Any]:
    """torch's CPU state (uint8 tensor), Python's, and NumPy's if it is there."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_rng(torch: Any, state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state[2] is not None:
        numpy.random.set_state(state[2])


@contextlib.contextmanager
def kept_rng(torch: Any) -> Iterator[None]:
    """What happens inside leaves the generators as they were."""
    before = get_rng(torch)
    try:
        yield
    finally:
        set_rng(torch, before)


class Noted:
    """One state, packed into bytes when they are asked for."""

    __slots__ = ("_packed", "state")

    def __init__(self, state: tuple[Any, Any, Any]) -> None:
        self.state = state
        self._packed: bytes | None = None

    def packed(self) -> bytes:
        if self._packed is None:
            self._packed = pack(self.state)
        return self._packed


_HEAD = struct.Struct("<IIIBdBiBd")  # bytes of torch's, version and words of Python's, its gauss; NumPy's, or none


def pack(state: tuple[Any, Any, Any]) -> bytes:
    tensor, (version, words, gauss), legacy = state
    torch_bytes = ctypes.string_at(tensor.data_ptr(), tensor.numel())  # NumPy need not be there
    python_bytes = array("I", words).tobytes()
    numpy_bytes, position, has_gauss, cached = b"", 0, 0, 0.0
    if legacy is not None and legacy[0] == "MT19937":
        _, keys, position, has_gauss, cached = legacy
        numpy_bytes = keys.tobytes()
    head = _HEAD.pack(
        len(torch_bytes),
        version,
        len(words),
        gauss is not None,
        gauss or 0.0,
        bool(numpy_bytes),
        int(position),
        int(has_gauss),
        float(cached),
    )
    return b"".join((head, torch_bytes, python_bytes, numpy_bytes))


def unpack(torch: Any, data: bytes) -> tuple[Any, Any, Any]:
    """Raises ValueError when it is not what ``pack`` gives."""
    try:
        size, version, words, has_gauss, gauss, has_numpy, position, has_cached, cached = _HEAD.unpack_from(data)
        at = _HEAD.size
        tensor = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8).clone()
        at += size
        keys = array("I", data[at : at + 4 * words])
        at += 4 * words
    except struct.error as error:
        raise ValueError(f"the state of the random generators is torn: {error}") from None
    legacy = None
    numpy = sys.modules.get("numpy")
    if has_numpy and numpy is not None:
        legacy = ("MT19937", numpy.frombuffer(data[at:], dtype=numpy.uint32).copy(), position, has_cached, cached)
    return tensor, (version, tuple(keys), gauss if has_gauss else None), legacy
