"""What may be trusted: images compared between equals, and computing compared between them. Pure.

Two checks, both of what the ranks say of themselves; the hub only compares texts:

- *State.* The vault makes a digest of each image's shared part (parameters, optimizer state) anyway. Replicas have it
  bit for bit, so a key whose equals differ is corrupt, and never becomes safe. Hence the newest safe key is always one
  that was compared, where there is anybody to compare with.
- *Replay.* A wrong result that an all-reduce has spread is in everybody's state alike. So at an interval each rank
  computes one part of the model anew, on inputs that are made up from the step, and equals compare what came of it.

Who is equal to whom is learned, not declared: ranks of one layout whose digests agreed at the first key that was
compared, or at the restored one. Ranks that never agreed (a sharded optimizer, parameters of their own) are not
covered, which is told, and are never accused. So is a group of three or more that all differ from each other, and one
that differs in the same way when the same steps are made again: that is the program's doing. So it is where several
shards part from their replicas at once: what is wrong on one rank stays in its shard, while a norm that each replica
has summed up for itself, in another order, changes all of them.

So it is with replays: ranks that agreed on a part of the model are held to it, those that never did are not covered in
it (a module may hold values of its rank's own). And a rank that goes on differing in a part after its node was replaced
shows that it is the program: the part is not compared any more.

A replay says something of one part only, and of the state before it only that this part's computing was right until
then. So a state is certified by replay once *every* part has passed at or after it. Two keys older than the safe one
are kept for that: the *anchor*, certified, and the *candidate*, which becomes the anchor when the last part has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lmres.gemini.inventory import Key

Check = Literal["state", "replay", "once", "again", "cleared"]
"""``once``: a replay that did not come out the same twice. ``again``: the same steps were made again, and now agree.
``cleared``: a part that differed in an earlier generation has passed twice."""

NOT_FINITE = "not finite"
_MAX_KEYS = 16
_MAX_REPLAYS = 3
_CLEARED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """Of the shared part of one rank's image. ``layout``: only ranks with the same text may be equals; it names
    tensors, shards and the kind of machine. ``finite``: all of it. ``digest`` may be ``NOT_FINITE``: the parameters are
    not, and there is no image."""

    layout: str
    digest: str
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One of ``parts`` parts of the model, computed at the boundary after ``step``. ``what``: only equal texts are
    compared; it names module, shapes and the kind of machine; empty: it can not be computed here. ``steady``: it came
    out the same twice."""

    step: int
    part: int
    parts: int
    what: str
    digest: str
    steady: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Equals that differ. ``groups``: their ranks by what they have, the largest first. ``ranks``: with ``again`` those
    that were wrong, with ``once`` those that were not steady, with ``state`` those that are not finite while others
    are. ``trusted``: the newest key this casts no doubt on, None
    if there is none; ``from_start``: then the generation began at step 0."""

    check: Check
    key: Key
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...] = ()
    what: str = ""
    trusted: Key | None = None
    from_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Said once for each check: the ranks that have an equal, and those that have none, or why nobody has."""

    check: Literal["state", "replay"]
    ranks: tuple[int, ...]
    alone: tuple[int, ...]
    reason: str = ""


