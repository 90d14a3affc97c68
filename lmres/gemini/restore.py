"""Which image a new group goes on from: the newest one that every rank can get whole.

A pure function of what the live vaults say they hold. Parts are found by digest on whatever vault has them, for
whatever rank or key; but all ranks restore one key, so images of different steps or origins never meet. Excluded are
keys that are banned (they led to a failure before), not finite, doubted, or not compared yet and different between
equals. Images of a group of another shape do not fit, and nothing is guessed about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lmres.gemini.inventory import PART_NAMES, Copy, Doubt, Holdings, Key, Part, Trust

Source: TypeAlias = Literal["local", "replica", "peer", "durable"]
_FARTHEST: dict[Source, int] = {"local": 0, "replica": 1, "peer": 2, "durable": 3}
_WORDS: dict[Source, str] = {
    "local": "own memory",
    "replica": "live replicas",
    "peer": "copies on peers",
    "durable": "files",
}
_TOLD_KEYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``source`` per slot: the farthest that any part of its ranks comes from. ``reason`` goes on after "resumes at".

    ``local``: that node's own memory; ``replica``: the shared part from the live image of another rank; ``peer``: from
    a copy in another vault; ``durable``: at least one part is only in files.
    """

    step: int
    origin: int
    source: dict[int, Source]
    trust: Trust
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """``lost``: there is or was a state, and it can not be restored. Else the run begins at step 0.

    ``refused``: it can not, because it is of another kind of group.
    """

    reason: str
    lost: bool
    refused: bool = False


def choose(
    holdings: Iterable[Holdings] | Stock,
    *,
    slots: Mapping[int, str],
    local_world_size: int,
    topology: str,
    banned: frozenset[tuple[int, int]] = frozenset(),
    trusted: tuple[int, int] | None = None,
    doubts: tuple[Doubt, ...] = (),
) -> Choice | Nothing:
    """``holdings``: of the live vaults, one per node, all fresh. ``slots``: the node of each slot of the new group.

    ``trusted``: no newer key is restored; None: any may be. ``doubts``: of earlier generations.
    """
    stock = holdings if isinstance(holdings, Stock) else Stock.of(holdings)
    homes = {s * local_world_size + i: slots[s] for s in sorted(slots) for i in range(local_world_size)}
    refused: list[str] = []
    for key in sorted(stock.copies, reverse=True):
        copies = [c for c in stock.copies[key] if c.topology == topology]
        if not copies:
            continue
        why = _excluded(key, stock.copies[key], banned, trusted, doubts) or _differing(stock, key, topology)
        by_rank: dict[int, list[Copy]] = {}
        for c in copies:
            by_rank.setdefault(c.rank, []).append(c)
        found = {r: _best(stock, by_rank.get(r, []), home) for r, home in homes.items()} if not why else {}
        missing = {rank: found[rank].missing for rank in found if found[rank].missing}
        if not why and not missing:
            return _choice(key, found, slots, local_world_size, refused)
        refused.append(f"{_named(key)} {why or _told_missing(missing)}")
    return _nothing(stock, topology, refused)


def copies_of(holdings: Iterable[Holdings], key: tuple[int, int], ranks: Iterable[int]) -> tuple[Copy, ...]:
    """What the live vaults know of one key for some ranks: whoever prepares it learns the digests from these."""
    wanted = set(ranks)
    return tuple(c for h in holdings for c in h.copies if c.key == key and c.rank in wanted)


