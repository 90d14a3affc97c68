"""Files on the way back: what was written in the first life stays as it is, and the program does not notice.

=============================== ==================================================================================
opened on the way back          what happens
=============================== ==================================================================================
``w``, ``x``                    written in memory; if it is still open when the program is back, it takes the
                                place of the file, since all of it has come out true
``a``                           written nowhere; if still open at the end, it goes on at the end of the file
``r+``                          a copy in memory; if still open, it goes on in the file
folders, renaming, removing     nothing happens
what ``tempfile`` makes         really made and used, by names that are this life's own; a temporary file that is
                                moved to its place is removed instead
=============================== ==================================================================================

Files that were opened for appending before the loop began lead nowhere in the meantime (``effects``).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from lmres.adapters.resume.frames import is_program

Replace = Callable[[Any, str, Any], None]

_GONE = ("remove", "unlink", "rmdir", "removedirs")
_MOVED = ("replace", "rename", "renames")
_NEW = ("symlink", "link", "truncate", "mkdir")
_COPIES = ("copy", "copy2", "copyfile", "copytree")


class Files:
    """``hold_back`` when the way back begins, ``put_back`` at its end (when ``os`` is itself again)."""

    def __init__(self) -> None:
        self._opened: list[tuple[weakref.ref[Any], str, str]] = []
        self._scratch: list[str] = []
        self._through = False

    def hold_back(self, replace: Replace) -> None:
        for name in (*_GONE, *_NEW):
            replace(os, name, self._only_scratch(getattr(os, name), 0))
        for name in _MOVED:
            replace(os, name, self._moving(getattr(os, name)))
        replace(shutil, "rmtree", self._only_scratch(shutil.rmtree, 0))
        for name in _COPIES:
            replace(shutil, name, self._only_scratch(getattr(shutil, name), 1))
        replace(shutil, "move", self._moving(shutil.move))
        for owner in (builtins, io):
            replace(owner, "open", self._opening(owner.open))
        self._watch_temporary(replace)

    def put_back(self) -> None:
        for reference, path, mode in self._opened:
            file = reference()
            if file is not None and not file.closed:
                with contextlib.suppress(OSError, ValueError):
                    _go_on(file, path, mode)
        self._opened.clear()
        self._scratch.clear()

    # -- opening ------------------------------------------------------------------------------------------------------

    def _opening(self, original: Any) -> Any:
        @functools.wraps(original)
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
            if not writes or isinstance(file, int) or self._is_scratch(file) or _in_tempfile() or not _from_program():
                return original(file, mode, *args, **kwargs)
            path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100
            kwargs = {k: v for k, v in kwargs.items() if k != "opener"}
            opener = _copied if "r" in mode else _in_memory
            opened = original(file, mode, *args[:5], **kwargs, opener=opener)
            with contextlib.suppress(TypeError):
                self._opened.append((weakref.ref(opened), path, mode))
            return opened

        return open_

    # -- what is done to files ----------------------------------------------------------------------------------------

    def _only_scratch(self, original: Any, place: int) -> Any:
        """``place``: of the argument that is changed or made. What is returned is that argument, as copying does."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            target = args[place] if len(args) > place else None
            if self._through:
                return original(*args, **kwargs)
            if target is not None and (self._is_scratch(target, kwargs.get("dir_fd")) or _in_tempfile()):
                return self._pass(original, args, kwargs)
            return target if place else None

        return call

    def _moving(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            source, target = (*args, None, None)[:2]
            if self._through or (self._is_scratch(source) and self._is_scratch(target)):
                return original(*args, **kwargs)
            if self._is_scratch(source):
                with contextlib.suppress(OSError):
                    self._pass(os.unlink, (source,), {})
            return target if original.__name__ == "move" else None

        return call

    def _pass(self, original: Any, args: Any, kwargs: Any) -> Any:
        """What it does inside, relative to a folder's descriptor, is for scratch too."""
        self._through = True
        try:
            return original(*args, **kwargs)
        finally:
            self._through = False

    # -- what the program makes for a moment --------------------------------------------------------------------------

    def _is_scratch(self, path: Any, folder: int | None = None) -> bool:
        """``folder``: the descriptor that a relative path starts from, as when a tree is removed."""
        if not self._scratch or not isinstance(path, (str, bytes, os.PathLike)):
            return False
        whole = os.fsdecode(path)
        if folder is not None:
            try:
                whole = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), whole)  # noqa: PTH115, PTH118
            except OSError:
                return False
        whole = os.path.abspath(whole)  # noqa: PTH100
        return any(whole == made or whole.startswith(made + os.sep) for made in self._scratch)

    def _watch_temporary(self, replace: Replace) -> None:
        def noting(original: Any, of: Callable[[Any], Any]) -> Any:
            @functools.wraps(original)
            def make(*args: Any, **kwargs: Any) -> Any:
                made = original(*args, **kwargs)
                self._scratch.append(os.path.abspath(os.fsdecode(of(made))))  # noqa: PTH100
                return made

            return make

        replace(tempfile, "mkdtemp", noting(tempfile.mkdtemp, lambda made: made))
        inner = getattr(tempfile, "_mkstemp_inner", None)
        if inner is not None:
            replace(tempfile, "_mkstemp_inner", noting(inner, lambda made: made[1]))


def _go_on(file: Any, path: str, mode: str) -> None:
    """From now on the open file is the real one."""
    file.flush()
    number = file.fileno()
    at = os.lseek(number, 0, os.SEEK_CUR)
    flags = os.O_RDWR if "+" in mode else os.O_WRONLY
    kind = {"a": os.O_CREAT | os.O_APPEND, "r": 0}.get(next(c for c in mode if c in "wxar"), os.O_CREAT | os.O_TRUNC)
    real = os.open(path, flags | kind | os.O_CLOEXEC, 0o666)
    try:
        if kind & os.O_TRUNC:
            _copy(number, real)
        if not kind & os.O_APPEND:
            os.lseek(real, at, os.SEEK_SET)
        os.dup2(real, number, inheritable=False)
    finally:
        os.close(real)


def _copy(source: int, target: int) -> None:
    at = 0
    while piece := os.pread(source, 1 << 20, at):
        at += len(piece)
        while piece:
            piece = piece[os.write(target, piece) :]


def _in_memory(path: Any, flags: int) -> int:
    return os.memfd_create("held-back", os.MFD_CLOEXEC)


def _copied(path: Any, flags: int) -> int:
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # as the real one: an error if there is none
    try:
        target = os.memfd_create("held-back", os.MFD_CLOEXEC)
        _copy(source, target)
        os.lseek(target, 0, os.SEEK_SET)
        return target
    finally:
        os.close(source)


def _from_program() -> bool:
    """Whether the program, or a library that it called, opens the file; not the interpreter's import or a thread."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if is_program(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _in_tempfile() -> bool:
    return sys._getframe(2).f_code.co_filename == tempfile.__file__
