"""How old each node's heartbeat is, by watching the leases for about one interval.

A lease is a counter that its owner moves; when it moved is only known to who saw it move. No clock of another host is
read. Watching ends as soon as every node asked for has moved once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lmres.cli.observer import Beat

INTERVALS = 2.5
"""As many may pass before the protocol itself calls a lease silent."""
MIN_WATCH_S = 0.5
MAX_WATCH_S = 5.0
_LOOKS_PER_INTERVAL = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """``moved``: it moved while it was watched, ``age_s`` ago. Else it has stood still for ``age_s`` or longer."""

    moved: bool
    age_s: float


def watch_heartbeats(
    read: Callable[[], Mapping[str, Beat]],
    first: Mapping[str, Beat],
    *,
    nodes: Collection[str],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Heartbeat]:
    """The heartbeats of ``nodes``. ``first``: the leases as read just now."""
    start = clock()
    leases = dict(first)
    moved: dict[str, float] = {}
    limit_s = min(MAX_WATCH_S, max(MIN_WATCH_S, INTERVALS * interval_s))
    pause_s = min(0.5, max(0.02, interval_s / _LOOKS_PER_INTERVAL))
    while not all(n in moved for n in nodes) and clock() - start < limit_s:
        sleep(pause_s)
        newest = dict(read())
        now = clock()
        for node_id, beat in newest.items():
            before = leases.get(node_id)
            if before is None or before.revision != beat.revision:
                moved[node_id] = now
        leases = newest
    end = clock()
    return {n: Heartbeat(moved=n in moved, age_s=round(max(0.0, end - moved.get(n, start)), 3)) for n in nodes}
