"""How long each phase of a recovery took on this node, for ``recovery_completed``.

The phases follow each other: from the failure to its notice (detect), to the committed plan (decide), to the end of the
old workers (stop), to the formed group (rendezvous), to the start of the new workers (start), to the state put back in
place (restore; None where none was), to their first completed optimizer step (first_step). A phase that can not be seen
here (no bootstrap in the workers, say) is None; the total then ends with the start of the workers.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("detect_s", "decide_s", "stop_s", "rendezvous_s", "start_s", "restore_s", "first_step_s", "total_s")


@dataclass(slots=True)
class Marks:
    """Moments of one recovery, in ms of this host's monotonic clock; None until they happen."""

    generation: int
    cause: str
    detect_ms: int | None
    noticed_ms: int
    planned_ms: int
    stopped_ms: int | None = None
    formed_ms: int | None = None
    started_ms: int | None = None
    restored_ms: int | None = None
    first_step_ms: int | None = None

    def phases(self) -> dict[str, float | None]:
        """Seconds by phase, in the order of ``PHASES``."""
        stopped = self.stopped_ms if self.stopped_ms is not None else self.planned_ms
        spans = (
            self.detect_ms,
            _span(self.noticed_ms, self.planned_ms),
            _span(self.planned_ms, stopped),
            _span(stopped, self.formed_ms),
            _span(self.formed_ms, self.started_ms),
            _span(self.started_ms, self.restored_ms),
            _span(self.restored_ms if self.restored_ms is not None else self.started_ms, self.first_step_ms),
            self._total(),
        )
        return {name: None if span is None else max(0, span) / 1000 for name, span in zip(PHASES, spans, strict=True)}

    def _total(self) -> int | None:
        end = self.first_step_ms if self.first_step_ms is not None else self.started_ms
        seen = _span(self.noticed_ms, end)
        return None if seen is None else seen + (self.detect_ms or 0)


def _span(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start
