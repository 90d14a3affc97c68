"""Copies of other vaults' images, held here.

Rules:

1. An image is pulled part by part, and only parts that are not in this vault under any name. What a local rank is about
   to seal itself (replicas of data-parallel training) is waited for, for a moment, rather than pulled.
2. A record becomes readable when all its parts are here; the one before stays until a newer key is safe. What both
   have in common lies in the older one, and passes to the newer when the older goes.
3. A rank's copies take two buffers in turn, and two more where keys are kept; a further manifest waits until the hub's
   verdict frees one.
4. No memory within the limit: the owner is told, with the numbers, and counts this vault out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lmres.errors import DigestMismatch, VaultError
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.journal import Journal
from lmres.gemini.edge.memory import MemoryRefused, Place, Segment
from lmres.gemini.edge.ranks import MEMORY_PARTS
from lmres.gemini.edge.services import Services
from lmres.gemini.edge.transfer import Puller
from lmres.gemini.inventory import PART_NAMES, Copy, Key, Part
from lmres.gemini.session import Assignment, Message, copy_from_plain
from lmres.gemini.watermark import Verdict

_MAX_RECORDS = 2
_MAX_WITH_ANCHORS = 4
_WAIT_LOCAL_S = 1.0
_PULL_S = 600.0


@dataclass(slots=True, eq=False)
class _Record:
    """A whole image held for another vault. Parts without a segment here lie in other images of this vault."""

    copy: Copy
    segments: dict[str, Segment] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Offer:
    """A manifest that came, and to whom the answer goes."""

    copy: Copy
    channel: Channel
    address: str
    port: int
    generation: int
    since_s: float


class _Held:
    """What is held of one foreign rank."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.records: list[_Record] = []
        self.offer: _Offer | None = None
        self.pulling = False
        self.alike = True  # its shared part turns up in local ranks too, as far as is known


