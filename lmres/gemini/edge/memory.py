"""Anonymous memory of the vault: segments, how much of it may be taken, and where which content lies.

Rules:

1. A segment is a ``memfd``: no name, no ``/dev/shm`` limit, gone with the last process that has it. Its size is sealed,
   so that no worker can shrink it under the vault.
2. Memory is checked against the limit before it is taken, and touched (its pages are made) before anybody waits for it.
3. A digest is looked up by content, from any thread. What is being read is closed only when the reader is done; memory
   that is written again meanwhile gives the reader a wrong digest, which it checks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from lmres.errors import VaultError
from lmres.gemini.edge.populate import forget, populate
from lmres.gemini.inventory import Part
from lmres.gemini.limits import Room

PAGE_BYTES = mmap.PAGESIZE
_TOUCH_BYTES = 64 << 20
_COPY_BYTES = 1 << 20
_LARGE_BYTES = 16 << 20
_HASH_BYTES = 8 << 20  # short enough that another thread gets its turn


class MemoryRefused(VaultError):
    """The memory asked for is more than the limit allows or the system gives. The message has the numbers."""


def digest_of(view: memoryview) -> str:
    """xxh3_128 of the bytes. Other threads run meanwhile."""
    hasher = xxhash.xxh3_128()
    add_to(hasher, view)
    return hasher.hexdigest()


def add_to(hasher: xxhash.xxh3_128, view: memoryview) -> None:
    for start in range(0, len(view), _HASH_BYTES):
        with view[start : start + _HASH_BYTES] as piece:
            hasher.update(piece)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """In pieces: a copy holds the interpreter lock."""
    for start in range(0, len(source), _COPY_BYTES):
        target[start : start + _COPY_BYTES] = source[start : start + _COPY_BYTES]


class Segment:
    """One ``memfd``. ``charged``: bytes counted against the limit."""

    def __init__(self, capacity: int, *, name: str = "lmres") -> None:
        self.capacity = max(PAGE_BYTES, -(-capacity // PAGE_BYTES) * PAGE_BYTES)
        self.charged = 0
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False
        self._map: mmap.mmap | None = None
        try:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.capacity)
        except OSError as error:
            raise MemoryRefused(f"no memory segment of {self.capacity} bytes: {error}") from error
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def touch(self) -> None:
        """Makes all pages. Takes its time: about a second per GiB. Raises MemoryRefused when the system has no more."""
        try:
            for start in range(0, self.capacity, _TOUCH_BYTES):
                os.posix_fallocate(self.fd, start, min(_TOUCH_BYTES, self.capacity - start))
            with self.view() as view:
                populate(view)
        except OSError as error:
            raise MemoryRefused(f"the system gives no {self.capacity} bytes of memory: {error}") from error

    def view(self, start: int = 0, end: int | None = None) -> memoryview:
        """Writable bytes ``start`` to ``end``. Close it (``with``) before the segment is."""
        with self._lock:
            if self._map is None:
                self._map = mmap.mmap(self.fd, self.capacity, mmap.MAP_SHARED)
            whole = memoryview(self._map)
        try:
            return whole[start : self.capacity if end is None else end]
        finally:
            whole.release()

    @property
    def readers(self) -> int:
        return self._readers

    def acquire(self) -> bool:
        """Keeps the descriptor open until ``release``. False if it is closed already."""
        with self._lock:
            if self._closed:
                return False
            self._readers += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._readers -= 1
            last = self._closed and self._readers == 0
        if last:
            self._free()

    def close(self) -> None:
        """Given back to the system once nobody reads it. Any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._readers == 0
        if last:
            self._free()

    def _free(self) -> None:
        if self.capacity > _LARGE_BYTES:
            threading.Thread(target=self._free_now, name="free", daemon=True).start()
        else:
            self._free_now()

    def _free_now(self) -> None:
        """Half a second per GiB, most of it without the interpreter lock."""
        if self._map is not None:
            with contextlib.suppress(OSError), memoryview(self._map) as view:
                forget(view)
            with contextlib.suppress(BufferError):  # somebody still looks: it goes with the last view
                self._map.close()
        os.close(self.fd)


