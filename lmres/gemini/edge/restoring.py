"""Restoring a generation's image for the local ranks, and who waits for it.

One prepare at a time; each rank is fetched in a thread of its own (``fetch``). A rank that has no whole copy left fails
alone, with its reason; what came whole is kept, sealed, for the next try.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lmres.errors import StateError, VaultError
from lmres.gemini.edge import durable
from lmres.gemini.edge.fetch import DigestLocks, Fetch, Fetched
from lmres.gemini.edge.ranks import LocalRank
from lmres.gemini.edge.services import Services
from lmres.gemini.edge.whereabouts import Whereabouts
from lmres.gemini.inventory import Copy, Key
from lmres.gemini.session import Message, Prepare
from lmres.gemini.slot import SlotState

_POLL_S = 0.005


class DurableFiles:
    """The files of the run, looked for once, when somebody asks. Any thread."""

    def __init__(self, directory: str | None, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        self._lock = threading.Lock()
        self._found: tuple[durable.DurableImage, ...] | None = None

    def __call__(self) -> Sequence[durable.DurableImage]:
        with self._lock:
            if self._found is None:
                directory = self._directory
                self._found = durable.scan(directory, self._run_id).images if directory is not None else ()
            return self._found


@dataclass(frozen=True, slots=True)
class _Failure:
    """``final``: of the image itself; else it may be had another time."""

    why: str
    final: bool


class Restoration:
    """One prepare. ``done`` is called for each rank with what was fetched or why not."""

    def __init__(
        self,
        services: Services,
        prepare: Prepare,
        ranks: Sequence[LocalRank],
        *,
        done: Callable[[LocalRank, Fetched | None, str], None],
    ) -> None:
        self._services = services
        self.prepare = prepare
        self._done = done
        self._left = {rank.rank for rank in ranks}
        self._results: dict[int, Fetched | _Failure] = {}
        self._fetches: list[Fetch] = []
        self._cancelled = False
        self._locks = DigestLocks()
        options = services.options
        self._files = DurableFiles(options.durable_directory, options.run_id)
        manifests = [copy for copy in prepare.manifests if copy.key == prepare.key and copy.rank in self._left]
        manifests += [copy for rank in ranks for copy in rank.copies() if copy.key == prepare.key]
        self._where = Whereabouts(
            prepare.sources,
            [part.digest for copy in manifests for _, part in copy.parts()],
            run_id=options.run_id,
            node_id=options.node_id,
            generation=prepare.generation,
        )
        for rank in ranks:
            self._when_idle(rank, manifests)

    @property
    def generation(self) -> int:
        return self.prepare.generation

    def cancel(self) -> None:
        """Another generation's image is wanted by now."""
        self._cancelled = True
        for fetch in self._fetches:
            fetch.cancel()

    def running(self, rank: int) -> bool:
        return rank in self._left

    def answer(self, rank: LocalRank) -> tuple[Message, tuple[int, ...]] | None:
        """What a worker of this rank gets; None while it is not known."""
        result = self._results.get(rank.rank)
        if result is None:
            return None
        if isinstance(result, _Failure):
            return {"op": "failed" if result.final else "off", "why": result.why}, ()
        copy, slot = result.copy, rank.slots[result.index]
        message = {
            "op": "restored",
            "step": copy.step,
            "origin": copy.origin,
            "source": result.source,
            "shared_length": copy.shared.length,
            "own_length": copy.own.length,
            "log_length": copy.log.length,
            "bytes": result.bytes,
            "fetch_ms": result.fetch_ms,
        }
        return message, (slot.segments["shared"].fd, slot.segments["own"].fd)

    def _when_idle(self, rank: LocalRank, manifests: list[Copy]) -> None:
        """Digests that are being made, or a restoration that is not over, still use the slots and the log."""
        if self._cancelled:
            return
        if rank.busy or rank.restoring:
            self._services.loop.after(_POLL_S, partial(self._when_idle, rank, manifests))
            return
        index = _target(rank, self.prepare.key, manifests)
        key = self.prepare.key
        known = [copy for copy in manifests if copy.rank == rank.rank]
        fetch = Fetch(
            self._services,
            rank,
            index,
            key=key,
            manifests=known,
            where=self._where,
            files=self._files,
            locks=self._locks,
        )
        self._fetches.append(fetch)
        rank.restoring = True
        self._services.restoring.run(fetch.run, partial(self._finish, rank, index))

    def _finish(self, rank: LocalRank, index: int, fetched: Fetched | None, error: Exception | None) -> None:
        self._left.discard(rank.rank)
        rank.restoring = False
        if self._cancelled:
            rank.table_clear(index)
            return
        if fetched is not None:
            rank.put(index, fetched.copy)
            self._results[rank.rank] = fetched
            self._done(rank, fetched, "")
            return
        rank.table_clear(index)
        why = str(error) if isinstance(error, VaultError) else f"rank {rank.rank} could not be restored: {error!r}"
        why = f"{self.prepare.key}: {why}"
        passing = isinstance(error, VaultError) and not isinstance(error, StateError)
        self._results[rank.rank] = _Failure(why, final=not passing)
        self._done(rank, None, why)


def _target(rank: LocalRank, key: Key, manifests: Sequence[Copy]) -> int:
    """The slot that is to hold the image: the one that has most of it, and then the one least worth keeping."""
    wanted = [copy for copy in manifests if copy.rank == rank.rank]

    def worth(index: int) -> tuple[int, int]:
        copy = rank.slots[index].copy
        if copy is None or rank.table.state(index) is not SlotState.SEALED:
            return 0, 1
        if copy.key == key:
            return 9, 0
        same = max((sum(copy.part(name) == part for name, part in want.parts()) for want in wanted), default=0)
        return same, 0

    usable = [index for index in range(len(rank.slots)) if not rank.is_soiled(index)]
    best = max(usable or range(len(rank.slots)), key=worth)
    rank.clean(best)
    slot = rank.slots[best]
    if slot.copy is not None and worth(best)[0] == 0:
        rank.table_clear(best)
    return best
