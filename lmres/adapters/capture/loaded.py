"""An image, read: checked in every field before anything of the program is touched. Nothing is unpickled."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lmres.adapters.capture import image, values
from lmres.adapters.capture.image import Entry
from lmres.adapters.capture.rng import NUMPY_WORDS, PYTHON_VERSION, PYTHON_WORDS
from lmres.adapters.capture.state import FORMAT
from lmres.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """``tensors``: views of the image's memory by item name, which must stay mapped while they are in use."""

    meta: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]


def read(own: memoryview, shared: memoryview) -> Loaded:
    """An image from its two parts, of exactly their lengths. Raises CaptureError when a field is not valid."""
    own, shared = own.cast("B"), shared.cast("B")
    meta, entries = image.parse(own, shared.nbytes)
    check_meta(meta, entries)
    flat = {False: _over(own), True: _over(shared)}
    return Loaded(meta=meta, tensors={name: _view(flat[entry.shared], entry) for name, entry in entries.items()})


def _view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    if entry.size == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    part = flat[entry.offset : entry.offset + entry.size]
    if (part.data_ptr() % entry.dtype.itemsize) != 0:
        part = part.clone()
    return part.view(entry.dtype).view(entry.shape)


class _Buffer(ctypes.Structure):
    """``Py_buffer``: the way to the address of read-only memory, which torch would warn about."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _over(memory: memoryview) -> torch.Tensor:
    """The memory as bytes. The tensor keeps it from being unmapped; nobody writes to it."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not memory.readonly:
        return torch.frombuffer(memory, dtype=torch.uint8)
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        raw = (ctypes.c_char * memory.nbytes).from_address(view.buf)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    raw.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8)


# ---- the meta data

TOP = {
    "format",
    "torch",
    "roots",
    "optimizers",
    "settings",
    "changing",
    "others",
    "grads",
    "schedulers",
    "scalers",
    "generators",
    "extra_tensors",
    "states",
    "extra",
    "rng",
    "items",
    "changing_items",
}


def check_meta(meta: dict[str, Any], entries: Mapping[str, Entry]) -> None:
    """Raises CaptureError unless every field is of the form that ``collect`` writes."""
    _need(meta.get("format") == FORMAT, f"format {meta.get('format')!r}; this version reads format {FORMAT}")
    _need(set(meta) == TOP and isinstance(meta["torch"], str), "fields", sorted(meta))
    for which in ("items", "changing_items"):
        _need(isinstance(meta[which], dict) and set(meta[which]) <= set(entries), "items")
        for name, note in meta[which].items():
            _check_note(name, note, entries[name])
    for root in _records(meta["roots"], "roots", {"class", "parameters", "buffers"}):
        _check_named(root["parameters"], entries)
        _check_named(root["buffers"], entries)
    optimizers = _records(meta["optimizers"], "optimizers", {"class", "groups", "state"})
    for key in ("settings", "changing", "others"):
        _need(len(_list(meta[key], key)) == len(optimizers), key)
    for optimizer, settings, changing, others in zip(
        optimizers, meta["settings"], meta["changing"], meta["others"], strict=True
    ):
        _check_optimizer(optimizer, settings, changing, others, entries)
    grads = meta["grads"]
    _need(isinstance(grads, dict) and set(grads) <= set(entries), "gradients")
    _need(all(item is None or _is_item(item, entries) for item in grads.values()), "gradients")
    for what in ("schedulers", "scalers"):
        for record in _records(meta[what], what, {"class", "state"}):
            _check_mapping(record["state"], what, entries)
    for made in _list(meta["generators"], "generators"):
        _need(isinstance(made, list) and len(made) == 2 and _is_item(made[1], entries), "generators", made)
        _need(entries[made[1]].dtype == torch.uint8 and made[0] in ("cpu", "cuda"), "generators", made)
    _check_named(meta["extra_tensors"], entries)
    for added in _list(meta["states"], "states"):
        _need(isinstance(added, list) and len(added) == 2 and isinstance(added[0], str), "states", added)
        values.check(added[1], entries)
    _check_rng(meta["rng"], entries)


def _need(holds: bool, what: str, found: object = None) -> None:
    if not holds:
        text = "" if found is None else f": found {str(found)[:80]}"
        raise CaptureError(f"the image's meta data is not valid in its {what}{text}")


