"""Where an unchanged program stands, and how it is brought back to its step.

The program's own loop is the only thing that knows its position, so after a failure the loop is run again, quickly:
forwards, backwards, optimizer steps, collectives and fetches are passed over, reads of scalars are answered from the
first life's log, and nothing is written. At the entry of the first training forward after the step that is wanted, the
state is put in place, what the program holds is compared with the first life (the certificate), and it goes on.

Phases of one process:

======== ========================================================= ============================================
phase    until                                                     reads of scalars
======== ========================================================= ============================================
setup    the first training forward                                real
real     one or two whole steps                                    answered from the log
skip     the forward after the wanted step                         answered from the log
live     the end                                                   real, and written to the log
======== ========================================================= ============================================

A life that starts at step 0 goes from setup to live. Steps are attempts: a step that a gradient scaler leaves out for
an infinity is one too, since the program counts it. With several optimizers the step is the count of the one that has
stepped most. Source of what has to be intercepted: a study of sixteen programs; the rules are in the README here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from lmres.adapters.resume.certificate import WAYS_OUT
from lmres.adapters.resume.journal import Desync, Journal, JournalError, Mark, Replay, Unread
from lmres.errors import ResumeError

BLIND_STEPS = 3
MAX_REAL_STEPS = 16

Phase = Literal["setup", "real", "skip", "live"]


class Keeper(Protocol):
    """What the engine needs of the state: taking it and putting it back."""

    def at_boundary(self, step: int, arguments: tuple[Any, Any]) -> None:
        """A training forward begins after ``step`` in a live program: capture if it is time."""
        ...

    def before_step(self) -> None:
        """The parameters are about to change."""
        ...

    def arrive(self, step: int, arguments: tuple[Any, Any], mark: Mark | None) -> None:
        """Puts the state of ``step`` in place and checks the program against it. Raises ResumeError."""
        ...

    def begun(self, mark: Mark | None) -> None:
        """The program's loop has begun, at this mark of the first life's log if one was found."""
        ...

    def fingerprint(self) -> int:
        """Of the parameters."""
        ...

    def step_of_optimizers(self) -> int | None:
        """The step that the optimizers' own state tells, if it does."""
        ...

    def go_on(self, step: int) -> None:
        """The captured state is not used: the program is at a later step of its own."""
        ...


