"""Images to files, behind the training's back.

Rules:

1. The images are copied aside first, so that a slow disk holds no slot; where memory does not allow that the slot
   itself is written from, and captures wait for it.
2. One key at a time, in one thread: what becomes due meanwhile is left out unless it is still there afterwards. A
   failure is told once; that key is not tried again, the next one is.
3. A key is durable here when the files of all local ranks are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lmres.gemini.edge import durable
from lmres.gemini.edge.memory import MemoryRefused, Segment, copy_bytes
from lmres.gemini.edge.ranks import MEMORY_PARTS, LocalRank
from lmres.gemini.edge.services import Services
from lmres.gemini.inventory import Copy, Key

_MAX_KEYS = 64


class Persister:
    """``durable``: keys that are whole in files, as far as this vault's ranks go."""

    def __init__(self, services: Services, *, on_change: Callable[[], None]) -> None:
        self._services = services
        self._on_change = on_change
        self._begun: set[Key] = set()
        self._open: dict[Key, set[int]] = {}
        self._failed: set[Key] = set()
        self._deleted: set[Key] = set()
        self._on_disk: dict[Key, set[int]] = {}
        self._problem = ""
        self._cancel = threading.Event()
        self.durable: set[Key] = set()

    @property
    def enabled(self) -> bool:
        return self._services.options.durable_directory is not None

    def persist(self, key: Key, ranks: Sequence[LocalRank]) -> None:
        """Begins to write this key's images, unless that was done before."""
        if not self.enabled or self._open or key in self._begun or self._cancel.is_set():
            return
        indexes = [(rank, rank.table.find(key)) for rank in ranks]
        if not ranks or any(index is None or rank.slots[index].copy is None for rank, index in indexes):
            return
        self._begun = {*sorted(self._begun)[-_MAX_KEYS:], key}
        self._open[key] = {rank.rank for rank in ranks}
        for rank, index in indexes:
            copy = rank.slots[index].copy if index is not None else None
            if index is None or copy is None:
                continue
            rank.table.pin(index)
            job = _Job(self._services, rank, index, copy, self._cancel)
            self._services.touching.run(job.copy_aside, partial(self._copied, job, key))

    def found(self, files: Sequence[durable.DurableImage]) -> None:
        """What a look at the folder showed."""
        by_key: dict[Key, set[int]] = {}
        for image in files:
            by_key.setdefault(image.key, set()).add(image.rank)
        self._on_disk = by_key

    def assign(self, ranks: Sequence[int]) -> None:
        """These ranks' files count from now on."""
        self.durable = {key for key, found in self._on_disk.items() if ranks and set(ranks) <= found}

    def delete(self, keys: Sequence[Key]) -> None:
        """Removes files that no longer need to be kept."""
        directory = self._services.options.durable_directory
        fresh = set(keys) - self._deleted
        if directory is None or not fresh:
            return
        self._deleted |= fresh
        self.durable -= fresh
        keep = set(self.durable)
        run_id = self._services.options.run_id

        def done(pruned: durable.Pruned | None, error: Exception | None) -> None:
            problems = [str(error)] if error is not None else list(pruned.problems if pruned is not None else ())
            for problem in problems:
                self._services.log(f"old files: {problem}")

        self._services.writing.run(lambda: durable.prune(directory, run_id, keep), done)

    def status(self) -> dict[str, Any]:
        newest = max(self.durable, default=None)
        return {
            "directory": self._services.options.durable_directory,
            "newest": None if newest is None else list(newest),
            "writing": sorted(list(key) for key in self._open),
            "problem": self._problem,
        }

    def stop(self) -> None:
        """Nothing more is written; what is half written is removed."""
        self._cancel.set()

    def _copied(self, job: _Job, key: Key, aside: bool | None, error: Exception | None) -> None:
        if error is not None:
            self._written(job, key, None, error)
            return
        if aside:
            job.unpin()
        self._services.writing.run(job.write, partial(self._written, job, key))

    def _written(self, job: _Job, key: Key, written: durable.Written | None, error: Exception | None) -> None:
        job.unpin()
        job.close()
        left = self._open.get(key, set())
        left.discard(job.copy.rank)
        if written is None:
            self._failed.add(key)
        if error is not None:
            text = str(error)
            if not self._problem:
                self._services.tell("problem", {"rank": job.copy.rank, "reason": text})
            self._problem = text
            self._services.log(text)
        if not left:
            self._open.pop(key, None)
            if key not in self._failed:
                self._problem = ""
                self.durable.add(key)
                self._on_disk[key] = {job.copy.rank, *self._on_disk.get(key, ())}
                self._services.tell("durable", {"step": key.step, "origin": key.origin})
            self._failed.discard(key)
        self._on_change()


class _Job:
    """One image of one rank. The slot is pinned until its bytes were copied aside, or written."""

    def __init__(self, services: Services, rank: LocalRank, index: int, copy: Copy, cancel: threading.Event) -> None:
        self._services = services
        self._rank = rank
        self._index = index
        self.copy = copy
        self._cancel = cancel
        self._pinned = True
        self._aside: dict[str, Segment] = {}
        self._segments = dict(rank.slots[index].segments)
        self._log = rank.journal.segment
        self._kept = [segment for segment in (*self._segments.values(), self._log) if segment.acquire()]

    def unpin(self) -> None:
        """In the loop; the slot may be granted from now on."""
        if self._pinned:
            self._pinned = False
            self._rank.table.unpin(self._index)
            self._rank.slot_came_free()

    def copy_aside(self) -> bool:
        """In a thread. False if there is no memory for it. Bytes that change meanwhile are noticed by their digest."""
        memory = self._services.memory
        try:
            for name in MEMORY_PARTS:
                self._aside[name] = memory.take_touched(self.copy.part(name).length, "writing to files")
        except MemoryRefused:
            self._drop_aside()
            return False
        for name, segment in self._aside.items():
            length = self.copy.part(name).length
            with segment.view(0, length) as there, self._segments[name].view(0, length) as here:
                copy_bytes(here, there)
        return True

    def write(self) -> durable.Written | None:
        """In the writing thread."""
        options = self._services.options
        assert options.durable_directory is not None
        sources = {**self._segments, **self._aside}
        spans = {name: (sources[name].fd, 0, self.copy.part(name).length) for name in MEMORY_PARTS}
        return durable.write_image(
            options.durable_directory,
            run_id=options.run_id,
            image=self.copy,
            shared=spans["shared"],
            own=spans["own"],
            log=(self._log.fd, 0, self.copy.log.length),
            cancel=self._cancel,
        )

    def close(self) -> None:
        """In the loop, once nobody reads or writes for it any more."""
        for segment in self._kept:
            segment.release()
        self._kept.clear()
        self._drop_aside()

    def _drop_aside(self) -> None:
        for segment in self._aside.values():
            self._services.memory.spare(segment)
        self._aside.clear()
