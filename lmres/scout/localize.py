"""Who holds up the others: from sightings of all workers to suspects. (To be completed.)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lmres.scout.sighting import Sighting


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    node_id: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Localized:
    """``detail``: one or two sentences for people. ``suspects`` may be named although the verdict is inconclusive."""

    failure_class: Literal["hang", "collective_desync"]
    verdict: Literal["attributed", "inconclusive"]
    suspects: tuple[Suspect, ...]
    detail: str


def localize(sightings: Iterable[Sighting]) -> Localized:
    """The newest sighting of each active node, as far as there is one; at least one is an alarm."""
    found = [(s, w) for s in sightings for w in s.workers]
    quiet = max((w.quiet_ms for _, w in found), default=0)
    return Localized(
        failure_class="hang", verdict="inconclusive", suspects=(), detail=f"no progress for {quiet / 1000:.1f} s"
    )
