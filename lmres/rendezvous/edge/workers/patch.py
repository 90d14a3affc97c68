"""The one change to torch: who starts a worker.

``SubprocessHandler._popen(self, args, env)`` returns the ``Popen`` which torch then polls and kills. The replacement
asks the monitor for it. It is put in once for the whole process and then only looks up whose turn it is; without a
monitor it does what torch did.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

from lmres.errors import ConfigError
from lmres.rendezvous.edge.workers.monitor import WorkerMonitor

_EXPECTED = ("self", "args", "env")
_lock = threading.Lock()
_current: WorkerMonitor | None = None


def install(monitor: WorkerMonitor) -> None:
    """From now on torch's workers are started through ``monitor``.

    Raises ``ConfigError`` if torch starts workers in a way this package does not know, and ``RuntimeError`` if another
    monitor of this process is still installed.
    """
    global _current
    with _lock:
        if _current not in (None, monitor):
            raise RuntimeError("another agent of this process starts workers: uninstall its monitor first")
        _replace()
        _current = monitor


def uninstall(monitor: WorkerMonitor) -> None:
    """Torch's own way again, if ``monitor`` is the installed one."""
    global _current
    with _lock:
        if _current is monitor:
            _current = None


def _replace() -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler_class = getattr(subprocess_handler, "SubprocessHandler", None)
    original = getattr(handler_class, "_popen", None)
    if getattr(original, "lmres", False):
        return
    found = tuple(inspect.signature(original).parameters) if callable(original) else None
    if handler_class is None or original is None or found != _EXPECTED:
        raise ConfigError(
            f"torch {torch.__version__} starts workers in a way unknown here: SubprocessHandler._popen takes "
            f"{found}, expected {_EXPECTED}. Use a version of torch that this version of lmres supports."
        )

    def _popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        monitor = _current
        if monitor is None:
            return original(self, args, env)
        # Torch sets these before the call; an AttributeError here means that its shape has changed.
        return monitor.launch(args, env, local_rank=self.local_rank_id, stdout=self._stdout, stderr=self._stderr)

    _popen.lmres = True  # type: ignore[attr-defined]
    handler_class._popen = _popen
