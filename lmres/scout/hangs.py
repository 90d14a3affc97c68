"""When a quiet worker counts as hung.

Quiet: nothing has been noted on its page (its ``event_count`` stands still). How long that may last:

- A fixed time (``hang_timeout_s``) counts as it is, but until the first step of a generation (imports, compilation, the
  first contact of all ranks) it is at least ten minutes and three times the setting. A process that is visibly stopped
  is compiling nothing: for it the setting counts then too. The same while the interpreter is on its way out.
- ``auto``: ten times the longest pause that was seen in this run between two events after the first step, from one
  minute to half an hour; at least ten minutes until the first step and while checkpoints are read or written. The
  longest pause outlives generations, since a program is the same program after a restart.

Time in which the watcher itself could not look does not count: whoever was frozen together with it (a host that slept)
is not hung. Times are milliseconds; ``quiet`` is measured by the caller's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmres.scout.sighting import Phase

AUTO_FACTOR = 10
AUTO_LEAST_MS = 60_000
AUTO_MOST_MS = 1_800_000
SLOW_LEAST_MS = 600_000
"""For what may take long without being stuck: a start, a checkpoint."""
START_FACTOR = 3


@dataclass(slots=True)
class History:
    """The longest pause between two events of a worker after its first step."""

    longest_ms: int = 0

    def note(self, pause_ms: int) -> None:
        self.longest_ms = max(self.longest_ms, pause_ms)


def timeout_ms(
    setting_s: float | Literal["auto"],
    history: History,
    *,
    phase: Phase = "user",
    started: bool = True,
    stopped: bool = False,
) -> int:
    """How long this worker may be quiet. ``started``: it has completed a step in its generation."""
    if setting_s == "auto":
        usual_ms = min(max(AUTO_FACTOR * history.longest_ms, AUTO_LEAST_MS), AUTO_MOST_MS)
        slow = not started or phase in ("start", "checkpoint_io", "end")
        return max(usual_ms, SLOW_LEAST_MS) if slow else usual_ms
    fixed_ms = max(1, round(setting_s * 1000))
    if (not started or phase == "end") and not stopped:
        return max(SLOW_LEAST_MS, START_FACTOR * fixed_ms)
    return fixed_ms


@dataclass(slots=True)
class Quiet:
    """For how long one worker has been quiet. ``saw`` is called with each look at its page, in order.

    A look that comes later than ``MAX_TURN_MS`` after the one before counts as if it had come then.
    """

    quiet_ms: int = 0
    _count: int | None = None
    _at_ms: int = 0

    MAX_TURN_MS = 2_000

    def saw(self, count: int, event_ms: int, now_ms: int) -> int:
        """Answers the pause that has just ended, 0 if none has. ``event_ms``: when the newest event was noted."""
        passed_ms = min(max(0, now_ms - self._at_ms), self.MAX_TURN_MS) if self._count is not None else 0
        first, moved = self._count is None, count != self._count
        self._count, self._at_ms = count, now_ms
        if not moved:
            self.quiet_ms += passed_ms
            return 0
        ended_ms = 0 if first else self.quiet_ms
        # What it noted long ago, while nobody looked, is no quiet that anybody has seen.
        self.quiet_ms = min(max(0, now_ms - event_ms), passed_ms)
        return ended_ms
