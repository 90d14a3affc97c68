"""One local rank: its slots in memory, its log, and the worker that fills them.

The table of states (``slot``) says what may happen; this module does it. A grant takes the content out of the index
before the worker hears of it, and puts nothing back before the digests of what was sealed are known. A worker whose
connection ended may still write where it was allowed to: until its process is gone that memory is used for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from lmres.gemini.certify import NOT_FINITE, Print, Replayed
from lmres.gemini.edge.journal import Journal
from lmres.gemini.edge.memory import MemoryRefused, Place, Segment, digest_of
from lmres.gemini.edge.services import Services
from lmres.gemini.inventory import PART_NAMES, Copy, Key, Part
from lmres.gemini.session import Message, replayed_from_plain
from lmres.gemini.slot import SLOTS_PER_RANK, SLOTS_WITH_ANCHORS, SlotState, SlotTable

MEMORY_PARTS = ("shared", "own")
MAX_REPLAYED = 8
_COUNTED = {2: "two", 4: "four"}


class Worker(Protocol):
    """The other end of a worker's socket."""

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None: ...


@dataclass(slots=True)
class SlotMemory:
    """``coming``: larger segments that take over when the slot is written next."""

    segments: dict[str, Segment] = field(default_factory=dict)
    coming: dict[str, Segment] = field(default_factory=dict)
    copy: Copy | None = None
    print: Print | None = None
    places: list[Place] = field(default_factory=list)
    sent: tuple[int, ...] = ()


