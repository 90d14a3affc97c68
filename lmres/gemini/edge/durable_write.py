"""Writes images to files, so that each is there whole or not at all, whatever ends the writer.

Rules:

1. Bytes go into a temporary file beside their place; it is synchronised, then renamed, then the folder is
   synchronised. The manifest comes last.
2. What is written is hashed on its way and must be what the manifest says: memory that changed meanwhile is noticed.
3. A writer holds a lock on its temporary files, and for a moment on the folder while it puts them in place: so two
   writers of one rank do not mix, and what a dead writer left is told from what a live one needs.
4. Every failure leaves the older files as they were, removes the temporary ones and tells the numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import xxhash

from lmres.errors import DurableError, RecordError
from lmres.gemini.edge import durable_manifest as names
from lmres.gemini.inventory import Copy, Part

Span: TypeAlias = "tuple[int, int, int] | memoryview"
"""Bytes of a part: (file descriptor, offset, length), or memory. Must not change until the write has returned."""

CHUNK_BYTES = 4 << 20
_SYNC_BYTES = 64 << 20  # bounds what waits for a slow disk, which would slow other writers of this host
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    folder: Path
    bytes: int
    duration_s: float


def write_image(
    directory: str | Path,
    *,
    run_id: str,
    image: Copy,
    shared: Span,
    own: Span,
    log: Span,
    cancel: threading.Event | None = None,
) -> Written | None:
    """Writes the image and its manifest. None: cancelled (looked at between chunks), and nothing is left of it.

    The shared and own parts become one ``.safetensors`` file. Raises ``DurableError``: then this image is not there
    (or is as it was before), and all others are untouched.
    """
    began_s = time.monotonic()
    spans = {"shared": shared, "own": own, "log": log}
    _check_lengths(image, spans)
    folder = names.run_folder(directory, run_id) / names.step_folder_name(image.key)
    writer = _Writer(folder, image, cancel or threading.Event())
    try:
        return writer.write(run_id, spans, began_s)
    except OSError as error:
        raise DurableError(
            f"{image.key}, rank {image.rank} could not be written to {folder}: {error.strerror or error}, after "
            f"{writer.done} of {writer.total} bytes, {_free_text(folder)}"
        ) from error
    finally:
        writer.remove_temporary()


class _Cancelled(Exception):
    pass


class _Writer:
    """One image on its way to disk."""

    def __init__(self, folder: Path, image: Copy, cancel: threading.Event) -> None:
        self.done = 0
        self.total = sum(part.length for _, part in image.parts())
        self._folder = folder
        self._image = image
        self._cancel = cancel
        self._temporary: dict[names.Kind, Path] = {}
        self._open: list[int] = []

    def write(self, run_id: str, spans: dict[str, Span], began_s: float) -> Written | None:
        make_folder(self._folder)
        free = _free_bytes(self._folder)
        if free is not None and free < self.total:
            raise DurableError(
                f"{self._image.key}, rank {self._image.rank} needs {self.total} bytes in {self._folder}, "
                f"{free} are free: remove files or give another directory"
            )
        image = self._image
        try:
            self._stream(names.DATA, ((image.own, spans["own"]), (image.shared, spans["shared"])))
            self._stream(names.LOG, ((image.log, spans["log"]),))
        except _Cancelled:
            return None
        manifest = names.encode_manifest(run_id, image)
        fd = self._create(names.MANIFEST)
        _write_all(fd, memoryview(manifest))
        os.fsync(fd)
        self._put_in_place(run_id)
        return Written(folder=self._folder, bytes=self.total, duration_s=time.monotonic() - began_s)

    def remove_temporary(self) -> None:
        for path in self._temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()
        for fd in self._open:
            os.close(fd)
        with contextlib.suppress(OSError):  # a folder that holds anything stays
            self._folder.rmdir()

    def _create(self, kind: names.Kind) -> int:
        path = self._folder / f"{names.TEMPORARY}{names.file_name(self._image.rank, kind)}.{secrets.token_hex(8)}"
        while True:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._temporary[kind] = path
            self._open.append(fd)
            lock(fd)
            if os.fstat(fd).st_nlink:  # else it was taken for a dead writer's before it was locked
                return fd

    def _stream(self, kind: names.Kind, pieces: Sequence[tuple[Part, Span]]) -> None:
        fd = self._create(kind)
        unsynced = 0
        for part, span in pieces:
            state = xxhash.xxh3_128()
            for chunk in _chunks(span):
                if self._cancel.is_set():
                    raise _Cancelled
                state.update(chunk)
                _write_all(fd, chunk)
                self.done += len(chunk)
                unsynced += len(chunk)
                if unsynced >= _SYNC_BYTES:
                    os.fdatasync(fd)
                    unsynced = 0
            if state.hexdigest() != part.digest:
                raise DurableError(
                    f"{self._image.key}, rank {self._image.rank} is not written: {part.length} bytes in memory should "
                    f"have the digest {part.digest} and have {state.hexdigest()}"
                )
        os.fsync(fd)
        with contextlib.suppress(OSError):  # the host's memory is for training
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _put_in_place(self, run_id: str) -> None:
        rank = self._image.rank
        with locked_folder(self._folder):
            manifest = self._folder / names.file_name(rank, names.MANIFEST)
            if not self._same_parts(manifest, run_id):
                # The old one must not stand beside the new files, not even for a moment.
                manifest.unlink(missing_ok=True)
                sync_folder(self._folder)
            for kind in (names.DATA, names.LOG):
                self._rename(kind)
            sync_folder(self._folder)
            self._rename(names.MANIFEST)
            sync_folder(self._folder)

    def _rename(self, kind: names.Kind) -> None:
        self._temporary[kind].rename(self._folder / names.file_name(self._image.rank, kind))
        del self._temporary[kind]

    def _same_parts(self, manifest: Path, run_id: str) -> bool:
        try:
            data = manifest.read_bytes()
            there = names.decode_manifest(data, run_id=run_id, key=self._image.key, rank=self._image.rank)
        except (OSError, RecordError):
            return False
        return tuple(there.parts()) == tuple(self._image.parts())


# -- folders and locks


def make_folder(folder: Path) -> None:
    """Makes the folder and those above it, each lastingly."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF}:  # file systems that synchronise folders by themselves
            raise
    finally:
        os.close(fd)


def lock(fd: int, *, wait: bool = True) -> bool:
    """Takes the lock of an open file; false if somebody has it. Where locks are not supported nobody has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return wait
    return True


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(fd)
        yield
    finally:
        os.close(fd)


# -- bytes


def _check_lengths(image: Copy, spans: dict[str, Span]) -> None:
    for name, part in image.parts():
        span = spans[name]
        found = span.nbytes if isinstance(span, memoryview) else span[2]
        if found != part.length:
            raise DurableError(
                f"{image.key}, rank {image.rank}: the {name} part should have {part.length} bytes and has {found}"
            )


def _chunks(span: Span) -> Iterator[memoryview]:
    if isinstance(span, memoryview):
        flat = span.cast("B") if span.nbytes else span
        for start in range(0, span.nbytes, CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]
        return
    fd, offset, length = span
    buffer = memoryview(bytearray(min(CHUNK_BYTES, length)))
    end = offset + length
    while offset < end:
        got = os.preadv(fd, [buffer[: min(len(buffer), end - offset)]], offset)
        if not got:
            raise DurableError(f"memory to write ends {end - offset} bytes early")
        yield buffer[:got]
        offset += got


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # some file systems do not tell


def _free_text(folder: Path) -> str:
    free = _free_bytes(folder)
    return "free space unknown" if free is None else f"{free} bytes free"
