"""What localization is made from: the ranks told of, the groups that they use together, and words for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmres.scout.sighting import PHASES, GroupSight, OpMark, Sighting, WorkerSight

MAX_NAMED = 8
_DEFAULT_GROUP = frozenset({"", "0", "default_pg", "default"})
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "/lmres/adapters/")
DOING: dict[str, str] = {
    "start": "has not made its first step yet",
    "user": "is in the program's own code",
    "forward": "is in forward",
    "backward": "is in backward",
    "optimizer": "is in the optimizer's step",
    "collective": "waits in a collective",
    "loader": "waits for its data loader",
    "checkpoint_io": "reads or writes a checkpoint",
    "end": "is on its way out of the interpreter",
}
DOING_ALL: dict[str, str] = {
    "start": "have not made their first step yet",
    "user": "are in the program's own code",
    "forward": "are in forward",
    "backward": "are in backward",
    "optimizer": "are in the optimizer's step",
    "collective": "wait in a collective",
    "loader": "wait for their data loader",
    "checkpoint_io": "read or write a checkpoint",
    "end": "are on their way out of the interpreter",
}
STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it hangs in the kernel (state D: a disk, a network file system or a driver)",
    "Z": "its process has ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    node_id: str
    sight: WorkerSight
    timeout_ms: int
    auto: bool = False
    """Its timeout is not the user's."""

    @property
    def number(self) -> int:
        return self.sight.rank

    @property
    def phase(self) -> str:
        """A phase of a newer version is the program's own code."""
        return self.sight.phase if self.sight.phase in PHASES else "user"

    @property
    def stopped(self) -> bool:
        state = self.sight.state
        return state in ("T", "t") or (state == "D" and self.is_quiet)

    @property
    def is_quiet(self) -> bool:
        return self.sight.quiet_ms >= self.timeout_ms

    @property
    def moves(self) -> bool:
        """It is known to be within its own time."""
        return not (self.is_quiet or self.stopped or self.sight.blind or self.sight.state == "Z")

    @property
    def is_inside(self) -> bool:
        """It waits for others itself, whatever for."""
        return self.phase == "collective" and self.sight.state != "Z"

    @property
    def named(self) -> str:
        return f"rank {self.number} on {self.node_id}"


class Scene:
    """All ranks that were told of, by rank, and the groups that they use together, by name."""

    def __init__(self, sightings: Iterable[Sighting], unheard: Mapping[str, Sequence[int]]) -> None:
        told = list(sightings)
        found = [
            Rank(node_id=s.node_id, sight=w, timeout_ms=w.timeout_ms or s.timeout_ms, auto=s.auto)
            for s in told
            for w in s.workers
        ]
        self.alarm = any(s.alarm for s in told)
        self.ranks = {r.number: r for r in sorted(found, key=lambda r: (r.number, r.node_id))}
        self.unheard = {rank: node_id for node_id, ranks in unheard.items() for rank in ranks if rank not in self.ranks}
        self.silent_nodes = tuple(sorted(unheard))
        names = sorted({g.name for r in self.ranks.values() if not r.sight.blind for g in r.sight.groups})
        self.groups = tuple(Group(name, self.ranks, unheard=len(self.unheard)) for name in names)
        self.default = next((g for g in self.groups if g.name in _DEFAULT_GROUP), None)

    def behind(self, rank: int) -> bool:
        return any(g.is_behind(rank) for g in self.groups)

    def is_awaited(self, rank: int) -> bool:
        """Whether another member of a group of its waits for something, maybe for it."""
        members = {n for g in self.groups if rank in g.entered for n in g.entered}
        return any(self.ranks[n].is_inside for n in members - {rank})

    def waits_for(self, rank: int) -> set[int]:
        """Whom this rank waits for, in whatever group's collective it is."""
        return {b for g in self.groups if g.waits(rank) for b in g.before(rank)}


