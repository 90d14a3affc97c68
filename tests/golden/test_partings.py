"""Transcripts of what an observer makes of closed connections: notes, heartbeats, and whom it finds lost when."""

from collections.abc import Callable

import pytest

from lmres.ids import Keys
from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.parting import Partings
from lmres.rendezvous.state import Gone, Lease, Member, Parted, View

INTERVAL, TIMEOUT = 500, 5000


class Watch:
    """One observer, ``a``. Time passes by its looks, one each interval and one where it is told that one is due."""

    def __init__(self, nodes: str) -> None:
        self.keys = Keys(run="watch")
        self.view = View(keys=self.keys)
        self.leases = LeaseTable(interval_ms=INTERVAL, timeout_ms=TIMEOUT)
        self.partings = Partings(interval_ms=INTERVAL)
        self.now_ms = self.revision = self._number = 0
        self._beats: dict[str, tuple[str, Entry]] = {}
        self._incarnations: dict[str, int] = {}
        self.lines = [f"a heartbeat each {INTERVAL} ms"]
        self.joins(nodes).beats(nodes)
        self._look()
        self.now_ms = INTERVAL
        self.beats(nodes)

    def _entry(self, key: str, record: object) -> Entry:
        self.revision += 1
        return Entry(key=key, value=encode(record), create_revision=1, mod_revision=self.revision)

    def _put(self, key: str, record: object) -> None:
        self.view.apply((self._entry(key, record),), self.revision)

    def _name(self, node: str) -> str:
        return f"{node}.{self._incarnations[node]}"

    def _tell(self, line: str) -> "Watch":
        self.lines.append(f"{self.now_ms:5d} {line}")
        return self

    def joins(self, nodes: str) -> "Watch":
        for node in nodes:
            self._incarnations[node] = self._incarnations.get(node, 0) + 1
            member = Member(
                node_id=node,
                incarnation=self._name(node),
                address="10.0.0.1",
                host=node,
                boot_id=node,
                pid=1,
                pid_start=1,
                failure_domain=node,
            )
            self._put(self.keys.member(node), member)
        return self._tell(f"joins: {' '.join(map(self._name, nodes))}")

    def goes(self, node: str) -> "Watch":
        gone = Gone(node_id=node, incarnation=self._name(node), how="lost", reason="told", by="a")
        self._put(self.keys.gone(node), gone)
        return self._tell(f"gone: {self._name(node)}")

    def beats(self, nodes: str) -> "Watch":
        for node in nodes:
            lease = Lease(incarnation=self._name(node), counter=self.revision)
            self._beats[node] = (node, self._entry(self.keys.lease(node), lease))
        return self._tell(f"heartbeats of {' '.join(nodes)}")

    def notes(self, by: str, node: str, *, back: bool = False, incarnation: str = "") -> "Watch":
        self._number += 1
        parted = Parted(
            node_id=node,
            incarnation=incarnation or self._name(node),
            by=by,
            by_incarnation=self._name(by),
            number=self._number,
            back=back,
        )
        self._put(self.keys.parted(node, by), parted)
        what = "are there again" if back else "broke"
        return self._tell(f"noted by {parted.by_incarnation}: connections to {parted.incarnation} {what}")

    def passes(self, ms: int, *, beating: str = "") -> "Watch":
        """Looks until then; each interval these nodes beat."""
        end, found = self.now_ms + ms, ""
        next_beat = self.now_ms + INTERVAL
        while self.now_ms < end and not found:
            due = self._look()
            due = INTERVAL if due is None else max(1, due)
            self.now_ms = min(end, next_beat, self.now_ms + due)
            if self.now_ms == next_beat:
                next_beat += INTERVAL
                for node in beating:
                    lease = Lease(incarnation=self._name(node), counter=self.revision)
                    self._beats[node] = (node, self._entry(self.keys.lease(node), lease))
            self._look()
            found = self._found()
        words = f" with heartbeats of {' '.join(beating)}" if beating else ""
        return self._tell(f"=> {found or f'nobody is found lost in {ms} ms'}{words}")

    def stands_still(self, ms: int) -> "Watch":
        """The observer can not look."""
        self.now_ms += ms
        return self._tell(f"could not look for {ms} ms")

    def _look(self) -> int | None:
        self.leases.observe(self._beats.values(), self.now_ms)
        self.partings.observe(self.view, self.leases, self.now_ms)
        return self.partings.next_ms(self.view, self.leases, self._others(), self.now_ms)

    def _others(self) -> list[Member]:
        return [m for m in self.view.live_members() if m.node_id != "a"]

    def _found(self) -> str:
        found = [(m, self.partings.find(self.view, self.leases, m, self.now_ms)) for m in self._others()]
        return "; ".join(f"{m.incarnation} is lost: {f.reason}" for m, f in found if f is not None)


def parting_of_a_killed_node() -> Watch:
    return Watch("abc").passes(200).notes("a", "b").notes("c", "b").passes(3000, beating="ac")


def parting_is_noted_late_by_the_second() -> Watch:
    return Watch("abcd").notes("a", "b").passes(1500, beating="acd").notes("c", "b").passes(1000, beating="acd")


def parting_of_one_witness_among_many() -> Watch:
    return Watch("abc").notes("a", "b").passes(4000, beating="ac")


def parting_of_two_that_are_alone() -> Watch:
    return Watch("ab").notes("a", "b").passes(4000, beating="a")


def parting_of_a_node_that_beats() -> Watch:
    return Watch("abc").notes("a", "b").notes("c", "b").passes(4000, beating="abc")


def parting_and_a_heartbeat_and_then_silence() -> Watch:
    """The lease has moved after the notes: they say no more that it has died."""
    watch = Watch("abc").notes("a", "b").notes("c", "b").passes(500, beating="abc")
    return watch.passes(4000, beating="ac")


def parting_is_taken_back() -> Watch:
    watch = Watch("abc").notes("a", "b").notes("c", "b").passes(300)
    return watch.notes("c", "b", back=True).passes(4000, beating="ac")


def parting_seen_by_one_who_is_lost_itself() -> Watch:
    return Watch("abcd").notes("c", "b").notes("d", "b").goes("d").passes(4000, beating="ac")


def parting_of_an_earlier_incarnation() -> Watch:
    watch = Watch("abc").notes("a", "b").notes("c", "b").goes("b").joins("b").beats("b")
    return watch.passes(2000, beating="ac")


def parting_while_the_observer_could_not_look() -> Watch:
    watch = Watch("abc").passes(500, beating="abc").stands_still(20_000).notes("a", "b").notes("c", "b")
    return watch.passes(3000, beating="ac")


def parting_after_the_observer_could_look_again() -> Watch:
    """Once it has been heard from again, its silence says something."""
    watch = Watch("abc").passes(500, beating="abc").stands_still(20_000).passes(1000, beating="abc")
    return watch.notes("a", "b").notes("c", "b").passes(3000, beating="ac")


STORIES: tuple[Callable[[], Watch], ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("parting_")
)


@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.__name__)
def test_parting(story: Callable[[], Watch], golden: Callable[[str, str], None]) -> None:
    golden(story.__name__, "\n".join(story().lines) + "\n")
