"""What the host, or the container this process is in, could still give."""

from __future__ import annotations

import psutil

from lmres import cgroups
from lmres.gemini.limits import Room, container_room


def room(held: int, fraction: float) -> Room:
    rooms = (container_room(limit=g.limit, used=g.used, reclaimable=g.cached) for g in cgroups.memory_groups())
    found = [psutil.virtual_memory().available, *(r for r in rooms if r is not None)]
    return Room(available=min(found), held=held, fraction=fraction)
