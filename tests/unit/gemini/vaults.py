"""Vaults that follow the rules of ``lmres.gemini.watermark``, and a network that delivers when it is told.

Each vault has local ranks with two buffers each, and holds replicas for another vault, two buffers each as well; four
where keys are kept for what replay certifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmres.gemini.certify import Certifier, Print, Replayed
from lmres.gemini.inventory import Key
from lmres.gemini.watermark import Hub, Report, Verdict

GENERATION = 2
PARTS = 3
REPLAY_EVERY = 2


@dataclass
class Message:
    to: str
    kind: str
    body: Any
    due: int = 0


@dataclass
class Buffers:
    keys: list[Key | None]

    def put(self, key: Key, verdict: Verdict) -> bool:
        if key in self.keys:
            return True
        for i, held in enumerate(self.keys):
            if verdict.reusable(held):
                self.keys[i] = key
                return True
        return False


@dataclass
class Vault:
    name: str
    ranks: int
    peer: str | None
    send: Callable[[Message], None]
    verdict: Verdict
    interval: int = 1
    first_rank: int | None = None
    """Set where ranks are compared, and replay."""
    step: list[int] = field(default_factory=list)
    slots: list[Buffers] = field(default_factory=list)
    replicas: dict[tuple[str, int], Buffers] = field(default_factory=dict)
    held: set[tuple[int, Key]] = field(default_factory=set)
    waiting: dict[tuple[str, int, Key], None] = field(default_factory=dict)
    told: Report | None = None
    persisted: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        start = self.verdict.safe
        first = start.step if start is not None else 0
        self.step = [first] * self.ranks
        self.slots = [self._buffers(start) for _ in range(self.ranks)]
        self.held = {(r, start) for r in range(self.ranks)} if start is not None else set()

    def _buffers(self, start: Key | None = None) -> Buffers:
        return Buffers([start, None] if self.first_rank is None else [start, None, None, None])

    def advance(self, rank: int) -> None:
        """One optimizer step of a rank: captured or skipped."""
        self.step[rank] += 1
        step = self.step[rank]
        key = Key(step, GENERATION)
        if step % self.interval == 0 and step >= self.verdict.gate and self.slots[rank].put(key, self.verdict):
            self._offer(rank, key)
        self.report()

    def _offer(self, rank: int, key: Key) -> None:
        if self.peer is not None:
            self.send(Message(self.peer, "manifest", (self.name, rank, key)))

    def whole(self) -> set[Key]:
        sealed = set.intersection(*({k for k in s.keys if k is not None} for s in self.slots))
        return {k for k in sealed if self.peer is None or all((r, k) in self.held for r in range(self.ranks))}

    def report(self) -> None:
        seen = {k for s in self.slots for k in s.keys if k is not None}
        sealed = [k for k in seen if all(k in s.keys for s in self.slots)]
        whole = self.whole()
        pending = [k.step - 1 for k in sealed if k not in whole and not self.verdict.reusable(k)]
        floor = min([*self.step, *pending])
        body = Report(
            node_id=self.name,
            whole=frozenset(whole),
            seen=frozenset(seen),
            floor=floor,
            durable=frozenset(self.persisted),
            **self._compared(),
        )
        if body != self.told:
            self.told = body
            self.send(Message("hub", "report", body))

    def _compared(self) -> dict[str, Any]:
        if self.first_rank is None:
            return {}
        prints: dict[Key, dict[int, Print]] = {}
        replays = []
        for i, buffers in enumerate(self.slots):
            rank = self.first_rank + i
            for key in buffers.keys:
                if key is not None and (self.verdict.safe is None or key >= self.verdict.safe):
                    prints.setdefault(key, {})[rank] = Print(layout="l", digest=str(key))
            step = self.step[i] // REPLAY_EVERY * REPLAY_EVERY
            part = self.step[i] // REPLAY_EVERY % PARTS
            replays.append((rank, Replayed(step=step, part=part, parts=PARTS, what=f"part {part}", digest=str(step))))
        ranks = tuple(range(self.first_rank, self.first_rank + self.ranks))
        return {"ranks": ranks, "prints": prints, "replays": tuple(replays), "room": True}

    def take(self, message: Message) -> None:
        match message.kind:
            case "verdict":
                if message.body.number > self.verdict.number:
                    self._learn(message.body)
            case "manifest":
                self.waiting[message.body] = None
                self._hold()
            case "held":
                self.held.add(message.body)
                self.report()

    def _learn(self, verdict: Verdict) -> None:
        self.verdict = verdict
        for key in verdict.persist:
            if key not in self.persisted:
                assert key in self.whole(), f"{self.name} was told too late to persist {key}"
                self.persisted.append(key)
        self.held = {(r, k) for r, k in self.held if not verdict.reusable(k)}
        self._hold()
        self.report()

    def _hold(self) -> None:
        for owner, rank, key in list(self.waiting):
            buffers = self.replicas.setdefault((owner, rank), self._buffers())
            if self.verdict.reusable(key):
                del self.waiting[owner, rank, key]
            elif buffers.put(key, self.verdict):
                del self.waiting[owner, rank, key]
                self.send(Message(owner, "held", (rank, key)))


@dataclass
class Group:
    """``delay``: messages of how many ticks; used by ``tick`` only."""

    vaults: dict[str, Vault]
    hub: Hub
    bag: list[Message]
    now: int = 0
    safes: list[Key] = field(default_factory=list)
    anchors: list[Key] = field(default_factory=list)
    gone: set[Key] = field(default_factory=set)

    @staticmethod
    def of(*, count: int, ranks: int, replicated: bool, interval: int = 1, anchors: bool = False, **hub: Any) -> Group:
        names = [f"v{i}" for i in range(count)]
        bag: list[Message] = []
        start = hub.get("safe")
        vaults = {
            n: Vault(
                name=n,
                ranks=ranks,
                peer=names[(i + 1) % count] if replicated and count > 1 else None,
                send=bag.append,
                verdict=Verdict(safe=start),
                interval=interval,
                first_rank=i * ranks if anchors else None,
            )
            for i, n in enumerate(names)
        }
        for vault in vaults.values():
            if start is not None and vault.peer is not None:
                for rank in range(ranks):
                    vaults[vault.peer].replicas[vault.name, rank] = vault._buffers(start)
        made = Hub(members=frozenset(names), **hub)
        if anchors:
            made.certifier = Certifier(members=made.members, origin=GENERATION, base=start)
        return Group(vaults=vaults, hub=made, bag=bag)

    def may_step(self, name: str, rank: int) -> bool:
        """Ranks train together: nobody is more than a step ahead."""
        slowest = min(s for v in self.vaults.values() for s in v.step)
        return self.vaults[name].step[rank] <= slowest

    def deliver(self, message: Message) -> None:
        if message.to != "hub":
            self.vaults[message.to].take(message)
            return
        before = self.hub.verdict().number
        verdict = self.hub.report(message.body)
        if verdict.number == before:
            return
        if verdict.safe is not None and (not self.safes or self.safes[-1] != verdict.safe):
            self.safes.append(verdict.safe)
        if verdict.anchor is not None and verdict.anchor not in self.anchors:
            self.anchors.append(verdict.anchor)
        self.gone |= set(verdict.dead)
        for name in self.vaults:
            self.bag.append(Message(name, "verdict", verdict))

    def check(self) -> None:
        assert self.safes == sorted(set(self.safes)), "the safe key went back"
        assert not self.gone & set(self.safes), "a dead key was called safe"
        assert self.anchors == sorted(self.anchors), "the anchor went back"
        safe = self.hub.safe
        for key in {*self.hub.verdict().kept, *([safe] if safe is not None else ())}:
            self._check_whole(key)

    def _check_whole(self, key: Key) -> None:
        for vault in self.vaults.values():
            assert all(key in s.keys for s in vault.slots), f"{vault.name} no longer holds {key}"
            if vault.peer is not None:
                peer = self.vaults[vault.peer]
                for rank in range(vault.ranks):
                    assert key in peer.replicas[vault.name, rank].keys, f"{peer.name} dropped its copy of {key}"

    def settle(self) -> None:
        """Everything that is on its way arrives, in the order it was sent."""
        for _ in range(10_000):
            if not self.bag:
                return
            self.deliver(self.bag.pop(0))
            self.check()
        raise AssertionError("the vaults never stop talking")

    def run(self, *, ticks: int, delay: Callable[[Message], int]) -> None:
        """A step per tick; each message takes its time."""
        sent: list[Message] = []
        for self.now in range(ticks):
            for vault in self.vaults.values():
                for rank in range(vault.ranks):
                    vault.advance(rank)
            self._route(sent, delay)
            while due := [m for m in sent if m.due <= self.now]:
                for message in due:
                    sent.remove(message)
                    self.deliver(message)
                self._route(sent, delay)
            self.check()

    def _route(self, sent: list[Message], delay: Callable[[Message], int]) -> None:
        for message in self.bag:
            message.due = self.now + delay(message)
        sent += self.bag
        self.bag.clear()