class Group:
    """One process group: what each member that is known has entered. A member that never used it has entered 0."""

    def __init__(self, name: str, ranks: Mapping[int, Rank], *, unheard: int) -> None:
        """``unheard``: so many ranks have not been told of, and may be members where nobody says who is."""
        self.name = name
        self.sights: dict[int, GroupSight] = {}
        self.ranks = ranks
        told: set[int] = set()
        for number, rank in ranks.items():
            for group in rank.sight.groups:
                if group.name == name and not rank.sight.blind:
                    self.sights[number] = group
                    told.update(group.ranks)
        self.size = max(len(told), len(self.sights) + (0 if told else unheard))
        known = [n for n in sorted(told | set(self.sights)) if n in ranks and not ranks[n].sight.blind]
        self.entered = {n: self.sights[n].entered if n in self.sights else 0 for n in known}
        self.highest = max(self.entered.values(), default=0)

    @property
    def title(self) -> str:
        if self.name in _DEFAULT_GROUP:
            return "the default group"
        return f"group {self.name} (ranks {numbers(self.entered)})"

    def is_behind(self, rank: int) -> bool:
        return rank in self.entered and self.entered[rank] < self.highest

    def before(self, rank: int) -> list[int]:
        """Members that have entered less than this one."""
        mine = self.entered.get(rank, 0)
        return [n for n, entered in self.entered.items() if entered < mine]

    def waits(self, rank: int) -> bool:
        """Whether it is inside of a collective of this group; in backward its gradients are reduced meanwhile."""
        group = self.sights.get(rank)
        if group is None or group.entered <= group.left or self.ranks[rank].sight.state == "Z":
            return False
        return self.ranks[rank].phase in ("collective", "backward")

    def mark(self, number: int) -> OpMark | None:
        """Operation ``number`` as the members know it that have entered it; of the lowest rank."""
        for n in sorted(self.sights):
            for mark in self.sights[n].recent:
                if mark.number == number:
                    return mark
        return None


# -- words ------------------------------------------------------------------------------------------------------------


def missed(scene: Scene, rank: Rank) -> str:
    """Which operation it has not entered, and who waits in it."""
    group = next((g for g in (scene.default, *scene.groups) if g is not None and g.is_behind(rank.number)), None)
    if group is None:
        return f"{rank.named} makes no progress after step {rank.sight.step}"
    number = group.entered[rank.number] + 1
    mark = group.mark(number)
    what = f"{plain_op(mark.op)} number {number}" if mark is not None else f"operation number {number}"
    shape = f" ({mark.shape})" if mark is not None and mark.shape else ""
    waiting = [n for n, entered in group.entered.items() if entered >= number]
    wait = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {numbers(waiting)} wait"
    words = f"{rank.named} has not entered {what}{shape} of {group.title}"
    return f"{words} after step {rank.sight.step}, in which {wait}"


def activity(rank: Rank) -> str:
    sight = rank.sight
    if sight.blind:
        return f"its progress can not be read ({sight.blind})"
    if sight.state == "Z":
        return STATES["Z"]
    where = f", at {place(sight.stack)}" if sight.stack else ""
    busy = ", and is using the processor" if sight.state == "R" else ""
    return f"it {DOING[rank.phase]}{where}{busy}, for {seconds(sight.quiet_ms)}"


def place(stack: Sequence[str]) -> str:
    """The innermost line of the program itself, else the innermost."""
    own = [line for line in stack if not any(mark in line for mark in _LIBRARIES)]
    return (own or list(stack))[-1].strip()[:200]


def silence(scene: Scene) -> str:
    return f"; not heard: {', '.join(scene.silent_nodes)}" if scene.silent_nodes else ""


def quiet_words(scene: Scene) -> str:
    return f"no progress for {seconds(max((r.sight.quiet_ms for r in scene.ranks.values()), default=0))}"


def who(scene: Scene, ranks: Sequence[int]) -> str:
    shown = [scene.ranks[r].named for r in ranks[:MAX_NAMED]]
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + shown[-1] + more


def op_words(mark: OpMark) -> str:
    shape = f" ({mark.shape})" if mark.shape else ""
    return f"{plain_op(mark.op)}{shape} after step {mark.step}"


def plain_op(op: str) -> str:
    return op.removeprefix("c10d::").strip("_")


def numbers(ranks: Iterable[int]) -> str:
    """0-3, 5."""
    return ", ".join(
        f"{a}" if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in _runs(sorted(set(ranks)))
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1]
            start = i


def seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"
