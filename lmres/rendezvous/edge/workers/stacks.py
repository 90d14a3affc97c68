"""Where a worker's main thread is, without the worker's help.

A worker that is watched has a handler for one signal, in C (``faulthandler``): it writes the stacks of all threads
into a file in memory and takes no lock, so it answers also where the interpreter's lock is held. The worker told
signal and descriptor. Before each signal it is made sure that the handler and that file are still there: to a process
without the handler the signal would be the end, and a descriptor may be another file by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time

from lmres.scout.sighting import MAX_STACK_LINES

FILE = "/memfd:lmres-stacks"
MAX_WAIT_S = 0.5
MAX_BYTES = 1 << 20

_POLL_S = 0.005
_QUIET_POLLS = 4
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def read_stacks(pid: int, signal: int, fd: int, timeout_s: float = MAX_WAIT_S) -> tuple[str, ...]:
    """The main thread's frames, outermost first, as ``FILE:LINE FUNCTION``; at most 40, the innermost ones.

    Nothing where they can not be had: no handler, the descriptor is another file, the process is stopped, gone or does
    not answer in time. ``pid`` must be known to be the worker still (its parent, which has not reaped it, knows).
    Blocks for ``timeout_s``, at most half a second.
    """
    try:
        return _read(pid, signal, fd, min(timeout_s, MAX_WAIT_S))
    except (OSError, ValueError):
        return ()


def _read(pid: int, signal: int, fd: int, timeout_s: float) -> tuple[str, ...]:
    if signal <= 0 or not _answers(pid, signal):
        return ()
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(FILE):  # noqa: PTH115
        return ()
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _is_ours(file):
            return ()
        if os.fstat(file).st_size > MAX_BYTES:
            os.ftruncate(file, 0)  # it is appended to
        start = os.fstat(file).st_size
        _signal_main_thread(pid, signal)
        end = _settled(file, start, time.monotonic() + timeout_s)
        return parse(os.pread(file, min(end - start, MAX_BYTES), start).decode("utf-8", "replace"))
    finally:
        os.close(file)


def _answers(pid: int, signal: int) -> bool:
    """Whether the process catches ``signal``, and its main thread can run."""
    with open(f"/proc/{pid}/status", "rb") as file:
        fields = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    caught = int(fields[b"SigCgt"], 16) >> (signal - 1) & 1
    blocked = int(fields[b"SigBlk"], 16) >> (signal - 1) & 1
    return bool(caught) and not blocked and fields[b"State"].split()[0] in (b"R", b"S", b"D")


def _is_ours(file: int) -> bool:
    return os.readlink(f"/proc/self/fd/{file}").startswith(FILE)  # noqa: PTH115


def _signal_main_thread(pid: int, signal: int) -> None:
    """To the thread itself where the C library can: then it is the "current" one of the answer."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None:
        os.kill(pid, signal)
    elif tgkill(pid, pid, signal) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def _settled(file: int, start: int, deadline_s: float) -> int:
    """The size when it no longer grows; ``start`` if nothing comes."""
    size, quiet = start, 0
    while time.monotonic() < deadline_s and quiet < _QUIET_POLLS:
        time.sleep(_POLL_S)
        now = os.fstat(file).st_size
        quiet = quiet + 1 if now == size and now > start else 0
        size = now
    return size


def parse(text: str) -> tuple[str, ...]:
    """The main thread's frames of what ``faulthandler`` wrote: of its last "current" thread."""
    frames: list[str] = []
    current = False
    for line in text.splitlines():
        if line.startswith("Current thread "):
            current, frames = True, []
        elif not line.startswith("  "):
            current = False
        elif current and len(frames) < MAX_STACK_LINES and (found := _FRAME.match(line)) is not None:
            with contextlib.suppress(ValueError):
                frames.append(f"{found[1]}:{found[2]} {found[3]}")
    return tuple(reversed(frames))
