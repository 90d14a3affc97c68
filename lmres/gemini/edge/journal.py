"""The log of one rank: a sparse segment that only grows, with the digests of its prefixes at hand.

An image covers a prefix. The hash goes on from where it was, so that a prefix that grew by a line costs a line.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

from lmres.errors import VaultError
from lmres.gemini.edge.memory import PAGE_BYTES, Memory, Segment, add_to
from lmres.gemini.inventory import Part

CAPACITY_BYTES = 1 << 30
_MARKS = 8  # prefixes whose hash is kept: those of the slots, and of copies on their way


class Journal:
    """One thread at a time."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.segment = Segment(CAPACITY_BYTES, name="lmres-log")
        self._marks: OrderedDict[int, xxhash.xxh3_128] = OrderedDict()
        self._hashed = 0
        self._hasher = xxhash.xxh3_128()

    def part(self, length: int) -> Part:
        """The prefix as a part. Hashes what is new in it; from the start when it is shorter than what is known."""
        if length > self.segment.capacity:
            raise VaultError(f"a log of {length} bytes, at most {self.segment.capacity} can be held")
        known = self._marks.get(length)
        if known is None:
            if length < self._hashed:
                self.forget()
            with self.segment.view(self._hashed, length) as fresh:
                add_to(self._hasher, fresh)
            self._hashed = length
            known = self._hasher.copy()
            self._marks[length] = known
            if len(self._marks) > _MARKS:
                self._marks.popitem(last=False)
            self._charge(length)
        return Part(digest=known.hexdigest(), length=length)

    def state_at(self, part: Part) -> xxhash.xxh3_128 | None:
        """The hash of this prefix, to go on from; None if it is not known to be here."""
        known = self._marks.get(part.length)
        return known.copy() if known is not None and known.hexdigest() == part.digest else None

    def longest(self, most: int) -> tuple[int, xxhash.xxh3_128 | None]:
        """The longest known prefix of at most this length, and its hash."""
        have = max((length for length in self._marks if length <= most), default=0)
        return (have, self._marks[have].copy()) if have else (0, None)

    def rewind(self, length: int) -> None:
        """Nothing after ``length`` counts any more."""
        have, state = self.longest(length)
        for later in [mark for mark in self._marks if mark > have]:
            del self._marks[later]
        if state is None:
            self.forget()
        elif self._hashed > have:
            self._hasher, self._hashed = state, have

    def adopt(self, length: int, state: xxhash.xxh3_128) -> None:
        """The bytes up to ``length`` were written by us, and this is their hash."""
        self._hasher, self._hashed = state.copy(), length
        self._marks[length] = state.copy()
        if len(self._marks) > _MARKS:
            self._marks.popitem(last=False)
        self._charge(length)

    def forget(self) -> None:
        """The bytes may have changed: hash again from the start."""
        self._marks.clear()
        self._hashed = 0
        self._hasher = xxhash.xxh3_128()

    def close(self) -> None:
        self._memory.give_back(self.segment)

    def _charge(self, length: int) -> None:
        self._memory.charge(self.segment, max(self.segment.charged, -(-length // PAGE_BYTES) * PAGE_BYTES))
