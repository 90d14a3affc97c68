"""Brings the protection of the training state into the worker: when torch has been imported, before the program's code.

A worker that starts at step 0 goes on unprotected if anything of it fails. One that has to come back to a step must
not: it would begin again at step 0 and nobody would see it. It says why, and waits for the plan like a crashed one.
"""

from __future__ import annotations

import os
import sys
import time

from lmres.adapters.bootstrap import crash
from lmres.adapters.bootstrap.session import Session
from lmres.adapters.bootstrap.steps import ImportWatch, StepCounter

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

VARIABLE = "LMRES_CHECKPOINT"
CAPTURED_EVERY_S = 1.0
CAPTURED_AT_ONCE = 3
RESTORE_S = 600.0


def install(session: Session, counter: StepCounter) -> None:
    text = os.environ.pop(VARIABLE, None)  # for this process alone
    if text is None:
        return

    def attach(torch: ModuleType) -> None:
        _attach(torch, text, session, counter)

    if "torch" in sys.modules:
        attach(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, ImportWatch("torch", attach, "the training state is not protected"))


def _attach(torch: Any, text: str, session: Session, counter: StepCounter) -> None:
    from lmres.adapters.resume import settings as records

    reporter = Reporter(session)
    wanted = 0
    try:
        settings = records.decode(text)
        wanted = settings.resume_step
        _build(torch, settings, session, counter, reporter)
    except Exception as error:
        if wanted:
            give_up(session, f"lmres.errors.{_kind(error)}", str(error) or repr(error))
        reporter.off(str(error) or repr(error))


def _kind(error: BaseException) -> str:
    name = type(error).__name__
    return name if name in ("ResumeError", "StateError") else "VaultError"


def _build(torch: Any, settings: Any, session: Session, counter: StepCounter, reporter: Reporter) -> None:
    from lmres.adapters.resume.attach import build
    from lmres.errors import StateError
    from lmres.gemini.edge.client import WorkerVault

    rank = int(os.environ["RANK"])
    vault = WorkerVault.connect(settings.vault, rank=rank, generation=settings.generation, run_id=settings.run_id)
    restored = vault.await_restore(RESTORE_S) if settings.resume_step else None
    if settings.resume_step and (restored is None or restored.step != settings.resume_step):
        found = f"step {restored.step}" if restored is not None else "nothing"
        raise StateError(f"the vault has {found} for rank {rank}, the plan says step {settings.resume_step}")
    attachment = build(torch, settings, vault, restored, reporter, counter.reached, asker=reporter)
    attachment.engine.on_failure = lambda error: give_up(session, "lmres.errors.ResumeError", str(error))
    session.attachment = attachment
    counter.follow(settings.resume_step)


class Reporter:
    """Tells the agent. Captures are told at once for the first few, then about once a second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0
        self._last_s = 0.0
        self._nonfinite = False

    def captured(self, step: int, size: int, blocking_ms: float) -> None:
        self._count += 1
        now = time.monotonic()
        if self._count > CAPTURED_AT_ONCE and now - self._last_s < CAPTURED_EVERY_S:
            return
        self._last_s = now
        self._send({"kind": "captured", "step": step, "bytes": size, "blocking_ms": round(blocking_ms, 3)})

    def restored(self, step: int, source: str, size: int, duration_ms: float) -> None:
        self._send(
            {
                "kind": "restored",
                "step": step,
                "source": source,
                "bytes": size,
                "duration_ms": round(duration_ms, 3),
                "monotonic_ms": time.monotonic_ns() // 1_000_000,
            }
        )

    def elsewhere(self, step: int, captured: int) -> None:
        sys.stderr.write(
            f"lmres: the program begins at a checkpoint of its own (step {step}), newer than the state in memory"
            f" (step {captured}): it goes on from there\n"
        )

    def nonfinite(self, step: int) -> None:
        """Told once: it does not go away by itself."""
        if not self._nonfinite:
            self._nonfinite = True
            self._send({"kind": "nonfinite", "step": step})

    def off(self, reason: str) -> None:
        self._send({"kind": "protection", "armed": False, "reason": reason[:2000]})

    def armed(self, adapter: str, parts: list[str]) -> None:
        self._send({"kind": "protection", "armed": True, "adapter": adapter, "parts": parts})

    def pause_at(self) -> int:
        return self._session.pause_at

    def paused(self, step: int, *, not_before: int = 0, problem: str = "") -> None:
        self._send({"kind": "paused", "step": step, "not_before": not_before, "problem": problem})

    def goes_on(self, step: int) -> None:
        self._send({"kind": "goes_on", "step": step})

    def alive(self) -> None:
        self._session.mark_progress()

    def replays(self, covered: int, modules: int, reason: str) -> None:
        """Of how many modules equals compare what they compute, and why not of the others."""
        parts = [f"replay: {covered} of {modules} modules"] if covered else ["replay"]
        why = reason[:2000] or "all that were called"
        self._send({"kind": "protection", "armed": covered > 0, "adapter": "pytorch", "parts": parts, "reason": why})

    def _send(self, message: dict[str, Any]) -> None:
        import json

        self._session.send(json.dumps(message).encode())


def give_up(session: Session, type_name: str, message: str) -> NoReturn:
    """Ends this process as a crashed one: told, held for the plan, gone."""
    sys.stderr.write(f"lmres: {message}\n")
    sys.stderr.flush()
    session.crashing = True
    session.send(crash.report(session.step, time.monotonic_ns() // 1_000_000, type_name, message, ""))
    crash.hold(session)
    os._exit(1)
