"""A snapshot as two byte strings that together are one safetensors file.

``own`` is the header and the process's own tensors, ``shared`` the tensors that replicas have in common; ``own``
followed by ``shared`` is a file that any safetensors reader opens. That format allows no hole between tensors, so
they are ordered by the size of their elements, largest first: then each is aligned for its type without any padding.
The first part ends on a multiple of 64 bytes, with the one tensor of padding this needs. The header is filled up with
spaces to a multiple of 4 KiB, so that values that grow by a digit do not move everything behind them.

Types that the format does not know are stored as bytes; ``items`` of the meta data has their true type and shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmres.adapters.capture.state import FixedDict, FixedList, Item, Snapshot
from lmres.adapters.capture.tensors import DTYPES, FORMAT_NAMES, NAMES, quiet
from lmres.errors import CaptureError

ALIGNMENT = 64
HEADER_STEP = 4096
PADDING = "lmres.padding"
META = "lmres"
MAX_HEADER_BYTES = 1 << 30

Key = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything goes. ``shared_offsets`` and ``own_offsets`` belong to the items of the snapshot in order,
    counted in bytes from the start of each part (the own part starts with the header)."""

    shared_bytes: int
    own_bytes: int
    header: bytes
    shared_offsets: tuple[int, ...]
    own_offsets: tuple[int, ...]
    keys: tuple[Key, Key] = field(repr=False)
    shared_items: tuple[Item, ...] = field(repr=False)
    entries: str = field(repr=False)
    typed: dict[str, Any] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        return self.shared_bytes + self.own_bytes


def plan_layout(snapshot: Snapshot, previous: Layout | None = None) -> Layout:
    """Places for all items. ``previous``: of an earlier step, reused when names, types and shapes are the same."""
    with quiet():
        return _plan(snapshot, previous)


def _plan(snapshot: Snapshot, previous: Layout | None) -> Layout:
    same = previous is not None and previous.shared_items is snapshot.shared
    keys = (previous.keys[0] if previous is not None and same else _key(snapshot.shared), _key(snapshot.own))
    if previous is not None and previous.keys == keys:
        header = _header(snapshot.meta, previous.entries, previous.typed)
        moved = len(header) - len(previous.header)
        return Layout(
            shared_bytes=previous.shared_bytes,
            own_bytes=previous.own_bytes + moved,
            header=header,
            shared_offsets=previous.shared_offsets,
            own_offsets=tuple(at + moved for at in previous.own_offsets) if moved else previous.own_offsets,
            keys=previous.keys,
            shared_items=snapshot.shared,
            entries=previous.entries,
            typed=previous.typed,
        )
    own_offsets, own_bytes = _places(snapshot.own)
    shared_offsets, shared_bytes = _places(snapshot.shared)
    padding = -own_bytes % ALIGNMENT
    placed = [(at, item) for at, item in zip(own_offsets, snapshot.own, strict=True)]
    start = own_bytes + padding
    placed += [(start + at, item) for at, item in zip(shared_offsets, snapshot.shared, strict=True)]
    lines: list[tuple[int, int, str, Any]] = []
    typed: dict[str, Any] = {}
    for at, item in placed:
        size = item.tensor.numel() * item.tensor.element_size()
        name, shape = NAMES[item.tensor.dtype], list(item.tensor.shape)
        if name not in FORMAT_NAMES:
            typed[item.name] = {"dtype": name, "shape": shape}
            name, shape = "uint8", [size]
        entry = {"dtype": FORMAT_NAMES[name], "shape": shape, "data_offsets": [at, at + size]}
        lines.append((at, at + size, item.name, entry))
    if padding:
        entry = {"dtype": "U8", "shape": [padding], "data_offsets": [own_bytes, start]}
        lines.append((own_bytes, start, PADDING, entry))
    lines.sort(key=lambda line: line[:2])
    entries = json.dumps({name: entry for _, _, name, entry in lines}, separators=(",", ":"))[1:-1]
    header = _header(snapshot.meta, entries, typed)
    return Layout(
        shared_bytes=shared_bytes,
        own_bytes=len(header) + start,
        header=header,
        shared_offsets=shared_offsets,
        own_offsets=tuple(len(header) + at for at in own_offsets),
        keys=keys,
        shared_items=snapshot.shared,
        entries=entries,
        typed=typed,
    )


def _key(items: Sequence[Item]) -> Key:
    return tuple((item.name, item.tensor.dtype, tuple(item.tensor.shape)) for item in items)


def _places(items: Sequence[Item]) -> tuple[tuple[int, ...], int]:
    """Offsets of the items and the length of all."""
    offsets = [0] * len(items)
    at = 0
    for index in sorted(range(len(items)), key=lambda index: -items[index].tensor.element_size()):
        offsets[index] = at
        at += items[index].tensor.numel() * items[index].tensor.element_size()
    return tuple(offsets), at


