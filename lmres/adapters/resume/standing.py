"""Standing still at a boundary, because the agent asks for it: so that all ranks stop at one step that is saved.

The agent writes one word to the progress page: the step at whose boundary to stand still, ``NEXT`` for the next
boundary whatever it is, 0 for none. The worker looks at it once a step. While it stands it marks progress, since it
does not hang; it goes on when the word says so, or after ``STAND_S``, whatever became of the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

NEXT = 1
STAND_S = 10.0
_POLL_S = 0.005
_MARK_S = 0.05


class Asker(Protocol):
    """The way to the agent."""

    def pause_at(self) -> int: ...

    def paused(self, step: int, *, not_before: int = 0, problem: str = "") -> None:
        """All is saved at this step; or the next step that could be, or why none can."""
        ...

    def goes_on(self, step: int) -> None:
        """This worker does not stand at the step any more, though nobody has let it go."""
        ...

    def alive(self) -> None: ...


class CanNotSave(Exception):
    """Nothing can be saved at this step. ``not_before``: the first at which it can; ``problem``: why it can at none."""

    def __init__(self, *, not_before: int = 0, problem: str = "") -> None:
        super().__init__(problem or f"not before step {not_before}")
        self.not_before = not_before
        self.problem = problem


class Standing:
    def __init__(
        self,
        asker: Asker,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._asker = asker
        self._now_s = now_s
        self._sleep = sleep
        self._ignored = 0

    def is_asked(self, step: int) -> bool:
        word = self._asker.pause_at()
        return word not in (0, self._ignored) and word <= max(step, NEXT)

    def stand(self, step: int, save: Callable[[], bool]) -> None:
        """Until the agent lets go. ``save`` says whether the state of this step is saved, and is asked until it is;
        it may raise CanNotSave."""
        asker, told, marked_s = self._asker, False, float("-inf")
        end_s = self._now_s() + STAND_S
        while 0 < (word := asker.pause_at()) <= step:
            now_s = self._now_s()
            if now_s >= end_s or NEXT < word < step:
                self._ignored = word
                if word < step and word != NEXT:
                    asker.paused(step, not_before=step + 1)  # it has passed the step that was meant
                elif told:
                    asker.goes_on(step)
                return
            if word == step and not told:
                told = self._save(step, save)
            if now_s - marked_s >= _MARK_S:
                marked_s = now_s
                asker.alive()
            self._sleep(_POLL_S)

    def _save(self, step: int, save: Callable[[], bool]) -> bool:
        try:
            if not save():
                return False
        except CanNotSave as why:
            self._asker.paused(step, not_before=why.not_before, problem=why.problem)
        else:
            self._asker.paused(step)
        return True
