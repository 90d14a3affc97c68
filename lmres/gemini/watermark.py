"""The hub: which key is safe, which can never be, and what follows for slots and files.

One vault of the group is the hub. Every vault tells it what it has; it tells every vault what that means for the group.
Reports add up (sets grow, floors rise) and a verdict says everything anew, so both may be late, repeated or overtake
each other.

- A key is *safe* when every vault has it whole: sealed for all its ranks, and held by every vault that must hold
  copies. The newest safe key never goes back.
- A key is *dead* when some vault will never have it. That is final.
- A buffer, of a local rank or of a replica held for another vault, may be written again only if ``Verdict.reusable``.
  Hence the newest safe key is whole in all vaults at all times, and so is the next one while it becomes safe. For this
  a replica needs two buffers just as a local rank does: whoever drops the replica of the safe key once a newer one is
  whole *here* has bet that the newer one becomes whole everywhere.

Vaults have one buffer to spare, so those that fill it at different steps get nowhere: all these keys are dead, and if
word of that comes at different steps again, so are the next ones. Training faster than the talk between vaults would
never be protected. Against this there is the *gate*: a step far enough ahead for everybody to hear of it in time; no
earlier one is captured. How far is learned: twice as far after each failure, nearer again after successes, and no gate
at all while captures just succeed.

Where ranks are equal to each other, a key is compared before it becomes safe (``certify``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lmres.gemini.certify import Certifier, Print, Replayed
from lmres.gemini.inventory import Key

MAX_MARGIN = 4096
_FREE_MISSES = 2
"""A vault that skips one capture makes two keys die: the one it missed, and the one that the others then miss."""
_SUCCESSES = 8
"""So many safe keys in a row before the gate is tried nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one vault has, in this generation.

    ``whole``: keys sealed for all its ranks and held by all vaults that must hold copies. ``seen``: keys of which it
    has anything sealed. ``floor``: of this generation's keys with a step up to this one, none that is not in ``whole``
    will ever be (a key that still waits for its copies keeps the floor below it). ``ended``: no further key will come.
    ``durable``: keys whose files for all its ranks are complete. ``prints``: of the images of its ``ranks`` that are
    not older than the safe key. ``replays``: the newest of each rank. ``room``: for keys that are kept beside.
    """

    node_id: str
    whole: frozenset[Key] = frozenset()
    seen: frozenset[Key] = frozenset()
    floor: int = -1
    ended: bool = False
    durable: frozenset[Key] = frozenset()
    ranks: tuple[int, ...] = ()
    prints: Mapping[Key, Mapping[int, Print]] = field(default_factory=dict)
    replays: tuple[tuple[int, Replayed], ...] = ()
    room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What every vault may rely on. ``number`` rises with news: the highest one that has come counts.

    ``dead`` and ``dead_up_to`` (a step): keys newer than the safe one that will never be. ``gate``: no earlier step is
    captured. ``persist``: keys to be written to files, kept in their buffers until that is done; the last two, since a
    vault may be two behind. ``delete``: keys whose files are no longer needed. ``kept``: older than the safe one, and
    not to be written over; ``anchor``: the one of them that is certified by replay. ``verified``: of the safe, the kept
    and the persisted ones, those whose equals agree.
    """

    number: int = 0
    safe: Key | None = None
    dead: tuple[Key, ...] = ()
    dead_up_to: int = -1
    gate: int = 0
    persist: tuple[Key, ...] = ()
    delete: tuple[Key, ...] = ()
    kept: tuple[Key, ...] = ()
    anchor: Key | None = None
    verified: tuple[Key, ...] = ()

    def is_dead(self, key: Key) -> bool:
        newer = self.safe is None or key > self.safe
        return newer and (key.step <= self.dead_up_to or key in self.dead)

    def reusable(self, held: Key | None) -> bool:
        """Whether a buffer that holds this key may be written again: it is empty, dead, or older than the safe one and
        not kept."""
        old = self.safe is not None and held is not None and held < self.safe and held not in self.kept
        return held is None or old or self.is_dead(held)


