"""What the host, or the container this process is in, could still give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from lmres.gemini.limits import Room, container_room

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes "none" as a very large number


def room(held: int, fraction: float) -> Room:
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        available = min([available, *_containers()])
    return Room(available=available, held=held, fraction=fraction)


def _containers() -> Iterator[int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "memory" not in names:
            continue
        root = _ROOT / "memory" if controllers else _ROOT
        # Inside a container the path may be the host's: then the mount itself is the container's group.
        group = root / path.lstrip("/")
        while True:
            found = _group(group, version=1 if controllers else 2)
            if found is not None:
                yield found
            if group in (root, group.parent):
                break
            group = group.parent


def _group(path: Path, version: int) -> int | None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    try:
        limit_text = (path / names[0]).read_text().strip()
        used = int((path / names[1]).read_text())
        limit = None if limit_text == "max" or int(limit_text) >= _NO_LIMIT else int(limit_text)
        fields = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        reclaimable = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    except (OSError, ValueError):
        return None
    return container_room(limit=limit, used=used, reclaimable=reclaimable)
