"""Counts completed optimizer steps, without importing torch and without a change to the program.

When ``torch.optim.optimizer`` is imported, a global post-step hook is registered in it. A program may have several
optimizers (GANs, one for each parameter): **the step is the count of the optimizer that has stepped most**, and the
time of the last step is that of any of them, so that a second phase with a new optimizer still shows progress. A step
that a gradient scaler skips is not one. A compiled ``step`` counts too: the hook runs outside of the graph.

To see the import, a finder stands first in ``sys.meta_path``. It lets the others find the module and only changes the
class of that one loader to a subclass of its own class: it stays what it was for everyone who looks (``find_spec``,
``inspect``, ``pickle``), and is itself again as soon as the module has run. ``importlib.reload`` passes here again and
registers again, since the reloaded module starts with no hooks.
"""

from __future__ import annotations

import sys
import time

from lmres.adapters.bootstrap.page import COUNTERS, COUNTERS_AT, FIRST, FIRST_AT
from lmres.adapters.bootstrap.session import Session

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODULE = "torch.optim.optimizer"


def install(session: Session, each_step: Callable[[], None]) -> StepCounter:
    """Count from now on. ``each_step`` is called whenever the step has risen; it must be cheap and must not raise."""
    counter = StepCounter(session, each_step)
    hook = counter.hook()

    def register(module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(hook)

    if MODULE in sys.modules:  # the user's sitecustomize imported it
        register(sys.modules[MODULE])
    sys.meta_path.insert(0, ImportWatch(MODULE, register, "optimizer steps are not counted"))
    return counter


class StepCounter:
    """Writes the progress page, and tells the agent of the first step made in this process.

    By itself it counts the steps that optimizers complete. Whoever knows better (the way back to a step does) takes
    over with ``follow`` and says ``reached``.
    """

    def __init__(self, session: Session, each_step: Callable[[], None]) -> None:
        self._session = session
        self._each_step = each_step
        self._step = 0
        self._made = 0
        self._led = False

    def follow(self, step: int) -> None:
        """From now on only ``reached`` counts; ``step`` are done already."""
        self._led = True
        self._step = step
        COUNTERS.pack_into(self._session.page, COUNTERS_AT, step, 0)

    def reached(self, step: int) -> None:
        """``step`` steps are done, one more than before."""
        moment = time.monotonic_ns()
        self._rise(step, moment)
        COUNTERS.pack_into(self._session.page, COUNTERS_AT, step, moment)

    def hook(self) -> Callable[[Any, Any, Any], None]:
        counts: dict[int, int] = {}
        pack, at, now_ns = COUNTERS.pack_into, COUNTERS_AT, time.monotonic_ns
        session = self._session

        def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._led:
                return
            key = id(optimizer)
            counts[key] = done = counts.get(key, 0) + 1
            moment = now_ns()
            if done > self._step:
                self._rise(done, moment)
            pack(session.page, at, self._step, moment)

        # What ``torch.compiler.disable`` sets, without its import: a compiled step must not trace into this.
        count_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return count_step

    def _rise(self, step: int, moment: int) -> None:
        self._step = step
        self._made += 1
        self._each_step()
        session = self._session
        if self._made == 1 and session.attached:
            FIRST.pack_into(session.page, FIRST_AT, moment)
            session.send(b'{"kind": "first_step", "step": %d, "monotonic_ms": %d}' % (step, moment // 1_000_000))
        if self._made == 2 and session.attached:
            # The first step has pulled in the lazy modules: now is the time to say what the program needs.
            from lmres.adapters.bootstrap import modules

            modules.report(session)


class ImportWatch:
    """A finder that finds nothing of its own, and calls ``then(module)`` after each execution of one module."""

    def __init__(self, name: str, then: Callable[[ModuleType], None], otherwise: str) -> None:
        """``otherwise``: what follows when it fails, for the person who reads it."""
        self._name = name
        self._then = then
        self._otherwise = otherwise

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        finders = list(sys.meta_path)
        here = next((i for i, finder in enumerate(finders) if finder is self), -1)
        for finder in finders[here + 1 :]:  # those before have been asked, and may be the one that asks
            find = getattr(finder, "find_spec", None)
            if find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                self._observe(spec.loader)
                return spec
        return None

    def _observe(self, loader: Any) -> None:
        plain = type(loader)
        then, otherwise = self._then, self._otherwise

        class Observed(plain):  # type: ignore[misc, valid-type]
            def exec_module(self, module: ModuleType) -> None:
                self.__class__ = plain
                self.exec_module(module)
                try:
                    then(module)
                except Exception as error:
                    sys.stderr.write(f"lmres: {otherwise}: {error!r}\n")

            def __reduce_ex__(self, protocol: Any) -> Any:
                import copyreg

                return copyreg._reconstructor, (plain, object, None), dict(self.__dict__)  # type: ignore[attr-defined]

        Observed.__name__, Observed.__qualname__ = plain.__name__, plain.__qualname__
        Observed.__module__ = plain.__module__
        try:
            loader.__class__ = Observed
        except TypeError:
            sys.stderr.write(f"lmres: {otherwise}: {self._name} comes from {plain!r}\n")