@dataclass(slots=True)
class Hub:
    """One generation's hub. ``safe``: the key that was restored, None at the very start.

    ``durable_interval``: steps between two durable keys, None for none; ``keep``: durable keys that stay.
    ``certifier``: compares; None: nobody does.
    """

    members: frozenset[str]
    safe: Key | None = None
    durable_interval: int | None = None
    keep: int = 2
    certifier: Certifier | None = None
    _whole: dict[str, set[Key]] = field(default_factory=dict)
    _floor: dict[str, int] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _durable: dict[str, set[Key]] = field(default_factory=dict)
    _seen: set[Key] = field(default_factory=set)
    _dead: set[Key] = field(default_factory=set)
    _persist: tuple[Key, ...] = ()
    _behind: int = -1
    _newest: int = -1
    _gate: int = 0
    _margin: int = 0
    _misses: int = 0
    _successes: int = 0
    _last: Verdict = Verdict()

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("hub: a group has at least one vault")
        if self.durable_interval is not None and self.durable_interval < 1:
            raise ValueError(f"hub: durable interval must be at least 1, found {self.durable_interval}")
        if self.keep < 1:
            raise ValueError(f"hub: at least one durable key must be kept, found {self.keep}")
        if self.safe is not None:
            self._newest = self.safe.step

    def report(self, report: Report) -> Verdict:
        """Takes in what a vault has told. A report of a vault that is no member changes nothing."""
        if report.node_id in self.members:
            self._take(report)
            self._judge()
        return self.verdict()

    def verdict(self) -> Verdict:
        """Its number has risen if it says anything new."""
        now = Verdict(
            number=self._last.number,
            safe=self.safe,
            dead=tuple(sorted(self._dead)),
            dead_up_to=self._behind,
            gate=self._gate,
            persist=self._persist,
            delete=self._deletable(),
            kept=self._kept(),
            anchor=self._anchor(),
            verified=self._verified(),
        )
        if now != self._last:
            self._last = replace(now, number=now.number + 1)
        return self._last

    def _take(self, report: Report) -> None:
        node_id = report.node_id
        known = {k for k in report.whole | report.seen if self._is_open(k)}
        self._seen |= known
        self._whole.setdefault(node_id, set()).update(known & report.whole)
        self._floor[node_id] = max(self._floor.get(node_id, -1), report.floor)
        self._ended |= {node_id} if report.ended else set()
        self._durable.setdefault(node_id, set()).update(report.durable)
        self._newest = max([self._newest, report.floor, *(k.step for k in known)])
        if self.certifier is not None:
            self.certifier.take(
                node_id, ranks=report.ranks, room=report.room, prints=report.prints, replays=report.replays
            )

    def _is_open(self, key: Key) -> bool:
        passed = key in self._dead or key.step <= self._behind
        return not passed and (self.safe is None or key > self.safe)

    def _judge(self) -> None:
        whole = set.intersection(*(self._whole.get(m, set()) for m in self.members))
        # All of them, in order: what differs in one is not made good by a later one.
        good = self.safe
        for key in sorted(k for k in whole if self._is_open(k)):
            good = key if self._is_sound(key, good) else good
        if good is not None and good != self.safe:
            self._advance(good)
        if self.certifier is not None:
            self.certifier.advanced(self.safe)
        lost = {k for k in self._seen if any(self._never(m, k) for m in self.members)}
        if lost:
            self._bury(lost)
        # What all have behind them and is not safe by now will never be.
        self._behind = max(self._behind, min(self._floor.get(m, -1) for m in self.members))
        self._dead = {k for k in self._dead if k.step > self._behind}

    def _is_sound(self, key: Key, good: Key | None) -> bool:
        """Whether its equals agree, as far as it has any; if not it is dead. ``good``: the newest before it."""
        if self.certifier is None or self.certifier.allows(key, good):
            return True
        self._seen.discard(key)
        self._dead.add(key)
        return False

    def _kept(self) -> tuple[Key, ...]:
        kept = self.certifier.kept if self.certifier is not None else ()
        return tuple(k for k in kept if self.safe is not None and k <= self.safe)

    def _anchor(self) -> Key | None:
        return self.certifier.anchor if self.certifier is not None and self.certifier.anchor in self._kept() else None

    def _verified(self) -> tuple[Key, ...]:
        if self.certifier is None:
            return ()
        named = {*self._kept(), *self._persist} | ({self.safe} if self.safe is not None else set())
        return tuple(sorted(named & self.certifier.verified))

    def _never(self, member: str, key: Key) -> bool:
        passed = member in self._ended or key.step <= self._floor.get(member, -1)
        return passed and key not in self._whole.get(member, ())

    def _advance(self, key: Key) -> None:
        every, before = self.durable_interval, self.safe.step if self.safe is not None else 0
        if every is not None and key.step // every > before // every:
            self._persist = (*self._persist[-1:], key)
        self.safe = key
        for known in (self._seen, self._dead, *self._whole.values()):
            known.difference_update([k for k in known if k <= key])
        self._misses = 0
        self._successes += 1
        if self._successes >= _SUCCESSES:
            self._margin, self._successes = self._margin // 2, 0
        self._shut()

    def _bury(self, lost: set[Key]) -> None:
        self._seen -= lost
        self._dead |= lost
        for known in self._whole.values():
            known.difference_update(lost)
        if max(lost).step < self._gate:
            return  # captured before its vault had heard of the gate
        self._successes = 0
        self._misses += 1
        if self._margin or self._misses > _FREE_MISSES:
            self._margin = min(max(1, 2 * self._margin), MAX_MARGIN)
        self._shut()

    def _shut(self) -> None:
        if self._margin:
            self._gate = max(self._gate, self._newest + 1 + self._margin)

    def _deletable(self) -> tuple[Key, ...]:
        """Older than the newest ones that are durable everywhere."""
        everywhere = set.intersection(*(self._durable.get(m, set()) for m in self.members))
        kept = sorted(everywhere, reverse=True)[: self.keep]
        if len(kept) < self.keep:
            return ()
        anywhere = set().union(*self._durable.values())
        return tuple(sorted(k for k in anywhere if k < kept[-1]))
