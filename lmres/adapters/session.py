"""What a program may ask of the protection around it, and tell it. No program needs to.

``lmres.session()`` gives it in an attached worker, and None anywhere else: also in a loader's worker, and in a program
that was started without this backend.
"""

from __future__ import annotations

import os
from typing import Any

from lmres.adapters.bootstrap import session as attached


class Session:
    """The running session of this worker."""

    def __init__(self, inner: attached.Session) -> None:
        self._inner = inner

    @property
    def step(self) -> int:
        """Optimizer steps done since the beginning of the run."""
        return self._inner.step

    @property
    def resume_step(self) -> int:
        """The step that this generation goes on from; 0 at first."""
        return int(os.environ.get("LMRES_RESUME_STEP", "0"))

    @property
    def generation(self) -> int:
        return int(os.environ.get("LMRES_GENERATION", "0"))

    @property
    def protected(self) -> bool:
        """Whether the training state is being captured."""
        attachment = self._inner.attachment
        return attachment is not None and attachment.engine.keeper is not None

    def mark_progress(self) -> None:
        """For long work without optimizer steps: it goes on."""
        self._inner.mark_progress()

    def add_state(self, name: str, obj: Any) -> None:
        """Capture and restore ``obj`` with everything else: a tensor, or an object with ``state_dict`` and
        ``load_state_dict``. Say it before the first training forward, under the same name in every life. Raises
        ValueError for another kind of object, or a name that stands for another one. Without protection it does
        nothing."""
        is_tensor = hasattr(obj, "data_ptr")
        if not is_tensor and not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise ValueError(
                f"add_state({name!r}): expected a tensor, or an object with state_dict and load_state_dict, found a"
                f" {type(obj).__name__}"
            )
        attachment = self._inner.attachment
        if attachment is None:
            return
        known = attachment.keeper.states.setdefault(name, obj)
        if known is not obj:
            raise ValueError(f"add_state({name!r}): this name stands for another object already")

    def checkpoint(self) -> None:
        """Capture at the next training forward, whatever the interval. Call it in the same step on all ranks."""
        attachment = self._inner.attachment
        if attachment is not None:
            attachment.keeper.capture_next = True


def session() -> Session | None:
    """The running session, or None where there is none."""
    inner = attached.current()
    return Session(inner) if inner is not None else None
