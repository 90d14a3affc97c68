"""Finds images in files, opens their parts, and removes those that are not needed any more.

Rules:

1. A folder that anybody can write to is read with care: what is not understood is skipped, and told once per scan.
2. Sizes are checked when an image is found and again when a part is opened; bytes are checked by whoever reads them
   (``read_part`` does).
3. A step is removed whole: renamed out of sight first, so that no scan sees a part of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lmres.errors import DurableError, RecordError
from lmres.gemini.edge import durable_manifest as names
from lmres.gemini.edge.durable_write import lock as take_lock
from lmres.gemini.edge.durable_write import locked_folder, sync_folder
from lmres.gemini.edge.transfer_server import PartSource
from lmres.gemini.inventory import Copy, Key

MAX_ENTRIES = 100_000
MAX_PROBLEMS = 50
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableImage:
    """An image in files. ``image.place`` is "durable"."""

    image: Copy
    folder: Path

    @property
    def key(self) -> Key:
        return self.image.key

    @property
    def rank(self) -> int:
        return self.image.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """``images``: newest key first, then by rank. ``problems``: what was skipped and why, one line each."""

    images: tuple[DurableImage, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    removed: tuple[Key, ...]
    problems: tuple[str, ...]


class _Problems(list[str]):
    def add(self, text: str) -> None:
        if len(self) < MAX_PROBLEMS:
            self.append(text)
        elif len(self) == MAX_PROBLEMS:
            self.append("and more")


def scan(directory: str | Path, run_id: str) -> Scanned:
    """All whole images of the run. Never raises for what lies there; a folder that can not be read is a problem."""
    problems = _Problems()
    images: list[DurableImage] = []
    run = names.run_folder(directory, run_id)
    for name in _entries(run, problems):
        if name.startswith("."):
            continue
        key = names.parse_step_folder(name)
        if key is None:
            problems.add(f"{run / name} is not of the durable tier: skipped")
            continue
        images.extend(_scan_step(run / name, run_id, key, problems))
    images.sort(key=lambda found: (-found.key.step, -found.key.origin, found.rank))
    return Scanned(images=tuple(images), problems=tuple(problems))


def open_part(found: DurableImage, part: str) -> PartSource:
    """Bytes of one part in its file, which ``release`` closes. Their digest is not checked here.

    Raises ``DurableError`` if the file is gone or has another size.
    """
    image = found.image
    kind: names.Kind = names.LOG if part == "log" else names.DATA
    path = found.folder / names.file_name(image.rank, kind)
    try:
        fd = _open_file(path)
    except (OSError, RecordError) as error:
        raise DurableError(f"{path} can not be read: {error}") from error
    try:
        size = os.fstat(fd).st_size
        if size != _size(image, kind):
            raise DurableError(f"{path} has {size} bytes, {_size(image, kind)} were written: it is not used")
    except BaseException:
        os.close(fd)
        raise
    offset = image.own.length if part == "shared" else 0
    return PartSource(fd=fd, offset=offset, length=image.part(part).length, release=lambda: os.close(fd))


def read_part(found: DurableImage, part: str, into: memoryview) -> None:
    """Fills ``into[:length]`` and checks the digest; raises ``DurableError``, then nothing in ``into`` counts."""
    wanted = found.image.part(part)
    if len(into) < wanted.length:
        raise DurableError(f"{wanted.length} bytes do not fit into memory of {len(into)}")
    source = open_part(found, part)
    state = xxhash.xxh3_128()
    done = 0
    try:
        while done < source.length:
            with into[done : min(done + _READ_BYTES, source.length)] as view:
                got = os.preadv(source.fd, [view], source.offset + done)
                state.update(view[:got])
            if not got:
                raise DurableError(f"the {part} part in {found.folder} ends after {done} of {source.length} bytes")
            done += got
    except OSError as error:
        raise DurableError(f"the {part} part in {found.folder} can not be read: {error.strerror or error}") from error
    finally:
        source.release()
    if state.hexdigest() != wanted.digest:
        raise DurableError(
            f"the {part} part of rank {found.rank} in {found.folder} has the digest {state.hexdigest()}, "
            f"{wanted.digest} was written: it is not used"
        )


def prune(directory: str | Path, run_id: str, keep: Collection[tuple[int, int]]) -> Pruned:
    """Removes the steps older than the newest of ``keep`` that are not in it, and what dead writers left.

    Newer steps stay: they may be on their way to be whole. Nothing is removed when ``keep`` is empty.
    """
    problems = _Problems()
    removed: list[Key] = []
    run = names.run_folder(directory, run_id)
    newest = max(keep, default=(-1, -1))
    for name in _entries(run, problems):
        key = names.parse_step_folder(name)
        if key is not None and key < newest and key not in keep:
            gone = run / f"{names.REMOVED}{name}-{secrets.token_hex(4)}"
            try:
                with locked_folder(run / name):  # not between the files of a writer
                    (run / name).rename(gone)
                sync_folder(run)
            except FileNotFoundError:
                continue  # another host was faster
            except OSError as error:
                problems.add(f"{run / name} could not be removed: {error.strerror or error}")
                continue
            removed.append(key)
            _remove(gone, problems)
        elif key is not None:
            _remove_left(run / name)
        elif name.startswith(names.REMOVED):
            _remove(run / name, problems)
    return Pruned(removed=tuple(sorted(removed)), problems=tuple(problems))


# -- one step


def _scan_step(folder: Path, run_id: str, key: Key, problems: _Problems) -> list[DurableImage]:
    images = []
    seen: dict[int, set[str]] = {}
    for name in _entries(folder, problems):
        if name.startswith("."):
            continue
        parsed = names.parse_file_name(name)
        if parsed is None:
            problems.add(f"{folder / name} is not of the durable tier: skipped")
            continue
        seen.setdefault(parsed[0], set()).add(parsed[1])
    for rank, kinds in sorted(seen.items()):
        try:
            if names.MANIFEST not in kinds:
                raise RecordError("its manifest is missing, it was never finished")
            images.append(_image(folder, run_id, key, rank))
        except OSError as error:
            problems.add(f"rank {rank} in {folder} is skipped: {error.strerror or error}")
        except RecordError as error:
            problems.add(f"rank {rank} in {folder} is skipped: {error}")
    return images


def _image(folder: Path, run_id: str, key: Key, rank: int) -> DurableImage:
    fd = _open_file(folder / names.file_name(rank, names.MANIFEST))
    try:
        data = os.read(fd, names.MAX_MANIFEST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > names.MAX_MANIFEST_BYTES:
        raise RecordError(f"its manifest has more than {names.MAX_MANIFEST_BYTES} bytes")
    try:
        image = names.decode_manifest(data, run_id=run_id, key=key, rank=rank)
    except RecordError as error:
        raise RecordError(f"its manifest is not believed: {error}") from None
    for kind in (names.DATA, names.LOG):
        path = folder / names.file_name(rank, kind)
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != _size(image, kind):
            raise RecordError(f"{path.name} has {found.st_size} bytes, {_size(image, kind)} were written")
    return DurableImage(image=image, folder=folder)


def _size(image: Copy, kind: names.Kind) -> int:
    return image.log.length if kind == names.LOG else image.own.length + image.shared.length


def _open_file(path: Path) -> int:
    """Opens a plain file; never waits for a pipe, never follows a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordError(f"{path.name} is not a plain file")
    return fd


def _entries(folder: Path, problems: _Problems) -> list[str]:
    found: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(found) >= MAX_ENTRIES:
                    problems.add(f"{folder} has more than {MAX_ENTRIES} entries: the rest is skipped")
                    break
                found.append(entry.name)
    except FileNotFoundError:
        pass  # nothing was written yet, or another host removed it
    except OSError as error:
        problems.add(f"{folder} can not be read: {error.strerror or error}")
    return sorted(found)


def _remove(gone: Path, problems: _Problems) -> None:
    try:
        shutil.rmtree(gone)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.add(f"{gone} could not be removed: {error.strerror or error}")


def _remove_left(folder: Path) -> None:
    """Temporary files whose writer is dead: it would hold their lock."""
    for name in _entries(folder, _Problems()):
        if not name.startswith(names.TEMPORARY):
            continue
        with contextlib.suppress(OSError, RecordError):
            fd = _open_file(folder / name)
            try:
                if take_lock(fd, wait=False):
                    (folder / name).unlink()
            finally:
                os.close(fd)