class LocalRank:
    """Runs in the event loop. ``on_sealed`` gets each image that became readable, and the capture's blocking time."""

    def __init__(
        self, rank: int, services: Services, *, on_sealed: Callable[[Copy, float], None], on_change: Callable[[], None]
    ) -> None:
        self.rank = rank
        self._services = services
        self._on_sealed = on_sealed
        self._on_change = on_change
        self.table = SlotTable(SLOTS_WITH_ANCHORS if services.options.anchors else SLOTS_PER_RANK)
        self.slots = [SlotMemory() for _ in range(len(self.table))]
        self.journal = Journal(services.memory)
        self.worker: Worker | None = None
        self.generation = 0
        self.topology = ""
        self.last_step = -1
        self.restoring = False
        self.replayed: tuple[Replayed, ...] = ()
        """The last few."""
        self._spoilt: tuple[Key, Print] | None = None
        self._usable: frozenset[int] = frozenset(range(len(self.table)))
        self._told_room = False
        self._reserved = False
        self._reservation = 0
        self._number = 0
        self._to_hash: deque[Callable[[], None]] = deque()
        self._hashing = False
        self._unwanted: set[Key] = set()
        self._closed = False
        self._soiled: dict[int, Worker] = {}

    # -- the worker

    def attach(self, worker: Worker, generation: int) -> None:
        assert self.worker is None
        self.worker = worker
        self.generation = generation
        for slot in self.slots:
            slot.sent = ()
        worker.send({"op": "log", "bytes": self.journal.segment.capacity}, (self.journal.segment.fd,))

    def detach(self, *, dead: bool) -> None:
        """The worker is gone. What it was writing is nothing; what it had sealed stays. ``dead``: its process too."""
        worker, self.worker = self.worker, None
        self._reserved = False
        self._reservation += 1
        granted = self.table.granted
        if granted is not None:
            self.table.clear(granted)
            if not dead and worker is not None:
                self._soiled[granted] = worker

    def died(self, worker: Worker) -> None:
        """The process of a worker that was detached before is gone."""
        self._soiled = {index: by for index, by in self._soiled.items() if by is not worker}

    def clean(self, index: int) -> None:
        """Takes other memory for a slot that a former worker may still write to."""
        if self._soiled.pop(index, None) is not None:
            slot = self.slots[index]
            for segment in slot.segments.values():
                self._services.memory.give_back(segment)
            slot.segments.clear()

    def is_soiled(self, index: int) -> bool:
        return index in self._soiled

    def reserve(self, *, shared_bytes: int, own_bytes: int) -> None:
        """All slots of this size, as far as they are not there yet. The worker hears of it by its grants.

        If there is no memory for all, two must do: then no key is kept for what replay certifies.
        """
        self._reserve({"shared": shared_bytes, "own": own_bytes}, len(self.slots))

    def _reserve(self, sizes: dict[str, int], count: int) -> None:
        self._reservation += 1
        number = self._reservation
        for index in range(len(self.slots)):
            self.clean(index)
        missing: list[tuple[SlotMemory, str]] = []
        self._use(count)
        for index in sorted(self._usable):
            slot = self.slots[index]
            for name, size in sizes.items():
                self._forget_small(index, name, size)
                if name not in slot.coming and not self._fits(slot, name, size):
                    missing.append((slot, name))
        what = f"rank {self.rank}: {_COUNTED.get(count, count)} slots of {sum(sizes.values())} bytes"
        try:
            taken = self._services.memory.take([sizes[name] for _, name in missing], what)
        except MemoryRefused as error:
            self._do_with_two(sizes, count, str(error))
            return

        def touch() -> None:
            for segment in taken:
                segment.touch()

        def touched(_: None, error: Exception | None) -> None:
            if error is not None or self._closed:
                for segment in taken:
                    self._services.memory.give_back(segment)
                if error is not None and number == self._reservation and not self._closed:
                    self._do_with_two(sizes, count, f"{what}: {error}")
                return
            for (slot, name), segment in zip(missing, taken, strict=True):
                old = slot.coming.pop(name, None)
                if old is not None:
                    self._services.memory.give_back(old)
                slot.coming[name] = segment
            if number == self._reservation:
                self._reserved = True
                self._show_slots()
                self._on_change()

        self._services.touching.run(touch, touched)

    def _use(self, count: int) -> None:
        """Which slots are written from now on: those under way, then the newest images, then whatever is there."""

        def worth(index: int) -> tuple[bool, Key, int]:
            busy = self.table.state(index) in (SlotState.GRANTED, SlotState.FILLED)
            return busy, self.table.key(index) or Key(-1, -1), len(self.slots[index].segments)

        ordered = sorted(range(len(self.slots)), key=worth, reverse=True)
        self._usable = frozenset(ordered[:count])

    def _do_with_two(self, sizes: dict[str, int], count: int, why: str) -> None:
        if count <= SLOTS_PER_RANK:
            self._refuse(why)
            return
        self._use(SLOTS_PER_RANK)
        for index in set(range(len(self.slots))) - self._usable:
            self._give_up(index)
        if not self._told_room:
            self._told_room = True
            self._services.tell("no_room", {"rank": self.rank, "reason": why})
        self._reserve(sizes, SLOTS_PER_RANK)

    def _give_up(self, index: int) -> None:
        """This slot is not needed, or there is no memory for it."""
        if self.table.state(index) in (SlotState.EMPTY, SlotState.SEALED) and not self.table.is_pinned(index):
            slot = self.slots[index]
            self.table_clear(index)
            for segment in (*slot.segments.values(), *slot.coming.values()):
                self._services.memory.give_back(segment)
            slot.segments.clear()
            slot.coming.clear()
            slot.sent = ()

    @property
    def has_room(self) -> bool:
        """There is memory for the keys that are kept beside the safe one."""
        return self._reserved and len(self._usable) >= SLOTS_WITH_ANCHORS

    def offer(self, reusable: Callable[[Key], bool]) -> None:
        """Grants a slot to the worker if one may be written."""
        if self.worker is None or not self._reserved:
            return
        index = self.table.grantable(reusable, self._usable)
        if index is None:
            return
        self.table_clear(index)
        self._swap(index)
        self._show(index)
        self.table.grant(index)
        self._number += 1
        self.worker.send({"op": "grant", "slot": index, "number": self._number})

    def seal(self, message: Message) -> None:
        """The worker says that its grant is written. Raises ValueError for what cannot be."""
        index = self._granted(message)
        slot = self.slots[index]
        for name in MEMORY_PARTS:
            length = message[f"{name}_length"]
            if length > slot.segments[name].capacity:
                raise ValueError(f"{name} part of {length} bytes in a slot of {slot.segments[name].capacity}")
        key = Key(message["step"], self.generation)
        if key.step <= self.last_step or self.table.find(key) is not None:
            self._services.log(f"rank {self.rank}: {key} was sealed again or out of order: not kept")
            self.table.clear(index)
            return
        self.last_step = key.step
        self.table.fill(index, key)
        self._unwanted.discard(key)
        self._to_hash.append(lambda: self._hash(index, key, message))
        self._hash_next()

    def discard(self, message: Message) -> None:
        self.table.clear(self._granted(message))

    def spoil(self, message: Message) -> None:
        """The worker has no image of this step, because it is not finite. Only the first matters."""
        if self._spoilt is None:
            said = Print(layout=message["layout"], digest=NOT_FINITE, finite=False)
            self._spoilt = Key(message["step"], self.generation), said

    def replay(self, message: Message) -> None:
        """What the worker has computed anew."""
        self.replayed = (*self.replayed[-MAX_REPLAYED + 1 :], replayed_from_plain(message))

    def withdraw(self, step: int, *, safe: Key | None) -> Copy | None:
        """The image of this step must not be used. Returns it as others are to know it, if they know it."""
        key = Key(step, self.generation)
        index = self.table.find(key)
        if index is None:
            return None
        copy = self.slots[index].copy
        if copy is not None:
            copy = replace(copy, finite=False)
        if key == safe and copy is not None:
            # The others rely on it and may have nothing older: it stays, marked as what it is.
            self.slots[index].copy = copy
        else:
            self.drop(key)
        return copy

    # -- images

    def copies(self) -> list[Copy]:
        return [copy for index, _ in self.table.sealed() if (copy := self.slots[index].copy) is not None]

    def prints(self, since: Key | None) -> dict[Key, Print]:
        """Of the images from this key on, as far as they have something in common with anybody's."""
        found = {}
        if self._spoilt is not None and self._spoilt[0].origin == self.generation:
            found[self._spoilt[0]] = self._spoilt[1]
        for index, key in self.table.sealed():
            said, copy = self.slots[index].print, self.slots[index].copy
            if said is not None and copy is not None and copy.shared.length and (since is None or key >= since):
                found[key] = said
        return found

    def verified(self, keys: Collection[Key]) -> None:
        """The group has compared these keys."""
        for slot in self.slots:
            if slot.copy is not None and slot.copy.key in keys:
                slot.copy = replace(slot.copy, trust="verified")

    @property
    def busy(self) -> bool:
        """Digests are being made."""
        return self._hashing or bool(self._to_hash)

    def slot_came_free(self) -> None:
        self._on_change()

    def unwanted(self, key: Key) -> bool:
        """It will not be sealed, though its digests are being made."""
        return key in self._unwanted

    def drop(self, key: Key) -> None:
        index = self.table.find(key)
        if index is None:
            return
        if self.table.state(index) is SlotState.FILLED:
            self._unwanted.add(key)
        else:
            self.table_clear(index)

    def drop_but(self, keep: Callable[[Key], bool]) -> None:
        """Drops every image that is not to be kept."""
        for index in range(len(self.table)):
            key = self.table.key(index)
            if key is not None and not keep(key):
                self.drop(key)

    def table_clear(self, index: int) -> None:
        """Nothing of the slot is readable any more."""
        slot = self.slots[index]
        for place in slot.places:
            self._services.contents.remove(place)
        slot.places.clear()
        slot.copy = slot.print = None
        self.table.clear(index)

    def put(self, index: int, copy: Copy) -> None:
        """The parts of a whole image are in the slot's segments and the log."""
        if self.table.state(index) is not SlotState.SEALED or self.table.key(index) != copy.key:
            self.table_clear(index)
            self.table.put(index, copy.key)
        self._publish(index, copy)
        self.slots[index].print = Print(layout="", digest=copy.shared.digest, finite=copy.finite)

    def begin(self, generation: int, safe: Key | None, topology: str) -> None:
        """A new generation: steps are counted from its base."""
        self.generation = generation
        self.topology = topology
        self.replayed, self._spoilt = (), None
        if safe is None:
            self.journal.forget()
        self.last_step = safe.step if safe is not None else -1

    def no_earlier(self, step: int) -> None:
        """No step before this one is kept any more, whatever the worker has under way: the others count on that."""
        self.last_step = max(self.last_step, step - 1)

    def close(self) -> None:
        self._closed = True
        for index, slot in enumerate(self.slots):
            if self.table.state(index) is not SlotState.FILLED:
                self.table_clear(index)
            for segment in (*slot.segments.values(), *slot.coming.values()):
                self._services.memory.give_back(segment)
            slot.segments.clear()
            slot.coming.clear()
        self.journal.close()

    # -- inside

    def _granted(self, message: Message) -> int:
        index = self.table.granted
        if index is None or index != message["slot"] or message["number"] != self._number:
            raise ValueError(f"slot {message['slot']} is not granted under number {message['number']}")
        return index

    def _refuse(self, why: str) -> None:
        self._services.tell("refused", {"rank": self.rank, "reason": why})
        if self.worker is not None:
            self.worker.send({"op": "off", "why": why})

    def _fits(self, slot: SlotMemory, name: str, size: int) -> bool:
        return name in slot.segments and slot.segments[name].capacity >= size

    def _forget_small(self, index: int, name: str, size: int) -> None:
        """Memory that is too small by now and holds nothing goes first."""
        slot = self.slots[index]
        if name in slot.coming and slot.coming[name].capacity < size:
            self._services.memory.give_back(slot.coming.pop(name))
        empty = self.table.state(index) is SlotState.EMPTY
        if empty and name in slot.segments and not self._fits(slot, name, size):
            self._services.memory.give_back(slot.segments.pop(name))

    def _swap(self, index: int) -> None:
        slot = self.slots[index]
        for name in list(slot.coming):
            old = slot.segments.pop(name, None)
            if old is not None:
                self._services.memory.give_back(old)
            slot.segments[name] = slot.coming.pop(name)

    def _show_slots(self) -> None:
        for index, slot in enumerate(self.slots):
            if self.table.state(index) is SlotState.EMPTY:
                self._swap(index)
            if not slot.coming and index in self._usable:
                self._show(index)

    def _show(self, index: int) -> None:
        slot = self.slots[index]
        shared, own = slot.segments["shared"], slot.segments["own"]
        if self.worker is None or slot.sent == (id(shared), id(own)):
            return
        slot.sent = (id(shared), id(own))
        message = {"op": "slot", "slot": index, "shared_bytes": shared.capacity, "own_bytes": own.capacity}
        self.worker.send(message, (shared.fd, own.fd))

    def _hash_next(self) -> None:
        if not self._hashing and self._to_hash:
            self._hashing = True
            self._to_hash.popleft()()

    def _hash(self, index: int, key: Key, message: Message) -> None:
        segments = dict(self.slots[index].segments)
        kept = [segment for segment in (*segments.values(), self.journal.segment) if segment.acquire()]

        def digests() -> dict[str, Part]:
            parts = {}
            for name in MEMORY_PARTS:
                with segments[name].view(0, message[f"{name}_length"]) as view:
                    parts[name] = Part(digest=digest_of(view), length=len(view))
            parts["log"] = self.journal.part(message["log_length"])
            return parts

        def done(parts: dict[str, Part] | None, error: Exception | None) -> None:
            self._hashing = False
            for segment in kept:
                segment.release()
            if parts is None or key in self._unwanted or self._closed:
                self._unwanted.discard(key)
                self.table.clear(index)
                if error is not None:
                    self._services.tell("problem", {"rank": self.rank, "reason": f"no digest of {key}: {error}"})
            else:
                self.table.seal(index)
                copy = self._copy(key, parts, message)
                self._publish(index, copy)
                finite = message["finite"] and message["all_finite"]
                self.slots[index].print = Print(layout=message["layout"], digest=copy.shared.digest, finite=finite)
                self._on_sealed(copy, message["blocking_ms"])
            self._hash_next()
            self._on_change()

        self._services.hashing.run(digests, done)

    def _copy(self, key: Key, parts: dict[str, Part], message: Message) -> Copy:
        return Copy(
            rank=self.rank,
            step=key.step,
            origin=key.origin,
            shared=parts["shared"],
            own=parts["own"],
            log=parts["log"],
            has=PART_NAMES,
            place="memory",
            finite=message["finite"],
            trust="unverified",
            topology=message["topology"] or self.topology,
        )

    def _publish(self, index: int, copy: Copy) -> None:
        slot = self.slots[index]
        for place in slot.places:
            self._services.contents.remove(place)
        slot.copy = copy
        contents = self._services.contents
        slot.places = [contents.add(copy.part(name), slot.segments[name], self.rank) for name in MEMORY_PARTS]
        slot.places.append(contents.add(copy.log, self.journal.segment, self.rank))