# -- stock ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """``memory``: for each part (digest and length), the nodes that have it and the ranks in whose images it is there.

    A run of thousands of nodes is decided on in one go, so ``of`` is kept cheap.
    """

    copies: dict[Key, list[Copy]] = field(default_factory=dict)
    memory: dict[tuple[str, int], tuple[set[str], set[int]]] = field(default_factory=dict)
    durable: set[tuple[str, int]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    ever: list[str] = field(default_factory=list)

    @staticmethod
    def of(holdings: Iterable[Holdings]) -> Stock:
        stock = Stock()
        for h in sorted(holdings, key=lambda h: h.node_id):
            if h.ever:
                stock.ever.append(h.node_id)
            if h.problem:
                stock.problems.append(f"{h.node_id}: {h.problem}")
            for copy in h.copies:
                stock.copies.setdefault(copy.key, []).append(copy)
                for part in copy.held():
                    content = part.digest, part.length
                    if copy.place == "durable":
                        stock.durable.add(content)
                        continue
                    if content not in stock.memory:
                        stock.memory[content] = set(), set()
                    nodes, ranks = stock.memory[content]
                    nodes.add(h.node_id)
                    ranks.add(copy.rank)
        return stock


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    source: Source = "local"
    missing: tuple[str, ...] = ()
    trust: Trust = "unverified"


def _best(stock: Stock, copies: list[Copy], home: str) -> _Found:
    """The nearest whole image among these of one rank. Vaults that disagree about its digests make several."""
    candidates = [_look(stock, copy, home) for copy in copies]
    if not candidates:
        return _Found(missing=PART_NAMES)
    return min(candidates, key=lambda f: (len(f.missing), _FARTHEST[f.source], f.trust != "verified"))


def _look(stock: Stock, copy: Copy, home: str) -> _Found:
    sources: list[Source] = ["local"]
    missing = []
    for name, part in copy.parts():
        content = part.digest, part.length
        holders, ranks = stock.memory.get(content, (None, None))
        if part.length == 0 or (holders is not None and home in holders):
            continue
        if ranks is not None:
            elsewhere = len(ranks) > 1 or copy.rank not in ranks
            sources.append("replica" if name == "shared" and elsewhere else "peer")
        elif content in stock.durable:
            sources.append("durable")
        else:
            missing.append(name)
    if sources.count("replica") and "durable" not in sources:
        sources = ["replica"]
    return _Found(source=max(sources, key=_FARTHEST.__getitem__), missing=tuple(missing), trust=copy.trust)


def _excluded(
    key: Key,
    copies: list[Copy],
    banned: frozenset[tuple[int, int]],
    trusted: tuple[int, int] | None,
    doubts: tuple[Doubt, ...],
) -> str:
    if (trusted is not None and key > trusted) or any(d.covers(key) for d in doubts):
        return "is newer than what is trusted"
    if key in banned:
        return "is banned, because it led to a failure before"
    if not all(c.finite for c in copies):
        return "holds values that are not finite"
    return ""


def _differing(stock: Stock, key: Key, topology: str) -> str:
    """A failure may come before the group has compared its newest images: ranks that were equal in a verified one, and
    differ now."""

    def shared(of: Key) -> dict[int, Part]:
        return {c.rank: c.shared for c in stock.copies[of] if c.topology == topology and c.place == "memory"}

    older = (k for k in stock.copies if k < key and any(c.trust == "verified" for c in stock.copies[k]))
    verified = max((k for k in older if shared(k)), default=None)
    if verified is None or any(c.trust == "verified" for c in stock.copies[key]):
        return ""
    now = shared(key)
    equals: dict[str, set[str]] = {}
    for rank, part in shared(verified).items():
        if part.length and rank in now:
            equals.setdefault(part.digest, set()).add(now[rank].digest)
    return "differs between ranks that were equal before" if any(len(d) > 1 for d in equals.values()) else ""


# -- words ------------------------------------------------------------------------------------------------------------


def _choice(
    key: Key, found: dict[int, _Found], slots: Mapping[int, str], local_world_size: int, refused: list[str]
) -> Choice:
    source = {
        s: max((found[s * local_world_size + i].source for i in range(local_world_size)), key=_FARTHEST.__getitem__)
        for s in sorted(slots)
    }
    by_source = {name: [s for s in source if source[s] == name] for name in _FARTHEST}
    origins = ", ".join(f"{_WORDS[n]}: slot{'s' * (len(s) > 1)} {_spans(s)}" for n, s in by_source.items() if s)
    newer = f"; {_some(refused)}" if refused else ""
    verified = all(f.trust == "verified" for f in found.values())
    return Choice(
        step=key.step,
        origin=key.origin,
        source=source,
        trust="verified" if verified else "unverified",
        reason=f"step {key.step} (from {origins}){newer}",
    )


def _nothing(stock: Stock, topology: str, refused: list[str]) -> Nothing:
    others = sorted({c.topology for copies in stock.copies.values() for c in copies if c.topology != topology})
    problems = f" ({_some(stock.problems)})" if stock.problems else ""
    if others and not refused:
        newest = max(c.key for copies in stock.copies.values() for c in copies)
        reason = f"the newest state that is held, {_named(newest)}, is of {_some(others)}; this group is of {topology}"
        return Nothing(reason=reason, lost=True, refused=True)
    if not stock.ever:
        reason = _some(refused) or "no state has been captured yet"
        return Nothing(reason=f"{reason}{problems}", lost=False)
    held = _some(refused) or f"there was one ({_some(stock.ever)} knew of it), no live vault holds any"
    return Nothing(reason=f"no state is left that all ranks could restore: {held}{problems}", lost=True)


def _named(key: Key) -> str:
    return f"step {key.step} captured in generation {key.origin}"


def _told_missing(missing: dict[int, tuple[str, ...]]) -> str:
    """Ranks that lack the same are told together."""
    lacks: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(missing):
        lacks.setdefault(missing[rank], []).append(rank)
    told = [
        f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)} ({', '.join(names) if names != PART_NAMES else 'everything'})"
        for names, ranks in lacks.items()
    ]
    return f"is not whole, nobody has: {_some(told)}"


def _spans(numbers: list[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][-1] == n - 1:
            spans[-1].append(n)
        else:
            spans.append([n])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _some(texts: list[str]) -> str:
    shown = "; ".join(texts[:_TOLD_KEYS])
    return f"{shown}; and {len(texts) - _TOLD_KEYS} more" if len(texts) > _TOLD_KEYS else shown
