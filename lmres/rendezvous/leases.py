"""Who is alive, judged by the observer's own clock.

A lease is a counter that its owner moves. An observer remembers when it last saw it move, on its own monotonic clock;
no clock is compared between hosts. Time in which the observer itself could not look (it was stopped, or the store did
not answer) does not count against anybody: it is left out of ``attended_ms``, the clock of all that waits for others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmres.errors import RecordError
from lmres.ports import Entry
from lmres.rendezvous.codec import decode
from lmres.rendezvous.state import Lease
from lmres.scout.sighting import Pace


@dataclass(slots=True)
class _Seen:
    """``moved_ms`` is put off by the gaps in looking, ``heard_ms`` is not."""

    lease: Lease
    revision: int
    moved_ms: int
    heard_ms: int


@dataclass(slots=True)
class LeaseTable:
    """``interval_ms``: how often an observer means to look; ``timeout_ms``: how long a lease may stand still."""

    interval_ms: int
    timeout_ms: int
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _looked_ms: int | None = None
    _missed_ms: int = 0
    _resumed_ms: int = 0

    def observe(self, entries: Iterable[tuple[str, Entry]], now_ms: int) -> None:
        """``entries``: node id and its lease, all read at once."""
        self._forgive_gap(now_ms)
        for node_id, entry in entries:
            seen = self._seen.get(node_id)
            if seen is not None and seen.revision == entry.mod_revision:
                continue
            try:
                lease = decode(Lease, entry.value)
            except RecordError:
                lease = None
            if lease is None and seen is not None:
                seen.revision = entry.mod_revision  # a torn lease has not moved, but can still be compared
                continue
            self._seen[node_id] = _Seen(
                lease=lease or Lease(incarnation="", counter=0),
                revision=entry.mod_revision,
                moved_ms=now_ms,
                heard_ms=now_ms,
            )

    def expect(self, node_ids: Iterable[str], now_ms: int) -> None:
        """Members without a lease count as if theirs stood still from now on."""
        for node_id in node_ids:
            if node_id not in self._seen:
                empty = Lease(incarnation="", counter=0)
                self._seen[node_id] = _Seen(lease=empty, revision=0, moved_ms=now_ms, heard_ms=now_ms)

    def _forgive_gap(self, now_ms: int) -> None:
        """Of a gap in looking only one interval counts. An outage ends in a slow answer, so it makes two gaps."""
        gap_ms = now_ms - self._looked_ms if self._looked_ms is not None else 0
        if self._looked_ms is None:
            self._resumed_ms = now_ms
        if gap_ms > self.interval_ms + self.interval_ms // 2:
            missed_ms = gap_ms - self.interval_ms
            self._missed_ms += missed_ms
            self._resumed_ms = now_ms
            for seen in self._seen.values():
                seen.moved_ms += missed_ms
        self._looked_ms = now_ms

    def attended_ms(self, now_ms: int) -> int:
        """The local clock without the time in which this observer could not look."""
        return now_ms - self._missed_ms

    def revision(self, node_id: str) -> int:
        seen = self._seen.get(node_id)
        return seen.revision if seen is not None else 0

    def heard_ms(self, node_id: str) -> int | None:
        """When the lease was last seen to move."""
        seen = self._seen.get(node_id)
        return seen.heard_ms if seen is not None else None

    def heard_since_gap(self, node_id: str) -> bool:
        """Whether the lease has moved since this observer could last not look.

        What kept it from looking may keep others from beating for a while longer.
        """
        seen = self._seen.get(node_id)
        return seen is not None and seen.heard_ms > self._resumed_ms

    def counter(self, node_id: str) -> int:
        seen = self._seen.get(node_id)
        return seen.lease.counter if seen is not None else 0

    def step(self, node_id: str) -> int | None:
        seen = self._seen.get(node_id)
        return seen.lease.step if seen is not None else None

    def paces(self, node_id: str) -> tuple[Pace, ...]:
        seen = self._seen.get(node_id)
        return seen.lease.paces if seen is not None else ()

    def quiet_ms(self, node_id: str, now_ms: int) -> int:
        """How long the lease has stood still; 0 for one never seen."""
        seen = self._seen.get(node_id)
        return now_ms - seen.moved_ms if seen is not None else 0

    def is_over(self, node_id: str, now_ms: int) -> bool:
        return self.quiet_ms(node_id, now_ms) >= self.timeout_ms

    def is_silent(self, node_id: str, now_ms: int) -> bool:
        """Late by more than two intervals, not yet over."""
        return self.quiet_ms(node_id, now_ms) > 2 * self.interval_ms + self.interval_ms // 2

    def forget(self, node_id: str) -> None:
        self._seen.pop(node_id, None)

    def next_expiry_ms(self, node_ids: Iterable[str], now_ms: int) -> int:
        """Until the first of these leases is over; the timeout if none is known."""
        left = [self.timeout_ms - self.quiet_ms(n, now_ms) for n in node_ids if n in self._seen]
        return max(0, min(left, default=self.timeout_ms))