class Replicas:
    """``local_passed``: True once no local rank can still seal this step."""

    def __init__(
        self, services: Services, *, local_passed: Callable[[int], bool], on_change: Callable[[], None]
    ) -> None:
        self._services = services
        self._local_passed = local_passed
        self._on_change = on_change
        self._held: dict[int, _Held] = {}
        self._pullers: dict[tuple[str, int], Puller] = {}
        self._in_flight: set[str] = set()
        self._generation = 0
        self._verdict = Verdict()
        self._closed = False
        self.has_room = True
        """There has been memory for the keys that are kept beside the safe one, in this generation."""
        self.pulled_bytes = 0

    # -- what the owners and the agent say

    def manifest(self, channel: Channel, message: Message) -> None:
        """An owner tells what it has sealed. Raises RecordError."""
        copy = copy_from_plain(message["copy"])
        generation = message["generation"]
        offer = _Offer(
            copy=copy,
            channel=channel,
            address=message["parts_address"],
            port=message["parts_port"],
            generation=generation,
            since_s=self._services.loop.attended_s,
        )
        if generation < self._generation:
            self._answer_not(offer, f"generation {generation} is over here", final=True)
            return
        try:
            held = self._held.get(copy.rank)
            if held is None:
                held = self._held[copy.rank] = _Held(Journal(self._services.memory))
        except MemoryRefused as error:
            self._answer_not(offer, str(error), full=True)
            return
        if not copy.finite:
            self._mark(held, copy)
        if held.offer is not None and held.offer.copy.key > copy.key:
            return
        held.offer = offer
        self._advance_rank(copy.rank)

    @staticmethod
    def _mark(held: _Held, copy: Copy) -> None:
        """The owner takes this image back, or says that it is not finite."""
        for record in held.records:
            if record.copy.key == copy.key:
                record.copy = replace(record.copy, finite=False)

    def assign(self, assignment: Assignment) -> None:
        if assignment.generation != self._generation:
            self._generation = assignment.generation
            self._verdict = Verdict()
            self.has_room = True
            for puller in self._pullers.values():
                puller.close()  # what is still being pulled is of no more use
            self._pullers.clear()
            for rank in list(self._held):
                held = self._held[rank]
                if held.offer is not None and held.offer.generation < self._generation:
                    held.offer = None
        self._advance_all()

    def advance(self, verdict: Verdict) -> None:
        """The hub has said more: older copies go, what waited for their buffers begins."""
        if verdict is not self._verdict:
            self._verdict = verdict
            for held in self._held.values():
                self._drop_reusable(held)
        self._advance_all()

    def content_came(self) -> None:
        """Something was sealed here: a part that was waited for may be there."""
        self._advance_all()

    def drop_but(self, keep: Callable[[Key], bool]) -> None:
        for rank in list(self._held):
            held = self._held[rank]
            for record in [record for record in held.records if not keep(record.copy.key)]:
                self._drop(held, record)
            if held.pulling:
                continue
            if held.records:
                held.journal.rewind(max(record.copy.log.length for record in held.records))
            elif held.offer is not None:
                held.journal.forget()
            else:
                self._held.pop(rank)
                held.journal.close()

    # -- what is here

    def copies(self) -> list[Copy]:
        found = []
        for held in self._held.values():
            for record in held.records:
                copy = record.copy
                has = tuple(name for name in PART_NAMES if self._services.contents.has(copy.part(name)))
                found.append(replace(copy, has=has))
        return found

    def status(self) -> list[dict[str, Any]]:
        return [
            {"rank": copy.rank, "step": copy.step, "origin": copy.origin, "has": list(copy.has)}
            for copy in self.copies()
        ]

    def close(self) -> None:
        self._closed = True
        for puller in self._pullers.values():
            puller.close()

    # -- pulling

    def _advance_all(self) -> None:
        for rank in list(self._held):
            self._advance_rank(rank)

    def _advance_rank(self, rank: int) -> None:
        """Begins to pull what was offered, if nothing has to be waited for."""
        held = self._held.get(rank)
        if held is None or held.offer is None or held.pulling or self._closed:
            return
        offer = held.offer
        copy = offer.copy
        if offer.channel.closed or offer.generation < self._generation:
            held.offer = None
            return
        if offer.generation > self._generation:
            return  # this vault hears of that generation in a moment
        if any(self._same(record.copy, copy) for record in held.records):
            held.offer = None
            self._answer_held(offer)
            return
        self._drop_reusable(held)
        if len(held.records) >= self._most_records or self._may_come(held, offer):
            return
        lacking = [name for name in MEMORY_PARTS if not self._services.contents.has(copy.part(name))]
        digests = {copy.part(name).digest for name in lacking}
        if digests & self._in_flight:
            return
        held.offer = None
        held.pulling = True
        self._in_flight |= digests
        record = _Record(copy)
        self._services.pulling.run(
            partial(self._pull, held, self._puller(offer), record, lacking),
            partial(self._pulled, held, offer, record, digests),
        )

    @property
    def _most_records(self) -> int:
        return _MAX_WITH_ANCHORS if self._services.options.anchors and self.has_room else _MAX_RECORDS

    def verified(self, keys: Collection[Key]) -> None:
        """The group has compared these keys."""
        for held in self._held.values():
            for record in held.records:
                if record.copy.key in keys:
                    record.copy = replace(record.copy, trust="verified")

    def _may_come(self, held: _Held, offer: _Offer) -> bool:
        """The shared part may be sealed here any moment."""
        if self._services.contents.has(offer.copy.shared):
            return False
        left_s = offer.since_s + _WAIT_LOCAL_S - self._services.loop.attended_s
        if not held.alike or left_s <= 0 or self._local_passed(offer.copy.step):
            return False
        self._services.loop.after(left_s + 0.01, self._advance_all)
        return True

    def _pull(self, held: _Held, puller: Puller, record: _Record, lacking: list[str]) -> int:
        """In a thread: brings the parts that are not here. Returns the bytes that came over the network."""
        copy = record.copy
        received = 0
        for name in lacking:
            part = copy.part(name)
            segment = self._services.memory.take_touched(part.length, f"a copy of the {name} part of rank {copy.rank}")
            record.segments[name] = segment
            if part.length:
                with segment.view(0, part.length) as view:
                    received += puller.pull(part.digest, part.length, view, timeout_s=_PULL_S).received
        return received + self._pull_log(held.journal, puller, copy)

    @staticmethod
    def _pull_log(journal: Journal, puller: Puller, copy: Copy) -> int:
        """Only what is new, if what is here is the beginning of it."""
        part = copy.log
        if part.length > journal.segment.capacity:
            raise VaultError(f"a log of {part.length} bytes, at most {journal.segment.capacity} can be held")
        if journal.state_at(part) is not None or not part.length:
            journal.part(part.length)
            return 0
        have, state = journal.longest(part.length)
        with journal.segment.view(0, part.length) as view:
            try:
                pulled = puller.pull_tail(part.digest, part.length, view, have=have, state=state, timeout_s=_PULL_S)
            except DigestMismatch:
                if not have:
                    raise
                pulled = puller.pull(part.digest, part.length, view, timeout_s=_PULL_S)
        journal.adopt(part.length, pulled.state)
        return pulled.received

    def _puller(self, offer: _Offer) -> Puller:
        options = self._services.options
        where = (offer.address, offer.port)
        if where not in self._pullers:
            self._pullers[where] = Puller(*where, run_id=options.run_id, node_id=options.node_id)
        return self._pullers[where]

    def _pulled(
        self,
        held: _Held,
        offer: _Offer,
        record: _Record,
        digests: set[str],
        received: int | None,
        error: Exception | None,
    ) -> None:
        held.pulling = False
        self._in_flight -= digests
        copy = record.copy
        stale = offer.generation != self._generation
        if received is None or stale:
            for segment in record.segments.values():
                self._services.memory.give_back(segment)
            if not stale:
                full = isinstance(error, MemoryRefused)
                if full and self._services.options.anchors and self.has_room:
                    self.has_room = full = False  # once what is kept has gone there may be
                    self._services.tell("no_room", {"rank": copy.rank, "reason": str(error)})
                self._answer_not(offer, str(error) if isinstance(error, VaultError) else repr(error), full=full)
        else:
            self.pulled_bytes += received
            contents = self._services.contents
            held.alike = contents.has(copy.shared)  # not counting what was just pulled
            record.places = [contents.add(copy.part(name), seg, copy.rank) for name, seg in record.segments.items()]
            record.places.append(contents.add(copy.log, held.journal.segment, copy.rank))
            held.records.append(record)
            # A part that was found in another image may have been written over meanwhile.
            if all(contents.has(part) for _, part in copy.parts()):
                self._answer_held(offer)
            else:
                self._drop(held, record)
                self._answer_not(offer, "a part went away while the others were pulled")
        self._drop_reusable(held)
        self._advance_all()
        self._on_change()

    def _drop_reusable(self, held: _Held) -> None:
        """Copies go once they can never be needed: if they are of a key before the safe one, the group has a newer."""
        for record in list(held.records):
            if self._verdict.reusable(record.copy.key):
                self._drop(held, record)

    def _drop(self, held: _Held, record: _Record) -> None:
        """A part of it that another image was found to have too, and so was not pulled again, is left to that one."""
        held.records.remove(record)
        contents, free = self._services.contents, []
        for name, segment in record.segments.items():
            heir = self._heir(record.copy.part(name))
            if heir is None:
                free.append(segment)
                continue
            other, its_name = heir
            other.segments[its_name] = segment
            other.places.append(contents.add(other.copy.part(its_name), segment, other.copy.rank))
        for place in record.places:
            contents.remove(place)
        for segment in free:
            self._services.memory.spare(segment)

    def _heir(self, part: Part) -> tuple[_Record, str] | None:
        """An image that has this part, and no memory of its own for it."""
        for held in self._held.values():
            for record in held.records:
                for name in MEMORY_PARTS:
                    if record.copy.part(name) == part and name not in record.segments:
                        return record, name
        return None

    @staticmethod
    def _same(one: Copy, other: Copy) -> bool:
        return one.key == other.key and all(one.part(name) == other.part(name) for name in PART_NAMES)

    # -- answers

    @staticmethod
    def _answer_held(offer: _Offer) -> None:
        copy = offer.copy
        offer.channel.send({"op": "held", "rank": copy.rank, "step": copy.step, "origin": copy.origin})

    @staticmethod
    def _answer_not(offer: _Offer, why: str, *, final: bool = False, full: bool = False) -> None:
        copy = offer.copy
        offer.channel.send(
            {
                "op": "not_held",
                "rank": copy.rank,
                "step": copy.step,
                "origin": copy.origin,
                "why": why,
                "final": final,
                "full": full,
            }
        )
