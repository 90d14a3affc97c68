"""Batches on the way back.

Samplers run, so that orders and epochs come out right; fetching is passed over, and one cached batch of the right size
is handed out. What can still matter is fetched for real:

- the last few batches of each iterator that lives when the wanted step is reached: the program may hold them (it
  fetches ahead), and the dataset may draw from the process's generators, whose states then are noted;
- every batch of such an iterator with loader workers, since a worker's own generators have moved with each of its
  items. Iterators of earlier epochs are gone by then, with their workers;
- every batch of an iterable dataset, which keeps its own position;
- every batch of an iterator that ``itertools.cycle`` keeps (``cycles``): it hands out the very same batches again;
- every batch when the program starts from a checkpoint of its own: its iterators are not those of the first life.

The states of the process's generators are noted when an iterator is made and at its last deliveries.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from lmres.adapters.resume.engine import Engine
from lmres.adapters.resume.rng import Noted, get_rng, kept_rng, set_rng, unpack

REAL_DELIVERIES = 4
KEPT_ITERATORS = 8


class LiveIterator:
    """What is noted of one iterator in a live program."""

    def __init__(self, rng_made: Noted) -> None:
        self.rng_made = rng_made
        self.delivered = 0
        self.rng_last: list[Noted] = []
        self.kept = False
        self.gone: Callable[[], bool] = lambda: False


class Loaders:
    """``live``: number of an iterator, in the order of creation, to what is noted of it. ``wanted``: the same as it
    was when the state was captured, to come back to."""

    def __init__(self, torch: Any, engine: Engine) -> None:
        self.live: dict[int, LiveIterator] = {}
        self.wanted: dict[int, dict[str, Any]] = {}
        self._torch = torch
        self._engine = engine
        self._batches: dict[Any, Any] = {}
        self.keeping = False
        """The next iterator's batches are kept by the program."""
        engine.on_arrival.append(self._batches.clear)

    @property
    def returning(self) -> bool:
        return bool(self._engine.resume_step) and not self._engine.jump and self._engine.phase != "live"

    @property
    def exact(self) -> bool:
        """Whether iterators count as in the first life: not when the program began at a checkpoint of its own."""
        return not self._engine.started_at

    def made(self) -> tuple[int, dict[str, Any] | None]:
        """A new iterator's number, and what is known of its first life's."""
        engine = self._engine
        engine.iterators += 1
        number = engine.iterators
        known = self.wanted.get(number) if self.returning and self.exact else None
        if known is not None:
            set_rng(self._torch, known["rng_made"])
        self.live[number] = LiveIterator(Noted(get_rng(self._torch)))
        for old in [n for n, it in self.live.items() if n <= number - KEPT_ITERATORS or it.gone()]:
            del self.live[old]
        return number, known

    def watch(self, number: int, iterator: Any) -> None:
        """What is noted goes with the iterator."""
        reference = weakref.ref(iterator)
        self.live[number].gone = lambda: reference() is None

    def note_delivery(self, number: int) -> None:
        live = self.live.get(number)
        if live is not None:
            live.delivered += 1
            live.rng_last.append(Noted(get_rng(self._torch)))
            del live.rng_last[:-REAL_DELIVERIES]

    def rng_of_delivery(self, known: dict[str, Any] | None, count: int) -> Any:
        """The state noted at the ``count``-th delivery of the first life, if that was one of the last."""
        if known is None:
            return None
        index = count - (known["delivered"] - len(known["rng_last"])) - 1
        return known["rng_last"][index] if 0 <= index < len(known["rng_last"]) else None

    def cached(self, loader: Any, indices: Any) -> Any:
        size = len(indices) if hasattr(indices, "__len__") else 0
        key = (id(loader), size)
        if key not in self._batches:
            from torch.utils.data.dataloader import _DatasetKind

            with self._engine.ours, kept_rng(self._torch):
                fetcher = _DatasetKind.create_fetcher(
                    loader._dataset_kind,
                    loader.dataset,
                    loader._auto_collation,
                    loader.collate_fn,
                    loader.drop_last,
                )
                self._batches[key] = fetcher.fetch(indices)
        return self._batches[key]

    def notes(self) -> tuple[list[list[int]], bytes]:
        """For the captured state: number, deliveries and size of each state noted, and the states one after another."""
        table, blobs = [], []
        for number, it in self.live.items():
            if not it.gone():
                states = [noted.packed() for noted in (it.rng_made, *it.rng_last)]
                table.append([number, it.delivered, *(len(s) for s in states)])
                blobs += states
        return table, b"".join(blobs)

    def want(self, table: list[list[int]], states: bytes) -> None:
        """Come back to these notes. Raises ValueError when they are torn."""
        at = 0
        for number, delivered, *sizes in table:
            found = []
            for size in sizes:
                found.append(unpack(self._torch, states[at : at + size]))
                at += size
            self.wanted[number] = {"delivered": delivered, "rng_made": found[0], "rng_last": found[1:]}


