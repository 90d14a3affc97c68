"""When a quiet worker counts as hung.

Quiet: nothing has been noted on its page, no event and no step (a program may train in a thread whose phases are not
noted). How long that may last:

- A fixed time (``hang_timeout_s``) counts as it is, but until the first step of a generation (imports, compilation, the
  first contact of all ranks) it is at least ten minutes and three times the setting. A process that is visibly stopped
  is compiling nothing: for it the setting counts then too. The same while the interpreter is on its way out.
- ``auto``: ten times the longest pause that was seen in this run between two events after the first step, from one
  minute to half an hour. At least ten minutes until the third step of a generation, and later everywhere but in what a
  training step consists of (``_SHORT``): the program's own code, a forward that is compiled anew, or a checkpoint may
  take long without being stuck. The longest pause outlives generations, since a program is the same program after a
  restart.

Only the worker's own work teaches (``teaches``): how long it waited for others, wrote files or was stopped says nothing
of how long its work may take. If a generation ends while an alarm stands, the pause that was taken for a hang teaches
too: if it was none, the next one is not called so again.

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
"""For what may take long without being stuck: a start, a checkpoint, the program's own code."""
START_FACTOR = 3
SETTLED_STEPS = 3
"""Until then a program may still compile."""
_SHORT: frozenset[Phase] = frozenset({"backward", "optimizer", "collective", "loader"})
_NOT_ITS_OWN: frozenset[Phase] = frozenset({"collective", "checkpoint_io"})


@dataclass(slots=True)
class History:
    """The longest pause between two events of a worker after its first step."""

    longest_ms: int = 0

    def note(self, pause_ms: int) -> None:
        self.longest_ms = max(self.longest_ms, pause_ms)


def teaches(phase: Phase, *, stopped: bool) -> bool:
    """Whether a pause in this phase says how long the worker's own work may take. ``stopped``: it was, meanwhile."""
    return phase not in _NOT_ITS_OWN and not stopped


def timeout_ms(
    setting_s: float | Literal["auto"],
    history: History,
    *,
    phase: Phase = "user",
    steps: int = SETTLED_STEPS,
    stopped: bool = False,
) -> int:
    """How long this worker may be quiet. ``steps``: as many it has completed in its generation."""
    if setting_s == "auto":
        usual_ms = min(max(AUTO_FACTOR * history.longest_ms, AUTO_LEAST_MS), AUTO_MOST_MS)
        return usual_ms if steps >= SETTLED_STEPS and phase in _SHORT else max(usual_ms, SLOW_LEAST_MS)
    fixed_ms = max(1, round(setting_s * 1000))
    if (steps == 0 or phase == "end") and not stopped:
        return max(SLOW_LEAST_MS, START_FACTOR * fixed_ms)
    return fixed_ms


@dataclass(slots=True)
class Quiet:
    """For how long one worker has been quiet. ``saw`` is called with each look at its page, in order; ``count`` is
    another whenever anything has been noted.

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
