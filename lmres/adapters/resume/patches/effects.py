"""What the program would write on its way back: it was written in the first life, and now the numbers would be false.

Held back while the program is on its way: what is done to files (``files``), writes to files that were opened for
appending before, ``torch.save`` and its kin, TensorBoard and Weights & Biases, the standard streams, sleeping. A file
opened with ``w`` before the loop begins is written anew from the start and so comes out whole. Not held back: network
requests, subprocesses, databases, files opened for appending before the loop through a way of their own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.patches.files import Files

_SAVES = {
    "torch": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "safetensors.numpy": ("save_file",),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "numpy": ("save", "savez", "savez_compressed", "savetxt"),
    "wandb": ("log", "save", "log_artifact"),
    "mlflow": ("log_metric", "log_metrics", "log_artifact", "log_param", "log_params"),
}
_BOARDS = [
    "add_scalar",
    "add_scalars",
    "add_histogram",
    "add_image",
    "add_images",
    "add_text",
    "add_figure",
    "add_hparams",
    "add_graph",
    "add_embedding",
    "add_pr_curve",
    "add_video",
    "add_audio",
    "add_mesh",
    "flush",
]


class Effects:
    """Patched only while the program is on its way back: a live program sees none of it."""

    def __init__(self, torch: Any, engine: Engine) -> None:
        self._torch = torch
        self._engine = engine
        self._undo: list[Callable[[], None]] = []
        self._streams: list[tuple[int, int]] = []
        self._appending: list[weakref.ref[Any]] = []
        self._files = Files()
        self._main = threading.get_ident()
        engine.on_return.append(self.hold_back)
        engine.on_arrival.append(self.let_go)

    def watch_appending(self) -> None:
        """From the beginning of a life that has to come back: remember the files opened for appending."""

        def watching(original: Any) -> Any:
            @functools.wraps(original)
            def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
                opened = original(file, mode, *args, **kwargs)
                if isinstance(mode, str) and "a" in mode:
                    with contextlib.suppress(TypeError):
                        self._appending.append(weakref.ref(opened))
                return opened

            return open_

        for owner in (builtins, io):
            self._replace(owner, "open", watching(owner.open))

    def hold_back(self) -> None:
        for module_name, names in _SAVES.items():
            module = sys.modules.get(module_name)
            for name in names if module is not None else ():
                self._replace(module, name, _nothing)
        for path in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
            module = sys.modules.get(path)
            for name in _BOARDS if module is not None else ():
                self._replace(module.SummaryWriter, name, _nothing)  # type: ignore[union-attr]
        self._replace(time, "sleep", self._sleeping(time.sleep))
        self._files.hold_back(self._replace)
        self._mute()

    def let_go(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._files.put_back()
        self._unmute()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        self._undo.append(lambda: setattr(owner, name, original))
        setattr(owner, name, value)

    def _sleeping(self, original: Any) -> Any:
        """Threads beside the program's loop still have to wait."""

        @functools.wraps(original)
        def sleep(seconds: Any) -> None:
            if threading.get_ident() != self._main:
                original(seconds)

        return sleep

    # -- streams, below everything that writes to them ----------------------------------------------------------------

    def _mute(self) -> None:
        self._flush()
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                for number in (1, 2, *self._append_descriptors()):
                    kept = os.dup(number)
                    self._streams.append((number, kept))
                    os.dup2(null, number, inheritable=number <= 2)
            finally:
                os.close(null)

    def _append_descriptors(self) -> list[int]:
        found = []
        for reference in self._appending:
            file = reference()
            if file is not None and not file.closed:
                found.append(int(file.fileno()))
        return found

    def _unmute(self) -> None:
        if not self._streams:
            return
        self._flush()
        while self._streams:
            number, kept = self._streams.pop()
            os.dup2(kept, number, inheritable=number <= 2)
            os.close(kept)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, *(reference() for reference in self._appending)):
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.flush()

    def say(self, text: str) -> None:
        """A line to the real standard error."""
        kept = next((k for number, k in self._streams if number == 2), 2)
        with contextlib.suppress(OSError):
            os.write(kept, text.encode() + b"\n")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