def _list(value: Any, what: str) -> list[Any]:
    _need(isinstance(value, list), what, value)
    found: list[Any] = value
    return found


def _records(value: Any, what: str, fields: set[str]) -> list[dict[str, Any]]:
    for record in _list(value, what):
        _need(isinstance(record, dict) and set(record) == fields, what, record)
        _need(isinstance(record["class"], str), what, record["class"])
    return _list(value, what)


def _is_item(name: object, entries: Mapping[str, Entry]) -> bool:
    return isinstance(name, str) and name in entries


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def _check_named(pairs: Any, entries: Mapping[str, Entry]) -> None:
    for pair in _list(pairs, "named tensors"):
        fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and _is_item(pair[1], entries)
        _need(fits, "named tensors", pair)
    _need(len({pair[0] for pair in pairs}) == len(pairs), "named tensors: a name comes twice")


def _check_note(name: str, note: Any, entry: Entry) -> None:
    _need(isinstance(note, dict) and set(note) <= {"shard", "stride", "device"}, "items", name)
    _need(note.get("device", "cuda") == "cuda", "items", name)
    if "stride" in note:
        stride = note["stride"]
        _need(_is_sizes(stride) and len(stride) == len(entry.shape), "items", name)
    if "shard" in note:
        shard = note["shard"]
        _need(isinstance(shard, dict) and set(shard) == {"shape", "placements", "mesh", "coordinate"}, "items", name)
        _need(all(_is_sizes(shard[key]) for key in ("shape", "mesh", "coordinate")), "items", name)
        placements = shard["placements"]
        fits = isinstance(placements, list) and all(isinstance(placement, str) for placement in placements)
        _need(fits and len(placements) == len(shard["mesh"]), "items", name)


def _check_mapping(value: Any, what: str, entries: Mapping[str, Entry]) -> None:
    _need(isinstance(value, dict) and set(value) <= {"dict", "ordered"} and len(value) == 1, what, value)
    values.check(value, entries)


def _check_optimizer(
    optimizer: dict[str, Any], settings: Any, changing: Any, others: Any, entries: Mapping[str, Entry]
) -> None:
    groups = _list(optimizer["groups"], "groups")
    for group in groups:
        _need(all(_is_item(item, entries) for item in _list(group, "groups")), "groups", group)
    _need(len(_list(settings, "settings")) == len(groups), "settings")
    for values_of_group in settings:
        _check_mapping(values_of_group, "settings", entries)
    for state in [*_list(optimizer["state"], "optimizer state"), *_list(changing, "optimizer state")]:
        _need(isinstance(state, list) and len(state) == 3, "optimizer state", state)
        group, position, value = state
        fits = type(group) is int and type(position) is int and 0 <= group < len(groups)
        _need(fits and 0 <= position < len(groups[group]), "optimizer state", state[:2])
        _check_mapping(value, "optimizer state", entries)
    _check_mapping(others, "optimizer state", entries)


def _check_rng(rng: Any, entries: Mapping[str, Entry]) -> None:
    _need(isinstance(rng, dict) and set(rng) == {"torch", "cuda", "python", "numpy"}, "generators", rng)

    def is_bytes(item: Any, size: int | None = None) -> bool:
        found = entries.get(item) if isinstance(item, str) else None
        return found is not None and found.dtype == torch.uint8 and size in (None, found.size)

    _need(is_bytes(rng["torch"]), "generators", rng["torch"])
    for made in _list(rng["cuda"], "generators"):
        _need(isinstance(made, list) and len(made) == 2 and type(made[0]) is int and made[0] >= 0, "generators", made)
        _need(is_bytes(made[1]), "generators", made)
    python, numpy = _list(rng["python"], "generators"), rng["numpy"]
    _need(len(python) == 3 and is_bytes(python[0], 4 * PYTHON_WORDS), "generators", python)
    _need(python[1] == PYTHON_VERSION and (python[2] is None or type(python[2]) is float), "generators", python)
    if numpy is not None:
        _need(isinstance(numpy, list) and len(numpy) == 4 and is_bytes(numpy[0], 4 * NUMPY_WORDS), "generators", numpy)
        _need(type(numpy[1]) is int and 0 <= numpy[1] <= NUMPY_WORDS and numpy[2] in (0, 1), "generators", numpy)
        _need(type(numpy[3]) is float, "generators", numpy)
