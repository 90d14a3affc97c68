"""Which ranks may have the same shared part: those with the same text of it, and on the same kind of machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from lmres.adapters.capture.image import Layout

REPLICATE = "R"
"""As torch's ``Replicate`` is written."""


class Equals:
    """Remembers the text of the last layout: it seldom changes. ``machine`` gives the kind of machine, as text."""

    def __init__(self, machine: Callable[[], str]) -> None:
        self._machine = machine
        self._of: tuple[object, object] = (None, None)
        self._text = ""

    def text(self, layout: Layout, notes: dict[str, Any]) -> str:
        """``notes``: of the snapshot (``meta["items"]``): where a shard belongs."""
        key = layout.keys[0]
        if self._of[0] is not key or self._of[1] is not notes:
            shards = [_of_any_replica(notes.get(item.name)) for item in layout.shared_items]
            what = repr(([(name, str(dtype), shape) for name, dtype, shape in key], shards, self._machine()))
            self._text = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
            self._of = key, notes
        return self._text


def _of_any_replica(note: dict[str, Any] | None) -> Any:
    """Where a shard belongs, but not which of its replicas it is."""
    spec = (note or {}).get("shard")
    if note is None or spec is None or len(spec["coordinate"]) != len(spec["placements"]):
        return note  # plain, or this rank has no place in the mesh
    place = [at for at, kind in zip(spec["coordinate"], spec["placements"], strict=True) if kind != REPLICATE]
    return {**note, "shard": {**spec, "coordinate": place}}
