"""The vaults of a simulated run: which images are where. Played after the rules of ``lmres/gemini/README.md``.

The hub, its verdicts and the placement are the shipped ones. A vault belongs to a node on a host: it outlives its agent
and is found again by the next agent there, unless the host crashes or the vault itself is killed. What it says over the
network takes its time, and is lost when it, or the other, is gone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmres.gemini.inventory import PART_NAMES, Copy, Holdings, Key, Part, topology_text
from lmres.gemini.placement import Host, placement
from lmres.gemini.watermark import Hub, Report, Verdict
from lmres.rendezvous.plan import Plan

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

REPLICAS = 2
KEEP = 2


@dataclass(slots=True)
class Image:
    key: Key
    has: tuple[str, ...] = PART_NAMES
    corrupt: bool = False


@dataclass(slots=True, eq=False)
class Vault:
    """``buffers``: two for each rank, the own one or one held for another. ``held``: by whom what of ours is held."""

    states: States
    name: str
    epoch: int = 0
    alive: bool = True
    frozen: bool = False
    ever: bool = False
    origin: int = 0
    rank: int | None = None
    peers: tuple[Vault, ...] = ()
    hub_at: Vault | None = None
    hub: Hub | None = None
    members: dict[str, Vault] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    passed: int = -1
    buffers: dict[int, list[Image | None]] = field(default_factory=dict)
    held: set[tuple[str, Key]] = field(default_factory=set)
    waiting: dict[tuple[int, Key], Vault] = field(default_factory=dict)
    persisted: set[Key] = field(default_factory=set)

    def images(self) -> Iterable[tuple[int, Image]]:
        return ((r, i) for r, pair in sorted(self.buffers.items()) for i in pair if i is not None)

    def find(self, rank: int, key: Key) -> Image | None:
        return next((i for r, i in self.images() if r == rank and i.key == key), None)

    def send(self, to: Vault, action: Callable[[], None]) -> None:
        """Who does not know of the generation yet hears of it later; who has gone on does not care."""
        origin = self.origin

        def arrive() -> None:
            if not to.alive or not self.alive or self.origin != origin:
                return
            if to.origin == origin:
                action()
            elif to.origin < origin:
                self.states.world.after(100, arrive)

        self.states.world.after(self.states.delay_ms(), arrive)

    # -- a generation -------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Known images that are newer than the restored one are of no use any more."""
        start = Key(plan.recovery_step, plan.recovery_origin) if plan.recovery_step else None
        self.origin, self.frozen, self.rank, self.hub, self.hub_at = plan.origin, False, None, None, None
        self.verdict, self.passed, self.peers = Verdict(safe=start), plan.recovery_step, ()
        self.held.clear()
        self.waiting.clear()
        for pair in self.buffers.values():
            pair[:] = [i if i is not None and start is not None and i.key <= start else None for i in pair]

    def assign(self, plan: Plan, rank: int, by_node: dict[str, Vault]) -> None:
        self.rank, self.ever = rank, self.ever or plan.recovery_step > 0
        active = [Host(node_id=n.node_id, domain=n.node_id) for n in plan.active]
        spare = [Host(node_id=n, domain=n) for n in plan.standby]
        partners = placement(active, REPLICAS, spare)[plan.active[rank].node_id]
        self.peers = tuple(by_node[n] for n in partners if n in by_node)
        self.hub_at = by_node.get(plan.active[0].node_id)
        if rank == 0:
            members = {n.node_id: by_node[n.node_id] for n in plan.active if n.node_id in by_node}
            self.members = members
            self.hub = Hub(
                members=frozenset(n.node_id for n in plan.active),
                safe=self.verdict.safe,
                durable_interval=self.states.durable_interval,
                keep=KEEP,
            )

    # -- capturing ----------------------------------------------------------------------------------------------------

    def capture(self, step: int) -> None:
        """A step is done: captured if there is room, else skipped."""
        assert self.rank is not None
        key = Key(step, self.origin)
        self.passed = max(self.passed, step)
        if self.alive and not self.frozen and step >= self.verdict.gate and self._put(self.rank, Image(key)):
            for peer in self.peers:
                self.send(peer, lambda p=peer: p.offered(self, key))  # type: ignore[misc]
        self.report()

    def save(self, step: int) -> bool:
        """This very step, whatever the interval: True once it is there."""
        assert self.rank is not None
        key = Key(step, self.origin)
        if self.find(self.rank, key) is not None:
            return True
        if self.alive and not self.frozen and step >= self.verdict.gate and self._put(self.rank, Image(key)):
            for peer in self.peers:
                self.send(peer, lambda p=peer: p.offered(self, key))  # type: ignore[misc]
            self.report()
            return True
        return False

    def _put(self, rank: int, image: Image) -> bool:
        pair = self.buffers.setdefault(rank, [None, None])
        for i, old in enumerate(pair):
            if old is None or self.verdict.reusable(old.key):
                pair[i] = image
                return True
        return False

    def offered(self, owner: Vault, key: Key) -> None:
        if owner.rank is not None:
            self.waiting[owner.rank, key] = owner
            self.hold()

    def hold(self) -> None:
        for (rank, key), owner in sorted(self.waiting.items(), key=lambda item: item[0]):
            if self.frozen or not owner.alive or owner.find(rank, key) is None or self.verdict.reusable(key):
                del self.waiting[rank, key]
                continue
            twin = self.states.ddp and self.rank is not None and self.find(self.rank, key) is not None
            if self.find(rank, key) or self._put(rank, Image(key, has=("own", "log") if twin else PART_NAMES)):
                del self.waiting[rank, key]
                self.send(owner, lambda o=owner, k=key: o.confirmed(self.name, k))  # type: ignore[misc]

    def confirmed(self, by: str, key: Key) -> None:
        self.held.add((by, key))
        self.report()

    # -- the hub ------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        if self.rank is None or self.hub_at is None or not self.alive:
            return
        seen = frozenset(i.key for r, i in self.images() if r == self.rank)
        whole = frozenset(k for k in seen if all((p.name, k) in self.held for p in self.peers if p.alive))
        pending = [k.step - 1 for k in seen - whole if not self.verdict.reusable(k)]
        report = Report(
            node_id=self.name,
            whole=whole,
            seen=seen,
            floor=min([self.passed, *pending]),
            durable=frozenset(self.persisted),
        )
        hub_at = self.hub_at
        self.send(hub_at, lambda: hub_at.judge(report))

    def judge(self, report: Report) -> None:
        if self.hub is None:
            return
        before = self.hub.verdict()
        verdict = self.hub.report(report)
        if verdict.number == before.number:
            return
        if verdict.safe != before.safe and verdict.safe is not None:
            self.states.safe(verdict.safe, self.members)
        for vault in self.members.values():
            self.send(vault, lambda v=vault: v.learn(verdict))  # type: ignore[misc]
        for peer in {p for v in self.members.values() for p in v.peers} - set(self.members.values()):
            self.send(peer, lambda p=peer: p.learn(verdict))  # type: ignore[misc]

    def learn(self, verdict: Verdict) -> None:
        if verdict.number <= self.verdict.number:
            return
        self.verdict, self.ever = verdict, self.ever or verdict.safe is not None
        for key in verdict.persist:
            if self.rank is not None and key not in self.persisted and self.find(self.rank, key) is not None:
                self.persisted.add(key)
                self.states.files.setdefault(key, set()).add(self.rank)
        for key in verdict.delete:
            self.states.files.pop(key, None)
        self.hold()
        self.report()


