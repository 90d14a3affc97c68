"""What the agent tells a worker about being watched, in one environment variable that only this process sees."""

from __future__ import annotations

import json
import signal

from lmres.adapters.bootstrap import watching

VARIABLE = watching.VARIABLE
STACKS_SIGNAL = int(signal.SIGRTMAX) - 3


def variable_text(*, stacks_signal: int = STACKS_SIGNAL) -> str:
    """``stacks_signal``: the worker answers it with the stacks of its threads; 0: none. One that has a handler
    already is not taken."""
    return json.dumps({"stacks_signal": stacks_signal})


def decode(text: str) -> int:
    """The ``stacks_signal``. Raises ValueError when the text is not what ``variable_text`` writes."""
    body = json.loads(text)
    number = body.get("stacks_signal") if isinstance(body, dict) else None
    if type(number) is not int or not 0 <= number <= int(signal.SIGRTMAX):
        raise ValueError(f"{VARIABLE}: {text[:200]!r} has no stacks_signal from 0 to {int(signal.SIGRTMAX)}")
    return number