class SkippedIterator:
    """Stands for an iterator with loader workers that will be gone before the program is back."""

    def __init__(self, loaders: Loaders, engine: Engine, loader: Any, make: Any, number: int) -> None:
        self._loaders = loaders
        self._engine = engine
        self._loader = loader
        self._make = make
        self._number = number
        self._real: Any = None
        torch = loaders._torch
        # The draws of a real iterator, in their order.
        self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        sampler = iter(loader._index_sampler)
        first = list(itertools.islice(sampler, 1))
        self._sampler = itertools.chain(first, sampler)

    def __iter__(self) -> SkippedIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._real is None and not self._engine.skipping:
            self._begin()
        if self._real is not None:
            return next(self._real)
        with self._engine.ours:
            indices = next(self._sampler)
        self._loaders.note_delivery(self._number)
        return self._loaders.cached(self._loader, indices)

    def _begin(self) -> None:
        """The way back has ended earlier than thought: go on with real workers from here."""
        with self._engine.ours, kept_rng(self._loaders._torch):
            self._real = self._make(self._loader)
            for _ in range(self._loaders.live[self._number].delivered):
                next(self._real)


def install(torch: Any, engine: Engine) -> Loaders:
    from torch.utils.data import dataloader

    loaders = Loaders(torch, engine)
    make = dataloader.DataLoader._get_iterator
    base = dataloader._BaseDataLoaderIter
    single = dataloader._SingleProcessDataLoaderIter
    deliver = base.__next__
    iterable = dataloader._DatasetKind.Iterable

    @functools.wraps(make)
    def _get_iterator(self: Any) -> Any:
        if not engine.outside():
            return make(self)
        kept, loaders.keeping = loaders.keeping, False
        if kept:
            _genuine(torch, engine, always=True)
        number, known = loaders.made()
        loaders.live[number].kept = kept
        with engine.ours:
            if (
                engine.skipping
                and known is None
                and not kept
                and self.num_workers
                and self._dataset_kind != iterable
                and loaders.exact
            ):
                return SkippedIterator(loaders, engine, self, make, number)
            iterator = make(self)
        iterator._lmres = (number, known, self)
        loaders.watch(number, iterator)
        return iterator

    @functools.wraps(deliver)
    def __next__(self: Any) -> Any:
        mine = self.__dict__.get("_lmres")
        if mine is None or not engine.outside():
            return deliver(self)
        number, known, loader = mine
        live = loaders.live.get(number)
        if live is not None and live.kept:
            return _kept_delivery(torch, engine, loaders, deliver, self)
        if loaders.returning and isinstance(self, single) and loaders.exact and self._dataset_kind != iterable:
            rng = loaders.rng_of_delivery(known, live.delivered + 1 if live is not None else 0)
            if rng is not None:
                set_rng(torch, rng)
            elif engine.skipping:
                with engine.ours:
                    indices = self._next_index()
                self._num_yielded += 1
                loaders.note_delivery(number)
                return loaders.cached(loader, indices)
        loaders.note_delivery(number)
        with engine.ours:
            return deliver(self)

    dataloader.DataLoader._get_iterator = _get_iterator
    base.__next__ = __next__
    return loaders


def _genuine(torch: Any, engine: Engine, *, always: bool = False) -> bytes | None:
    """The generators as they were here in the first life; in a live program their states, to be noted."""
    noted = engine.noted_generators()
    if noted is not None:
        set_rng(torch, unpack(torch, noted))
        return None
    now = Noted(get_rng(torch)).packed()
    if always:
        engine.note_generators(now)
    return now


def _kept_delivery(torch: Any, engine: Engine, loaders: Loaders, deliver: Any, iterator: Any) -> Any:
    """The states are noted only where fetching draws from them."""
    before = _genuine(torch, engine)
    with engine.ours:
        batch = deliver(iterator)
    if before is not None and before != Noted(get_rng(torch)).packed():
        engine.note_generators(before)
    return batch