@dataclass(slots=True)
class Certifier:
    """Of one generation. ``base``: the restored key, ``certified`` if it was an anchor. ``holds_back``: what differs is
    not to become safe. ``questioned``: by step, what ranks had when they differed in an earlier generation;
    ``differed``: the same where a majority said who was wrong; what comes again, on another node too, is the program's.
    ``doubted``: the part of the model in which they did (``part_name``), ``doubted_at``: after which step.

    By part of the model, and kept from one generation to the next: ``agreed``, the ranks that are held to it;
    ``strangers``, those that never agreed with anybody; ``accused``, those that differed and the node they were on;
    ``unlike``: the program's own doing, not compared.
    """

    members: frozenset[str]
    origin: int
    base: Key | None = None
    certified: bool = False
    holds_back: bool = True
    questioned: dict[int, dict[int, str]] = field(default_factory=dict)
    differed: dict[int, dict[int, str]] = field(default_factory=dict)
    doubted: str = ""
    doubted_at: int = 0
    anchor: Key | None = None
    candidate: Key | None = None
    findings: list[Finding] = field(default_factory=list)
    told: list[Covered] = field(default_factory=list)
    verified: set[Key] = field(default_factory=set)
    differing: dict[Key, dict[int, str]] = field(default_factory=dict)
    agreed: dict[str, frozenset[int]] = field(default_factory=dict)
    strangers: dict[str, frozenset[int]] = field(default_factory=dict)
    accused: dict[str, dict[int, str]] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)
    _ranks: dict[str, frozenset[int]] = field(default_factory=dict)
    _rooms: dict[str, bool] = field(default_factory=dict)
    _prints: dict[Key, dict[int, Print]] = field(default_factory=dict)
    _classes: tuple[frozenset[int], ...] | None = None
    _replays: dict[int, dict[int, Replayed]] = field(default_factory=dict)
    _replayed_to: int = -1
    _passed: dict[int, int] = field(default_factory=dict)
    _parts: int = 0
    _replay_told: bool = False
    _state_found: bool = False
    _replay_found: bool = False
    _cleared: int = 0

    def __post_init__(self) -> None:
        if self.certified:
            self.anchor = self.base
        else:
            self.candidate = self.base

    # -- what vaults say

    def take(
        self,
        node_id: str,
        *,
        ranks: Iterable[int],
        room: bool,
        prints: Mapping[Key, Mapping[int, Print]],
        replays: Iterable[tuple[int, Replayed]],
    ) -> None:
        """``ranks``: of this vault. ``room``: it has memory for the two keys that are kept."""
        self._ranks[node_id] = frozenset(ranks)
        self._rooms[node_id] = room
        for key, found in prints.items():
            if key.origin == self.origin or key == self.base:
                self._prints.setdefault(key, {}).update(found)
        for key in sorted(self._prints)[:-_MAX_KEYS]:
            del self._prints[key]
        for rank, replayed in replays:
            if replayed.step > self._replayed_to:
                self._replays.setdefault(replayed.step, {}).setdefault(rank, replayed)
        for step in sorted(self._replays)[:-_MAX_KEYS]:
            del self._replays[step]

    @property
    def undecided(self) -> tuple[Key, dict[int, str]] | None:
        """The first key whose equals differed, if there is no majority to say who is wrong."""
        if not self.differing:
            return None
        key = min(self.differing)
        digests = self.differing[key]
        return None if 2 * len(_groups(digests)[0]) > len(digests) else (key, digests)

    @property
    def first_difference(self) -> tuple[Key, dict[int, str]] | None:
        """The first key whose equals differed, with what they had."""
        return min(self.differing.items(), default=None)

    @property
    def _everybody(self) -> frozenset[int]:
        return frozenset().union(*self._ranks.values())

    @property
    def _all_told(self) -> bool:
        return self.members <= self._ranks.keys()

    # -- state

    def allows(self, key: Key, safe: Key | None) -> bool:
        """Whether a key that is whole everywhere may become safe. ``safe``: the newest that is, or is about to."""
        if key in self.differing:
            return not self.holds_back
        if self._classes is None and self.base is not None:
            self._learn_base(self.base)
        prints = self._prints.get(key, {})
        if self._classes is None and prints:
            self._learn(prints, by_layout=True)
        equals = list(self._equals(prints))
        parted = [group for group in equals if len({prints[rank].digest for rank in group}) > 1]
        if len(parted) > 1 and not any(prints[rank].digest == NOT_FINITE for group in parted for rank in group):
            self._compare_no_more(f"at {key} whole replicas differ, not one shard")
            return True
        if not parted:
            self._part_by_layout(prints)
            alone = self._everybody - frozenset().union(*equals)
            if equals and not alone and all(prints[rank].finite for rank in self._everybody):
                self.verified = {*sorted(self.verified)[-_MAX_KEYS:], key}
            self._answer_question(key, {rank: prints[rank].digest for group in equals for rank in group})
            return True
        return self._differs(key, {rank: prints[rank].digest for rank in parted[0]}, safe)

    def _look_for_spoilt(self, safe: Key | None) -> None:
        """A bit flipped in an exponent: one rank has no image to show, since it is not finite, and its equals have."""
        for key in sorted(key for key in self._prints if safe is None or key > safe):
            prints = self._prints[key]
            for group in self._equals(prints) if self._everybody <= prints.keys() else ():
                digests = {rank: prints[rank].digest for rank in group}
                if NOT_FINITE in digests.values() and len(set(digests.values())) > 1 and key not in self.differing:
                    self._differs(key, digests, safe)

    def _differs(self, key: Key, digests: dict[int, str], safe: Key | None) -> bool:
        groups = _groups(digests)
        every_one = len(groups) > 2 and all(len(group) == 1 for group in groups) and NOT_FINITE not in digests.values()
        if every_one or digests in (self.questioned.get(key.step), self.differed.get(key.step)):
            why = "all differ from each other" if every_one else "they differ in the same way when it is made again"
            self._compare_no_more(f"at {key} {why}")
            return True
        self.differing[key] = digests
        if not self._state_found:
            self._state_found = True
            spoilt = tuple(sorted(rank for rank in digests if digests[rank] == NOT_FINITE))
            self.findings.append(Finding(check="state", key=key, groups=groups, ranks=spoilt, trusted=safe))
        return not self.holds_back

    def _compare_no_more(self, reason: str) -> None:
        """It is the program's doing."""
        self._classes = ()
        self.told.append(Covered(check="state", ranks=(), alone=tuple(sorted(self._everybody)), reason=reason))

    def _learn_base(self, base: Key) -> None:
        prints = self._prints.get(base, {})
        self._learn(prints, by_layout=False)
        covered = frozenset().union(*(self._classes or ()))
        if covered == self._everybody and all(said.finite for said in prints.values()):
            self.verified.add(base)

    def _learn(self, prints: Mapping[int, Print], *, by_layout: bool) -> None:
        found: dict[tuple[str, str], set[int]] = {}
        for rank, said in prints.items():
            found.setdefault((said.layout if by_layout else "", said.digest), set()).add(rank)
        self._classes = tuple(frozenset(ranks) for ranks in found.values() if len(ranks) > 1)
        covered = frozenset().union(*self._classes)
        alone = tuple(sorted(self._everybody - covered))
        self.told.append(Covered(check="state", ranks=tuple(sorted(covered)), alone=alone))

    def _equals(self, prints: Mapping[int, Print]) -> Iterator[list[int]]:
        """Ranks that must have the same now."""
        for known in self._classes or ():
            by_layout: dict[str, list[int]] = {}
            for rank in sorted(known & prints.keys()):
                by_layout.setdefault(prints[rank].layout, []).append(rank)
            yield from (ranks for ranks in by_layout.values() if len(ranks) > 1)

    def _part_by_layout(self, prints: Mapping[int, Print]) -> None:
        """Ranks that no longer have the same tensors are no equals any more, not for a replay either."""
        parted: list[frozenset[int]] = []
        for known in self._classes or ():
            if not known <= prints.keys():
                parted.append(known)  # their layouts are not known yet
                continue
            by_layout: dict[str, set[int]] = {}
            for rank in sorted(known):
                by_layout.setdefault(prints[rank].layout, set()).add(rank)
            parted += [frozenset(ranks) for ranks in by_layout.values() if len(ranks) > 1]
        before, after = (frozenset().union(*classes) for classes in (self._classes or (), parted))
        self._classes = tuple(parted) if self._classes is not None else None
        if before != after:
            alone = tuple(sorted(self._everybody - after))
            reason = "these ranks hold other tensors than they did"
            self.told.append(Covered(check="state", ranks=tuple(sorted(after)), alone=alone, reason=reason))

    def _answer_question(self, key: Key, digests: Mapping[int, str]) -> None:
        """The same steps were made again: of those who differed then, who had what all have now?"""
        then = self.questioned.pop(key.step, None)
        if then is None or not then.keys() <= digests.keys():
            return
        wrong = tuple(sorted(rank for rank in then if then[rank] != digests[rank]))
        if wrong and len(wrong) < len(then):
            self.findings.append(Finding(check="again", key=key, groups=_groups(then), ranks=wrong, trusted=key))

    # -- replay

    def _compare_replays(self, safe: Key) -> None:
        """Up to the step to which states are known to be equal: else a flipped parameter would be taken for wrong
        computing."""
        for step in sorted(self._replays):
            said = self._replays[step]
            whole = self._all_told and self._everybody <= said.keys()
            if step > safe.step or (not whole and len(self._replays) <= _MAX_REPLAYS):
                return  # who has not told may yet
            del self._replays[step]
            self._replayed_to = step
            self._compare_replay(step, said)

    def _compare_replay(self, step: int, said: Mapping[int, Replayed]) -> None:
        """Only ranks whose states are equal are compared. A part that nobody can compute passes."""
        able = frozenset(rank for rank in said if said[rank].what and part_name(said[rank].what) not in self.unlike)
        by_what: dict[tuple[int, str], list[int]] = {}
        for number, known in enumerate(self._classes or ()):
            for rank in sorted(known & able):
                by_what.setdefault((number, said[rank].what), []).append(rank)
        equals = [ranks for ranks in by_what.values() if len(ranks) > 1]
        covered = frozenset(rank for ranks in equals for rank in ranks)
        if not self._replay_told and able:
            self._replay_told = True
            alone = tuple(sorted(self._everybody - covered))
            self.told.append(Covered(check="replay", ranks=tuple(sorted(covered)), alone=alone))
        key = Key(step, self.origin)
        well = covered == able
        for ranks in equals:
            unsteady = tuple(rank for rank in ranks if not said[rank].steady)
            digests = {rank: said[rank].digest for rank in ranks if said[rank].steady}
            groups = _groups(self._held_to(part_name(said[ranks[0]].what), digests, step))
            if unsteady:
                well = False
                self.findings.append(
                    Finding(check="once", key=key, groups=groups, ranks=unsteady, what=said[ranks[0]].what)
                )
            if len(groups) > 1:
                well = False
                self._replay_differs(key, groups, said[ranks[0]])
            elif len(set(digests.values())) > 1:
                well = False  # in a part in which they never agreed
        if well:
            self._pass(step, next(iter(said.values())))

    def _held_to(self, part: str, digests: Mapping[int, str], step: int) -> dict[int, str]:
        """Of what ranks have computed: that of those who once agreed on this part. It is learned when a rank is first
        compared in it; the shards of one layer are compared each with its own replicas."""
        known = self.agreed.get(part, frozenset())
        strangers = self.strangers.get(part, frozenset())
        new = digests.keys() - known - strangers
        if new:
            alike = frozenset(r for group in _groups(digests) if len(set(group) - strangers) > 1 for r in group)
            never = new - alike
            self.agreed[part] = known = known | (new & alike)
            if never:
                self.strangers[part] = strangers | never
                self._say_unlike(part, tuple(sorted(never)), f"at step {step}, from the first time on")
        return {rank: digest for rank, digest in digests.items() if rank in known}

    def _say_unlike(self, part: str, ranks: tuple[int, ...], when: str) -> None:
        reason = f"{part}: these ranks do not compute the same, {when}: taken for the program's doing, not compared"
        covered = tuple(sorted(self.agreed.get(part, frozenset()) - frozenset(ranks)))
        self.told.append(Covered(check="replay", ranks=covered, alone=ranks, reason=reason))

    def _is_programs_doing(self, part: str, groups: tuple[tuple[int, ...], ...], step: int) -> bool:
        """All differ, or one goes on to differ on another node."""
        everybody = sum(map(len, groups))
        every_one = everybody > 2 and all(len(group) == 1 for group in groups)
        wrong = [rank for group in groups[1:] for rank in group] if 2 * len(groups[0]) > everybody else []
        nodes = {rank: node for node, ranks in self._ranks.items() for rank in ranks}
        before = self.accused.setdefault(part, {})
        again = [rank for rank in wrong if rank in before and before[rank] != nodes.get(rank, "")]
        before.update({rank: nodes.get(rank, "") for rank in wrong})
        if not every_one and not again:
            return False
        self.unlike.add(part)
        when = f"at step {step}, all of them" if every_one else f"at step {step}, on another node than before"
        self._say_unlike(part, tuple(again) or tuple(sorted(r for group in groups for r in group)), when)
        return True

    def _replay_differs(self, key: Key, groups: tuple[tuple[int, ...], ...], one: Replayed) -> None:
        if self._replay_found or self._is_programs_doing(part_name(one.what), groups, key.step):
            return
        self._replay_found = True
        trusted = max((k for k in self.kept if self._passed.get(one.part, -1) >= k.step), default=None)
        if trusted is None and self.certified:
            trusted = self.anchor
        self.findings.append(
            Finding(
                check="replay",
                key=key,
                groups=groups,
                what=one.what,
                trusted=trusted,
                from_start=self.base is None,
            )
        )

    def _pass(self, step: int, one: Replayed) -> None:
        if self.doubted and part_name(one.what) == self.doubted and step >= self.doubted_at:
            self._cleared += 1
            if self._cleared == _CLEARED:
                key = Key(step, self.origin)
                self.findings.append(Finding(check="cleared", key=key, groups=(), what=one.what))
        if one.parts != self._parts:
            self._passed, self._parts = {}, one.parts
        self._passed[one.part] = step
        candidate = self.candidate
        if candidate is None or self._replay_found:
            return
        if all(self._passed.get(part, -1) >= candidate.step for part in range(self._parts)):
            self.anchor, self.candidate = candidate, None

    @property
    def _has_room(self) -> bool:
        return all(self._rooms.get(member, False) for member in self.members)

    @property
    def kept(self) -> tuple[Key, ...]:
        """Older than the safe one, and yet not to be written over."""
        if not self._has_room:
            return ()
        return tuple(sorted(key for key in (self.anchor, self.candidate) if key is not None))

    def advanced(self, safe: Key | None) -> None:
        """After each report. ``safe`` is whole everywhere now, so it may be named."""
        self._look_for_spoilt(safe)
        if not self._has_room:
            # Whoever has no room has written over them by now, or may.
            if self.candidate != safe:
                self.candidate = None
            if self.anchor != safe:
                self.anchor = None
        elif self.candidate is None and safe is not None and self._parts and safe not in self.differing:
            self.candidate = safe if self.anchor is None or safe > self.anchor else None
        if safe is not None and not self._state_found:
            self._compare_replays(safe)
        for key in [key for key in self._prints if safe is not None and key < safe and key != self.base]:
            del self._prints[key]


def part_name(what: str) -> str:
    """``what`` of a replay, without what it must agree in only to be compared."""
    return what.partition("|")[0]


def _groups(values: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """Ranks by value: the largest group first, then the one with the lowest rank."""
    found: dict[str, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks)))
