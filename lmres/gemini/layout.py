"""The safetensors layout: where each tensor lies in an image's bytes. Reads and writes headers; no tensor, no file.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length of the header, the header as
JSON (``{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}``), then the data, which the tensors cover
without gap and without overlap. Headers come from memory that a failing process wrote and from files: everything is
checked before it is used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from lmres.errors import RecordError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_ALIGNMENT = 8
_PREFIX = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size
_METADATA = "__metadata__"
_MAX_DIMENSIONS = 64

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F4",), 4),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor's place. ``begin`` and ``end`` in bytes from the start of the data, after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """``entries`` in order of their place. ``header_length``: prefix included; there the data begins."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    header_length: int
    data_length: int

    @property
    def length(self) -> int:
        return self.header_length + self.data_length


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Prefix and header, padded so that the data begins at a multiple of 8 bytes. Raises ``RecordError``."""
    found = sorted(entries, key=lambda entry: (entry.begin, entry.end, entry.name))
    _check_entries(found)
    said: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in found:
        if entry.name in said or entry.name == _METADATA:
            raise RecordError(f"tensor {_shown(entry.name)} is named twice")
        said[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    data = json.dumps(said, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    if len(data) > MAX_HEADER_BYTES:
        raise RecordError(f"a header of {len(data)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return _PREFIX.pack(len(data)) + data


def header_length(prefix: bytes) -> int:
    """Bytes of prefix and header together, from the first 8 bytes. Raises ``RecordError``."""
    if len(prefix) < PREFIX_BYTES:
        raise RecordError(f"{len(prefix)} bytes are too few for a header")
    (length,) = _PREFIX.unpack(prefix[:PREFIX_BYTES])
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise RecordError(f"a header of {length} bytes: 2 to {MAX_HEADER_BYTES} are allowed")
    return PREFIX_BYTES + int(length)


def decode_header(data: bytes | memoryview, *, total_length: int) -> Header:
    """Reads the header at the start of ``data``, which belongs to ``total_length`` bytes in all.

    Raises ``RecordError`` unless every tensor has a known type, the bytes its shape needs, and a place of its own
    within the data, of which no byte is left over.
    """
    length = header_length(bytes(data[:PREFIX_BYTES]))
    if length > min(len(data), total_length):
        raise RecordError(f"the header ends at byte {length}, only {min(len(data), total_length)} are there")
    text = bytes(data[PREFIX_BYTES:length])
    if not text.startswith(b"{"):
        raise RecordError("the header does not begin with {")
    try:
        said = json.loads(text.decode("utf-8"), object_pairs_hook=_no_twins)
    except RecursionError:
        raise RecordError("the header is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"the header is no JSON: {error}") from None
    metadata = said.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RecordError(f"{_METADATA} is not a table of texts")
    entries = sorted((_entry(name, value) for name, value in said.items()), key=lambda e: (e.begin, e.end, e.name))
    end = _check_entries(entries)
    if length + end != total_length:
        raise RecordError(f"header and tensors end at byte {length + end}, {total_length} bytes are there")
    return Header(entries=tuple(entries), metadata=MappingProxyType(metadata), header_length=length, data_length=end)


def _check_entries(entries: Iterable[Entry]) -> int:
    """Where the last one ends."""
    end = 0
    for entry in entries:
        if entry.begin != end or entry.end < entry.begin:
            raise RecordError(
                f"tensor {_shown(entry.name)} lies at bytes {entry.begin} to {entry.end}, expected to begin at {end}"
            )
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise RecordError(f"tensor {_shown(entry.name)} has the unknown type {_shown(entry.dtype)}")
        needed = math.prod(entry.shape) * bits
        if needed != entry.length * 8:
            raise RecordError(
                f"tensor {_shown(entry.name)}, {entry.dtype} {list(entry.shape)!r:.100}, needs {needed / 8:g} bytes "
                f"and has {entry.length}"
            )
        end = entry.end
    return end


def _entry(name: str, said: object) -> Entry:
    if not isinstance(said, dict):
        raise RecordError(f"tensor {_shown(name)} is described by {_shown(said)}")
    dtype, shape, place = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str):
        raise RecordError(f"tensor {_shown(name)} has the type {_shown(dtype)}")
    if not _counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise RecordError(f"tensor {_shown(name)} has the shape {_shown(shape)}")
    if not _counts(place) or len(place) != 2:
        raise RecordError(f"tensor {_shown(name)} has the place {_shown(place)}")
    return Entry(name=name, dtype=dtype, shape=tuple(shape), begin=place[0], end=place[1])


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