@dataclass(slots=True)
class States:
    """All vaults and files of the world. ``lost_at_ms``: when which vault lost its memory."""

    world: World
    on: bool
    ddp: bool
    durable_interval: int | None
    chance: random.Random
    vaults: dict[tuple[str, str], Vault] = field(default_factory=dict)
    files: dict[Key, set[int]] = field(default_factory=dict)
    lost_at_ms: dict[str, int] = field(default_factory=dict)
    corrupted: set[Key] = field(default_factory=set)
    newest_safe: tuple[Key, dict[int, tuple[Vault, ...]]] | None = None

    @staticmethod
    def of(world: World) -> States:
        chance = random.Random(f"states of {world.seed}")
        on = chance.random() < 0.5 and world.scenario.theme != "large"  # there more are killed than two copies survive
        interval = chance.choice((None, None, 10, 25))
        return States(world=world, on=on, ddp=chance.random() < 0.5, durable_interval=interval, chance=chance)

    def delay_ms(self) -> int:
        return self.chance.choice((1, 5, 5, 20, 20, 60, 400))

    def vault(self, process: Process) -> Vault:
        """The vault of this agent: the one that is there, or a new one. Memory of another run is dropped."""
        place = (process.host.name, process.node_id)
        vault = self.vaults.get(place)
        if vault is None or not vault.alive:
            ever = process.round_epoch in process.ever
            vault = self.vaults[place] = Vault(states=self, name=process.node_id, ever=ever)
            vault.epoch = process.round_epoch
        if vault.epoch != process.round_epoch:
            self.lose(vault)
            return self.vault(process)
        return vault

    def lose(self, vault: Vault) -> None:
        if vault.alive:
            vault.alive = False
            self.lost_at_ms[vault.name] = self.world.now_ms

    def safe(self, key: Key, members: dict[str, Vault]) -> None:
        self.world.log(f"{key} is safe")
        holders = {v.rank: (v, *v.peers) for v in members.values() if v.rank is not None}
        self.newest_safe = (key, holders)

    # -- what an agent does with its vault ----------------------------------------------------------------------------

    def follow(self, process: Process, plan: Plan) -> None:
        """A new plan is known here; it may know more of it than the vaults of others do."""
        vault = self.vault(process)
        if vault.origin < plan.origin:
            vault.begin(plan)

    def assign(self, process: Process, plan: Plan, slot: int) -> None:
        by_node = {}
        for other in self.world.living():
            if other.agent.ledger.registered and other.round_epoch == process.round_epoch:
                by_node[other.node_id] = self.vault(other)
        self.vault(process).assign(plan, slot, by_node)

    def prepare(self, process: Process, plan: Plan, slot: int) -> str:
        """Puts the chosen image in place. Says what is missing, if anything."""
        vault = self.vault(process)
        if not plan.recovery_step:
            return ""
        key = Key(plan.recovery_step, plan.recovery_origin)
        near = [self.vault(p) for p in self.world.living() if p.round_epoch == process.round_epoch]
        missing = sorted(part_names(slot, key, ddp=self.ddp) - self.parts(near, intact=True))
        if missing:
            return f"{key} can not be restored for rank {slot}: nobody has {', '.join(n for n, _ in missing)}"
        pair = vault.buffers.setdefault(slot, [None, None])
        there = next((i for i, old in enumerate(pair) if old is not None and old.key == key), None)
        free = there if there is not None else next((i for i, old in enumerate(pair) if old is None), 0)
        pair[free] = Image(key)
        return ""

    def holdings(self, process: Process, generation: int, problem: str) -> Holdings:
        vault = self.vault(process)
        if vault.ever or self.files:
            process.ever.add(process.round_epoch)
        copies = [self._copy(r, i.key, i.has, "memory") for r, i in vault.images()]
        files = [(r, k) for k, ranks in sorted(self.files.items()) for r in sorted(ranks)]
        copies += [self._copy(r, k, PART_NAMES, "durable") for r, k in files]
        return Holdings(
            node_id=process.node_id,
            incarnation=process.agent.me.incarnation,
            generation=generation,
            address=f"vault-{process.node_id}",
            port=1,
            copies=tuple(copies),
            problem=problem,
            ever=process.round_epoch in process.ever,
        )

    def _copy(self, rank: int, key: Key, has: tuple[str, ...], place: str) -> Copy:
        digests = {n: Part(digest=d, length=10) for n, d in part_names(rank, key, ddp=self.ddp)}
        return Copy(
            rank=rank,
            step=key.step,
            origin=key.origin,
            has=has,
            place=place,  # type: ignore[arg-type]
            finite=True,
            trust="unverified",
            topology=topology_text(nodes=self.world.scenario.min_nodes, local_world_size=1),
            **digests,
        )

    # -- the truth ----------------------------------------------------------------------------------------------------

    def parts(self, vaults: Iterable[Vault], *, intact: bool = False) -> set[tuple[str, str]]:
        """All that these vaults and the files have."""
        found = {p for k, ranks in self.files.items() for r in ranks for p in part_names(r, k, ddp=self.ddp)}
        for vault in vaults:
            for rank, image in vault.images() if vault.alive else ():
                if not (intact and image.corrupt):
                    found |= {p for p in part_names(rank, image.key, ddp=self.ddp) if p[0] in image.has}
        return found

    def is_whole(self, key: Key, ranks: int, vaults: Iterable[Vault]) -> bool:
        parts = self.parts(vaults)
        return all(part_names(r, key, ddp=self.ddp) <= parts for r in range(ranks))

    def keys(self, vaults: Iterable[Vault]) -> set[Key]:
        return set(self.files) | {i.key for v in vaults if v.alive for _, i in v.images()}


def part_names(rank: int, key: Key, *, ddp: bool) -> set[tuple[str, str]]:
    """Name and digest of each part of an image."""
    return {(n, _digest(n, key, None if ddp and n == "shared" else rank)) for n in PART_NAMES}


def _digest(name: str, key: Key, rank: int | None) -> str:
    return hashlib.md5(f"{name} {key.step}/{key.origin} {rank}".encode()).hexdigest()
