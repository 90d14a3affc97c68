"""How often the state is captured when the policy says ``auto``: as often as the overhead budget allows.

The interval is a power of two, so that ranks that measure differently still meet: every longer interval's steps are
steps of the shorter ones too.
"""

from __future__ import annotations

import math

MAX_INTERVAL = 1024
WEIGHT = 0.2


class Pace:
    def __init__(self, interval_steps: int, overhead_budget: float) -> None:
        """``interval_steps`` 0: measured. ``overhead_budget``: the part of a step's time that capturing may take."""
        self.interval = interval_steps or 1
        self._auto = interval_steps == 0
        self._budget = overhead_budget
        self._step_s: float | None = None
        self._cost_s: float | None = None

    def is_due(self, step: int) -> bool:
        return step > 0 and step % self.interval == 0

    def step_took(self, seconds: float) -> None:
        self._step_s = _mean(self._step_s, seconds)

    def capture_took(self, seconds: float) -> None:
        self._cost_s = _mean(self._cost_s, seconds)
        if self._auto and self._step_s and self._cost_s is not None:
            wanted = self._cost_s / (self._budget * self._step_s)
            self.interval = min(MAX_INTERVAL, 1 << max(0, math.ceil(math.log2(max(wanted, 1.0)))))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