class Ours:
    """While it is entered, what runs is not the program's own code: it is passed through, and its reads are real."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.inside += 1

    def __exit__(self, *error: object) -> None:
        self._engine.inside -= 1


class Engine:
    """Shared by all patches; they read ``inside`` and ``skipping`` on every call."""

    def __init__(self, *, resume_step: int, on_step: Callable[[int], None], on_problem: Callable[[str], None]) -> None:
        self.inside = 0
        self.ours = Ours(self)
        self.skipping = False
        self.logging = False
        self.phase: Phase = "setup"
        self.steps = 0
        self.resume_step = resume_step
        self.jump = False
        self.has_loaded = False
        self.iterators = 0
        self.roots: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.keeper: Keeper | None = None
        self.journal: Journal | None = None
        self.replay: Replay | None = None
        self.started_at: int | None = None
        self.on_arrival: list[Callable[[], None]] = []
        self.on_return: list[Callable[[], None]] = []
        self._returning = False
        self.on_skipped: Callable[[int], None] | None = None
        self.on_failure: Callable[[ResumeError], None] | None = None
        self._main = threading.get_ident()
        self._on_step = on_step
        self._on_problem = on_problem
        self._attempts: dict[int, int] = {}
        self._marked = -1
        self._real_since = 0
        self._desync: str | None = None
        self._refused: str | None = None
        self._error: ResumeError | None = None

    # -- asked by the patches -----------------------------------------------------------------------------------------

    def outside(self) -> bool:
        """Whether the program's own code is running in its main thread, and not something that it called."""
        return self.inside == 0 and threading.get_ident() == self._main

    def forward(self, module: Any, arguments: tuple[Any, Any]) -> None:
        """A training forward of a root module begins. Raises ResumeError out of the program's call."""
        is_new = not any(root is module for root in self.roots)
        if is_new:
            self.roots.append(module)
        if self._error is not None:
            raise self._error
        if self.phase == "setup":
            self._begin(arguments)
        elif self.steps != self._marked:
            self._boundary(arguments)
        if is_new and self.skipping and _is_unordered(module):
            self.phase = "real"
            self.skipping = False
            self._real_since = self.steps

    def attempted(self, optimizer: Any) -> None:
        """An outermost optimizer step is over, whether or not it changed anything."""
        key = id(optimizer)
        self._attempts[key] = count = self._attempts.get(key, 0) + 1
        if self.phase == "setup" and self.keeper is not None and count >= BLIND_STEPS:
            self.give_up(
                f"{count} optimizer steps without a training forward of a module: the forward is in a function that is"
                " compiled, or in none. Let the program start at LMRES_RESUME_STEP, or compile the module instead"
            )
        if count + (self.started_at or 0) > self.steps:
            self.steps = count + (self.started_at or 0)
            if self.phase in ("live", "setup"):
                self._on_step(self.steps)
            elif self.on_skipped is not None and self.skipping:
                self.on_skipped(self.steps)

    def before_step(self) -> None:
        if self.keeper is not None:
            self.keeper.before_step()

    def read(self, original: Callable[..., Any], arguments: tuple[Any, ...], site: int) -> Any:
        """One value that the program reads from a tensor."""
        if self.replay is not None and self.phase != "live":
            try:
                return self.replay.scalar(site)
            except Unread:
                pass
            except Desync as difference:
                if self._desync is None:
                    self._desync = f"after step {self.steps}: {difference}"
        value = self._inside(original, arguments)
        if self.journal is not None and self.phase == "live":
            try:
                self.journal.scalar(value, site)
            except JournalError as error:
                self.give_up(str(error))
        return value

    def noted_generators(self) -> bytes | None:
        """On the way back: the generators' states that were noted at this point in the first life."""
        return self.replay.generators() if self.replay is not None and self.phase in ("real", "skip") else None

    def note_generators(self, packed: bytes) -> None:
        if self.journal is not None and self.phase == "live" and self.keeper is not None:
            try:
                self.journal.generators(packed)
            except JournalError as error:
                self.give_up(str(error))

    def _inside(self, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self.ours:
            return original(*arguments)

    # -- phases -------------------------------------------------------------------------------------------------------

    def _begin(self, arguments: tuple[Any, Any]) -> None:
        """The first training forward: the program's set-up is over."""
        keeper = self.keeper
        if keeper is None:
            self.phase = "live"
            self._marked = self.steps
            return
        if self._refused is not None:
            if self.resume_step:
                raise self._fail(f"{self._refused}. {WAYS_OUT}")
            self.give_up(self._refused)
            self.phase = "live"
            return
        self.logging = True
        if self.resume_step == 0:
            self.started_at = 0
            self.phase = "live"
            try:
                self._inside(keeper.begun, (None,))
            except Exception as error:
                self.give_up(f"what the program holds can not be looked at: {error!r}")
            self._mark()
            return
        if self.jump:
            self.started_at = self.steps = self.resume_step
            self._inside(keeper.begun, (None,))
            self._arrive(arguments, None)
            return
        mark = self._first_mark()
        if mark is None:
            self._go_on_elsewhere()
            return
        self.started_at = self.steps = mark.step
        self.iterators = mark.iterators
        self._marked = mark.step
        if self.replay is not None:
            self.replay.go_to(mark)
        self._inside(keeper.begun, (mark,))
        if mark.step == self.resume_step:
            self._arrive(arguments, mark)
        elif mark.step > self.resume_step:
            raise self._fail(
                f"the program starts from step {mark.step} of its own checkpoint, but the newest state that all ranks"
                f" have is that of step {self.resume_step}"
            )
        else:
            self.phase = "real"
            self._real_since = self.steps
            self._returning = True
            for call in self.on_return:
                call()
            self._skip_if_due()

    def _first_mark(self) -> Mark | None:
        """Where the program begins: at step 0, or at the step whose parameters it has loaded itself. None: at a
        checkpoint that is newer than all that was noted."""
        replay = self.replay
        if replay is None or not replay.marks or self.keeper is None:
            return Mark(0, 0, self.iterators, 0, 0)
        here = self._inside(self.keeper.fingerprint, ())
        first = replay.marks[0]
        known = next((m for m in replay.marks if m.fingerprint == here), None)
        return known or (None if self.has_loaded else first)

    def _go_on_elsewhere(self) -> None:
        """The program has a checkpoint of its own that is newer than the captured state: it goes on from that."""
        assert self.keeper is not None
        step = self._inside(self.keeper.step_of_optimizers, ())
        self.started_at = self.steps = max(step or 0, self.resume_step + 1)
        self.phase = "live"
        self.replay = None
        self._inside(self.keeper.go_on, (self.steps,))
        self._inside(self.keeper.begun, (None,))
        self._mark()

    def _boundary(self, arguments: tuple[Any, Any]) -> None:
        keeper = self.keeper
        if keeper is None:
            self._marked = self.steps
            return
        if self.phase == "live":
            self._mark()
            keeper.at_boundary(self.steps, arguments)
            return
        self._marked = self.steps
        self._follow_marks()
        if self.steps >= self.resume_step:
            self._arrive(arguments, self._start_mark())
        else:
            self._skip_if_due()

    def _start_mark(self) -> Mark | None:
        return self.replay.find(self.started_at or 0) if self.replay is not None and self.started_at else None

    def _follow_marks(self) -> None:
        if self._desync is None and self.replay is not None:
            try:
                self.replay.pass_mark(self.steps)
            except Desync as difference:
                self._desync = f"after step {self.steps}: {difference}"
        if self._desync is not None:
            raise self._fail(f"the program goes another way than in its first life, {self._desync}. {WAYS_OUT}")

    def _skip_if_due(self) -> None:
        """The first step is made for real, since optimizers make their state then; and as many more as it takes until
        each DDP has ordered its buckets, which it does by its first backward, in the next forward."""
        real = self.steps - self._real_since
        if self.skipping or real == 0 or (real < MAX_REAL_STEPS and any(map(_is_unordered, self.roots))):
            return
        self.phase = "skip"
        self.skipping = True

    def _arrive(self, arguments: tuple[Any, Any], mark: Mark | None) -> None:
        assert self.keeper is not None
        self.end_return()
        try:
            self._inside(
                self.keeper.arrive, (self.steps, arguments, mark if mark is not None and mark.step > 0 else None)
            )
        except ResumeError as error:
            raise self._failed(error) from error.__cause__
        except Exception as error:
            raise self._fail(f"the state of step {self.steps} could not be put in place: {error!r}") from error
        self._marked = self.steps
        self.phase = "live"
        self.replay = None

    def end_return(self) -> None:
        self.skipping = False
        if self._returning:
            self._returning = False
            for call in self.on_arrival:
                call()

    def _mark(self) -> None:
        self._marked = self.steps
        if self.journal is None or self.keeper is None:
            return
        try:
            self.journal.mark(self.steps, self._inside(self.keeper.fingerprint, ()), self.iterators)
        except JournalError as error:
            self.give_up(str(error))
        except Exception as error:
            self.give_up(f"the step can not be noted: {error!r}")

    def _fail(self, message: str) -> ResumeError:
        return self._failed(ResumeError(message))

    def _failed(self, error: ResumeError) -> ResumeError:
        """``on_failure`` usually ends the process; else the program's next forwards raise, whatever it catches."""
        self.end_return()
        self._error = error
        if self.on_failure is not None:
            self.on_failure(error)
        return error

    def ended(self) -> None:
        """The program has ended by itself. If it was on its way back, what it has to show is void."""
        if self._returning:
            self._fail(
                f"the program ended after step {self.steps} of its way back, and did not come to step"
                f" {self.resume_step}: its loop is shorter now, or ends by the clock. {WAYS_OUT}"
            )

    def refuse(self, reason: str) -> None:
        """The program uses something that can not be brought back."""
        if self.phase == "setup":
            self._refused = reason
        else:
            self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Training goes on without protection. In the middle of a way back that is no choice: then it fails."""
        if self.phase in ("real", "skip"):
            self._fail(reason)
            return
        self.keeper = None
        self.journal = None
        self.logging = False
        self._on_problem(reason)


def _is_unordered(module: Any) -> bool:
    """A DDP that has yet to order its buckets. It does not where it looks for unused parameters each time."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or not isinstance(module, parallel.DistributedDataParallel):
        return False
    orders = module.static_graph or not module.find_unused_parameters
    return orders and not getattr(module, "_has_rebuilt_buckets", True)