class Memory:
    """Takes segments within the limit and keeps some to spare. Any thread."""

    def __init__(self, room: Callable[[int], Room]) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._held = 0
        self._spare: list[Segment] = []

    @property
    def held(self) -> int:
        return self._held

    @property
    def limit(self) -> int:
        return self._room(self._held).limit

    def take(self, capacities: list[int], what: str) -> list[Segment]:
        """Untouched segments, all or none. Raises MemoryRefused with the numbers."""
        wanted = sum(max(PAGE_BYTES, -(-capacity // PAGE_BYTES) * PAGE_BYTES) for capacity in capacities)
        with self._lock:
            room = self._room(self._held)
            if not room.fits(wanted):
                self._drop_spare()
                room = self._room(self._held)
            if not room.fits(wanted):
                raise MemoryRefused(room.refusal(wanted, what))
            segments: list[Segment] = []
            try:
                for capacity in capacities:
                    segments.append(Segment(capacity))
            except MemoryRefused:
                for segment in segments:
                    segment.close()
                raise
            for segment in segments:
                segment.charged = segment.capacity
                self._held += segment.capacity
            return segments

    def take_touched(self, capacity: int, what: str) -> Segment:
        """One segment with its pages made: a spare one of about this size, else a new one. Raises MemoryRefused."""
        with self._lock:
            fits = [s for s in self._spare if capacity <= s.capacity <= 2 * capacity + (1 << 16) and not s.readers]
            if fits:
                best = min(fits, key=lambda s: s.capacity)
                self._spare.remove(best)
                return best
        (segment,) = self.take([capacity], what)
        try:
            segment.touch()
        except MemoryRefused:
            self.give_back(segment)
            raise
        return segment

    def spare(self, segment: Segment, *, most: int = 2) -> None:
        """Kept for the next one of its size; the oldest goes when there are more than ``most``."""
        with self._lock:
            self._spare.append(segment)
            gone = self._spare.pop(0) if len(self._spare) > most else None
            if gone is not None:
                self._held -= gone.charged
        if gone is not None:
            gone.close()

    def give_back(self, segment: Segment) -> None:
        with self._lock:
            self._held -= segment.charged
            segment.charged = 0
        segment.close()

    def charge(self, segment: Segment, total: int) -> None:
        """A sparse segment has ``total`` bytes touched."""
        with self._lock:
            self._held += total - segment.charged
            segment.charged = total

    def _drop_spare(self) -> None:
        for segment in self._spare:
            self._held -= segment.charged
            segment.close()
        self._spare.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where a part lies: the first ``part.length`` bytes of the segment, as part of an image of ``rank``."""

    part: Part
    segment: Segment
    rank: int


class Contents:
    """Digest to places. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, list[Place]] = {}

    def add(self, part: Part, segment: Segment, rank: int) -> Place:
        place = Place(part=part, segment=segment, rank=rank)
        with self._lock:
            self._places.setdefault(part.digest, []).append(place)
        return place

    def remove(self, place: Place) -> None:
        with self._lock:
            places = self._places.get(place.part.digest, [])
            if place in places:
                places.remove(place)
            if not places:
                self._places.pop(place.part.digest, None)

    def has(self, part: Part) -> bool:
        with self._lock:
            return any(place.part == part for place in self._places.get(part.digest, ()))

    def ranks(self, digest: str) -> list[int]:
        """The ranks of whose images this content is a part here."""
        with self._lock:
            return sorted({place.rank for place in self._places.get(digest, ())})

    @contextmanager
    def reading(self, digest: str, *, but: Segment | None = None) -> Iterator[Place | None]:
        """A place of this content, kept open meanwhile; None if there is none."""
        place = self.acquire(digest, but=but)
        try:
            yield place
        finally:
            if place is not None:
                place.segment.release()

    def acquire(self, digest: str, *, but: Segment | None = None) -> Place | None:
        """As ``reading``; the caller releases the segment."""
        with self._lock:
            for place in self._places.get(digest, ()):
                if place.segment is not but and place.segment.acquire():
                    return place
        return None