def _header(meta: dict[str, Any], entries: str, typed: dict[str, Any]) -> bytes:
    text = _quoted({**meta, "types": typed})
    whole = f'{{"__metadata__":{{"{META}":"{text}"}}' + ("," + entries if entries else "") + "}"
    body = whole.encode("ascii")
    length = -(-(len(body) + 8) // HEADER_STEP) * HEADER_STEP
    if length > MAX_HEADER_BYTES:
        raise CaptureError(f"the description of the state has {len(body)} bytes; at most {MAX_HEADER_BYTES} fit")
    return (length - 8).to_bytes(8, "little") + body.ljust(length - 8)


def _quoted(meta: dict[str, Any]) -> str:
    """An object as JSON, as it stands within a JSON string. The text of what is fixed is made once."""
    parts = []
    changing = {}
    for key, value in meta.items():
        if isinstance(value, (FixedList, FixedDict)):
            if not hasattr(value, "text"):
                value.text = _text({key: value})
            parts.append(value.text)
        else:
            changing[key] = value
    return "{" + ",".join([*parts, _text(changing)]) + "}"


def _text(value: dict[str, Any]) -> str:
    """Without the outer braces."""
    return json.dumps(json.dumps(value, separators=(",", ":"), allow_nan=False))[2:-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of an image: in which part, where, and what it is."""

    shared: bool
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def parse(own: memoryview, shared_bytes: int) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The meta data and the tensors of an image, from its own part. Every field is checked.

    Raises CaptureError when the header is not one that ``plan_layout`` writes for parts of these lengths.
    """
    own_bytes = len(own)
    length = int.from_bytes(own[:8], "little") + 8 if own_bytes >= 8 else 0
    if not 8 < length <= min(own_bytes, MAX_HEADER_BYTES):
        raise CaptureError(f"the image's header says {length} bytes, but {own_bytes} bytes are there")
    header = _object(bytes(own[8:length]), "header")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {META} or not isinstance(metadata[META], str):
        raise CaptureError("the image's header has no meta data of this package")
    meta = _object(metadata[META].encode(), "meta data")
    typed = meta.pop("types", None)
    if not isinstance(typed, dict) or not set(typed) <= set(header):
        raise CaptureError("the image's meta data has no valid list of types")
    entries, at = {}, 0
    start = own_bytes - length
    for name, raw in header.items():
        entry, begin, end = _entry(name, raw, typed.get(name))
        if begin != at or end > start + shared_bytes or begin < start < end:
            raise CaptureError(f"the image's tensor '{name}' is at {begin} to {end}, expected at {at}")
        at = end
        # An empty tensor on the border may belong to either part: nothing is read from it.
        shared = begin >= start
        offset = begin - start if shared else begin + length
        if name != PADDING:
            entries[name] = Entry(shared=shared, offset=offset, size=end - begin, dtype=entry[0], shape=entry[1])
    if at != start + shared_bytes:
        raise CaptureError(f"the image's tensors have {at} bytes, but {start + shared_bytes} bytes are there")
    return meta, entries


def _object(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name comes twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise CaptureError(f"the image's {what} is no valid JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise CaptureError(f"the image's {what} is no JSON object")
    return found


_FROM_FORMAT = {code: name for name, code in FORMAT_NAMES.items()}


def _entry(name: str, raw: Any, typed: Any) -> tuple[tuple[torch.dtype, tuple[int, ...]], int, int]:
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CaptureError(f"the image's tensor '{name}' is not described as a tensor")
    code, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    kind = _FROM_FORMAT.get(code) if isinstance(code, str) else None
    dtype = DTYPES.get(kind) if kind is not None else None
    if dtype is None or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CaptureError(f"the image's tensor '{name}' has no valid type, shape or place")
    if typed is not None:
        if not isinstance(typed, dict) or set(typed) != {"dtype", "shape"} or not _sizes(typed["shape"]):
            raise CaptureError(f"the image's tensor '{name}' has no valid true type")
        dtype, shape = DTYPES.get(str(typed["dtype"])), typed["shape"]
        if dtype is None:
            raise CaptureError(f"the image's tensor '{name}' has the type '{typed['dtype']}', unknown to this torch")
    count = 1
    for size in shape:
        count *= size
    if offsets[1] - offsets[0] != count * dtype.itemsize:
        raise CaptureError(f"the image's tensor '{name}' has {offsets[1] - offsets[0]} bytes for shape {shape}")
    return (dtype, tuple(shape)), offsets[0], offsets[1]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(part) is int and 0 <= part < 1 << 62 for part in value)
