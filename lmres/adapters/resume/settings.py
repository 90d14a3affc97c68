"""What the agent tells a worker about its state, in one environment variable that only this process sees."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lmres.adapters.bootstrap import protect

VARIABLE = protect.VARIABLE

Resume = Literal["auto", "framework", "env", "fast_forward", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``resume_step`` 0: from the beginning. ``interval_steps`` 0: measured, within ``overhead_budget``.

    ``topology`` is compared with the one of a state before it is used. ``replay_every``: steps between two replays of a
    part of the model, 0 for none.
    """

    vault: str
    run_id: str
    generation: int
    resume: Resume
    resume_step: int
    interval_steps: int
    overhead_budget: float
    topology: str
    replay_every: int = 0

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> Settings:
    """Raises ValueError when the text is not what ``encode`` writes."""
    try:
        body: dict[str, Any] = json.loads(text)
        return Settings(**body)
    except TypeError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
