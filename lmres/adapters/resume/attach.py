"""Puts the engine, the patches and the keeper of the state into this process, before any code of the program's runs."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from typing import Any

from lmres.adapters.resume import reads_env
from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.keeper import Report, StateKeeper
from lmres.adapters.resume.patches import collectives, compute, cycles, effects, loaders, loads, scalars
from lmres.adapters.resume.settings import Settings
from lmres.adapters.resume.standing import Asker

PROGRESS_EVERY_S = 5.0


class Attachment:
    """What was put into this process."""

    def __init__(self, engine: Engine, keeper: StateKeeper, muted: effects.Effects) -> None:
        self.engine = engine
        self.keeper = keeper
        self.effects = muted

    def settle(self) -> None:
        """The program has failed: give its streams back, and end the capture that is under way, so that a state that
        is not finite is known before the failure is."""
        if self.engine.skipping:
            self.effects.say(f"lmres: the program failed on its way back, after step {self.engine.steps}")
        self.engine.end_return()
        self.engine.before_step()


def build(
    torch: Any,
    settings: Settings,
    vault: Any,
    restored: Any,
    report: Report,
    on_step: Callable[[int], None],
    asker: Asker | None = None,
) -> Attachment:
    """``vault``: a ``WorkerVault``; ``restored``: what it gave for this generation. Raises StateError when the state
    can not be read."""
    engine = Engine(
        resume_step=settings.resume_step if restored is not None else 0, on_step=on_step, on_problem=report.off
    )
    engine.jump = settings.resume in ("env", "framework")
    if settings.resume == "auto":
        reads_env.watch(engine)
    scalars.install(torch, engine)
    compute.install(torch, engine)
    collectives.install(torch, engine)
    noted = loaders.install(torch, engine)
    cycles.install(torch, noted)
    muted = effects.Effects(torch, engine)
    if engine.resume_step:
        muted.watch_appending()
        loads.watch(engine)
    keeper = StateKeeper(torch, engine, settings, vault, restored, noted, report, asker)
    keeper.prepare()
    engine.keeper = keeper
    atexit.register(engine.ended)
    os.register_at_fork(after_in_child=lambda: _pass_through(engine))
    Narrator(engine, muted)
    return Attachment(engine, keeper, muted)


def _pass_through(engine: Engine) -> None:
    """A forked child is not the worker: nothing of it is read, skipped or captured."""
    engine.inside = 1 << 30
    engine.keeper = None
    atexit.unregister(engine.ended)


class Narrator:
    """Tells of the way back: one line when it begins, one now and then, one at its end."""

    def __init__(self, engine: Engine, muted: effects.Effects) -> None:
        self._engine = engine
        self._muted = muted
        self._began = self._told = 0.0
        self._first = 0
        engine.on_return.append(self._begin)
        engine.on_arrival.append(self._end)
        engine.on_skipped = self._skipped

    def _begin(self) -> None:
        self._began = self._told = time.monotonic()
        self._first = self._engine.steps
        self._muted.say(
            f"lmres: going back to step {self._engine.resume_step}: the program's loop runs without computing from step"
            f" {self._first} on; its output is held back until then"
        )

    def _skipped(self, step: int) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_EVERY_S:
            self._told = now
            self._muted.say(f"lmres: going back to step {self._engine.resume_step}: at step {step}")

    def _end(self) -> None:
        steps = self._engine.steps - self._first
        self._muted.say(f"lmres: {steps} steps passed over in {time.monotonic() - self._began:.2f} s")
