"""Makes one image of one local rank whole in this vault: the nearest copy of each part whose digest is right.

Rules:

1. Nothing counts until it was hashed here, after it lay in the memory that the worker will read.
2. A part comes from, in this order: its place in the slot, other memory of this vault, other vaults, files. All of the
   same key; a part that is wrong in one place is taken from the next, the others stay.
3. If no place is left the error names the rank, the step, and what was tried. That a vault gives no answer does not
   mean that it has nothing: it is asked again for a while, and then it is not the image's fault (``VaultError``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lmres.errors import DigestMismatch, PartMissing, StateError, TransferError, VaultError
from lmres.gemini.edge import durable
from lmres.gemini.edge.memory import MemoryRefused, Segment, copy_bytes, digest_of
from lmres.gemini.edge.ranks import MEMORY_PARTS, LocalRank
from lmres.gemini.edge.services import Services
from lmres.gemini.edge.transfer import Puller
from lmres.gemini.edge.whereabouts import Holder, Whereabouts
from lmres.gemini.inventory import PART_NAMES, Copy, Key, Part

PULL_S = 600.0
PATIENCE_S = 30.0
ASK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """``bytes``: of the image; ``moved``: of them, those that were not in their place already."""

    copy: Copy
    index: int
    source: str
    bytes: int
    moved: int
    fetch_ms: float


class DigestLocks:
    """One at a time brings a part; the others then find it here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def of(self, digest: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(digest, threading.Lock())


class Fetch:
    """For one rank. Runs in a thread; the rank's slot ``index`` and log are its own meanwhile."""

    def __init__(
        self,
        services: Services,
        rank: LocalRank,
        index: int,
        *,
        key: Key,
        manifests: Sequence[Copy],
        where: Whereabouts,
        files: Callable[[], Sequence[durable.DurableImage]],
        locks: DigestLocks,
    ) -> None:
        self._services = services
        self._rank = rank
        self._index = index
        self._slot = rank.slots[index]
        self._key = key
        self._manifests = [copy for copy in manifests if copy.key == key and copy.rank == rank.rank]
        self._where = where
        self._files = files
        self._locks = locks
        self._lock = threading.Lock()
        self._puller: Puller | None = None
        self._cancelled = False
        self._broke_off = False  # a holder could not give what it has
        self._tried: list[str] = []
        self._sources: dict[str, str] = {}
        self._moved = 0

    def run(self) -> Fetched:
        """Raises VaultError when it can not be had now, StateError when no source has the image whole."""
        began_s = time.monotonic()
        while (manifest := self._from_anywhere()) is None:
            if not self._wait_for_the_silent(began_s + PATIENCE_S):
                tried = "; ".join([*self._tried, *self._where.problems]) or "nobody knows its digests"
                why = f"no whole copy is left for rank {self._rank.rank}: {tried}"
                raise VaultError(why) if self._broke_off or self._where.problems else StateError(why)
        return Fetched(
            copy=replace(manifest, has=PART_NAMES, place="memory"),
            index=self._index,
            source=self._label(),
            bytes=sum(part.length for _, part in manifest.parts()),
            moved=self._moved,
            fetch_ms=(time.monotonic() - began_s) * 1000,
        )

    def _from_anywhere(self) -> Copy | None:
        """As one of the holders describes it."""
        self._tried.clear()
        self._moved = 0
        for manifest in self._variants():
            try:
                for name in MEMORY_PARTS:
                    self._sources[name] = self._part(name, manifest.part(name))
                self._sources["log"] = self._log(manifest.log)
            except _Nowhere as error:
                self._tried.append(str(error))
                continue
            return manifest
        return None

    def _wait_for_the_silent(self, end_s: float) -> bool:
        """A vault that is stopped or cut off for a while may have what all others lack. False: there is none."""
        silent = self._where.silent
        while silent and not self._cancelled and time.monotonic() < end_s:
            began_s = time.monotonic()
            self._where.ask(self._where.rounds)
            if self._where.silent != silent:
                return True
            time.sleep(max(0.0, began_s + ASK_EVERY_S - time.monotonic()))
        return False

    def cancel(self) -> None:
        """Ends it soon, with an error. Any thread."""
        with self._lock:
            self._cancelled = True
            puller = self._puller
        if puller is not None:
            puller.close()

    def _variants(self) -> list[Copy]:
        """The same image as different holders describe it: normally one."""
        known = self._manifests or [
            found.image for found in self._files() if found.key == self._key and found.rank == self._rank.rank
        ]
        ordered = sorted(known, key=lambda copy: (copy.place != "memory", -len(copy.has)))
        if self._slot.copy is not None and self._slot.copy.key == self._key:
            ordered.insert(0, self._slot.copy)
        found: dict[tuple[Part, ...], Copy] = {}
        for copy in ordered:
            found.setdefault(tuple(part for _, part in copy.parts()), copy)
        return list(found.values())

    def _label(self) -> str:
        found = set(self._sources.values())
        for label in ("durable", "replica", "peer"):
            if label in found:
                return label
        return "local"

    # -- parts in memory

    def _part(self, name: str, part: Part) -> str:
        slot = self._slot
        segment = slot.segments.get(name)
        if slot.copy is not None and segment is not None and slot.copy.part(name) == part:
            with segment.view(0, part.length) as view:
                if digest_of(view) == part.digest:
                    return "local"
            self._tried.append(f"the {name} part in the slot of rank {self._rank.rank} has another digest")
        segment = self._segment(name, part)
        with segment.view(0, part.length) as view, self._locks.of(part.digest):
            label = self._fill(name, part, view, segment)
            # From here on other ranks of this host need not bring it again.
            slot.places.append(self._services.contents.add(part, segment, self._rank.rank))
        return label

    def _segment(self, name: str, part: Part) -> Segment:
        """Memory of the slot that holds the part: what is there if it is large enough."""
        slot = self._slot
        segment = slot.segments.get(name)
        for place in [place for place in slot.places if place.segment is segment]:
            self._services.contents.remove(place)
            slot.places.remove(place)
        if segment is not None and segment.capacity >= part.length:
            return segment
        if segment is not None:
            del slot.segments[name]
            self._services.memory.give_back(segment)
        what = f"restoring the {name} part of rank {self._rank.rank}"
        try:
            slot.segments[name] = self._services.memory.take_touched(part.length, what)
        except MemoryRefused as error:
            raise _Nowhere(str(error)) from error
        return slot.segments[name]

    def _fill(self, name: str, part: Part, view: memoryview, segment: Segment) -> str:
        self._moved += part.length
        if part.length == 0:
            return "local"
        if self._from_memory(part, view, segment):
            return "local"
        label = self._from_peers(name, part, view)
        if label is None and self._from_files(name, part, view):
            label = "durable"
        if label is None:
            raise _Nowhere(f"no source has the {name} part {part.digest} of {part.length} bytes")
        return label

    def _from_memory(self, part: Part, view: memoryview, segment: Segment) -> bool:
        with self._services.contents.reading(part.digest, but=segment) as place:
            if place is None or place.part != part:
                return False
            with place.segment.view(0, part.length) as there:
                copy_bytes(there, view)
        if digest_of(view) == part.digest:
            return True
        self._tried.append(f"part {part.digest} of rank {place.rank} in this vault has another digest")
        self._services.contents.remove(place)
        return self._from_memory(part, view, segment)

    def _from_peers(self, name: str, part: Part, view: memoryview) -> str | None:
        for holder in self._where.holders(part.digest):
            try:
                self._pull(holder, part, view)
            except VaultError as error:
                self._broke_off = self._broke_off or not isinstance(error, (PartMissing, DigestMismatch))
                self._tried.append(f"{holder.node_id}: {error}")
                continue
            return "peer" if name != "shared" or self._rank.rank in holder.ranks else "replica"
        return None

    def _pull(self, holder: Holder, part: Part, view: memoryview) -> None:
        options = self._services.options
        with Puller(holder.address, holder.port, run_id=options.run_id, node_id=options.node_id) as puller:
            with self._lock:
                if self._cancelled:
                    raise TransferError("not wanted any more")
                self._puller = puller
            puller.pull(part.digest, part.length, view, timeout_s=PULL_S)

    def _from_files(self, name: str, part: Part, view: memoryview) -> bool:
        for found in self._files():
            if found.image.part(name) != part:
                continue
            try:
                durable.read_part(found, name, view)
            except VaultError as error:
                self._tried.append(str(error))
                continue
            return True
        return False

    # -- the log

    def _log(self, part: Part) -> str:
        """The log of the rank begins with exactly these bytes; what comes after them is no part of anything."""
        journal = self._rank.journal
        journal.forget()
        if journal.part(part.length) == part:
            return "local"
        with journal.segment.view(0, part.length) as view:
            label = self._fill("log", part, view, journal.segment)
        journal.forget()
        if journal.part(part.length) != part:
            raise _Nowhere(f"the log of {part.length} bytes changed while it was restored")
        return label


class _Nowhere(VaultError):
    """This description of the image leads nowhere."""
