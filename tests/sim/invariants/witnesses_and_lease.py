"""Closed connections find a loss early, but only together: two live witnesses (one where only one other lives) that
had a connection, and a lease that has stood still since.

Nobody whose lease moves is declared so, whatever breaks; where nothing goes wrong with requests, nobody who lives and
was not stopped. And it works: a dead agent of which two have noted the loss is declared within three intervals.

An observer counts from the moment it asked, so what it read may be younger by one request's time.
"""

from lmres.rendezvous.state import Gone, Parted
from tests.sim.oracle import Invariant, Write
from tests.sim.process import Process

DRIFT = 0.93
INTERVALS = 3
SLACK_MS = 300
SLOWEST_MS = 1_000
SETTLED_MS = 5_000
"""After an outage an observer must have heard from a member before its silence says anything."""


class WitnessesAndLease(Invariant):
    def wrote(self, write: Write) -> None:
        match write.record:
            case Gone() if write.record.witnesses and write.by is not None:
                if write.record != self.oracle.records.get(write.key):
                    self._declared(write.record, write.by)
            case Parted():
                self._noted(write.record)

    def _declared(self, gone: Gone, by: Process) -> None:
        if gone.how != "lost":
            self.fail(f"{gone.incarnation} has left, and yet there are witnesses")
        noted = self._notes(gone.node_id, gone.incarnation)
        known = {m.node_id for m in by.agent.view.live_members()}  # somebody may be about to join
        needed = 2 if len(known | {gone.node_id}) > 2 else 1
        if len(set(gone.witnesses)) < needed or not set(gone.witnesses) <= noted.keys():
            self.fail(f"{gone.incarnation} was declared lost by {gone.witnesses}, noted was {sorted(noted)}")
        if self.world.keys.lease(gone.node_id) in self.oracle.torn:
            return
        s, now_ms = self.world.scenario, self.world.now_ms
        beat_ms = self.oracle.beat_ms.get(gone.incarnation, 0)
        first_ms = min(noted[w] for w in gone.witnesses)
        if beat_ms > first_ms:
            self.fail(f"the lease of {gone.incarnation} has moved since {gone.witnesses} noted a loss")
        asked_ms = SLOWEST_MS if s.slow_requests or self.world.slow_until_ms else 50
        if any(a <= max(beat_ms, first_ms) <= b + s.client_timeout_ms for a, b in self.world.freezes):
            asked_ms = s.client_timeout_ms
        waited_ms, quiet_ms = now_ms - first_ms + asked_ms, now_ms - beat_ms + asked_ms
        if waited_ms < s.interval_ms * DRIFT or quiet_ms < s.interval_ms * 1.5 * DRIFT:
            self.fail(f"{gone.incarnation} was declared lost {now_ms - first_ms} ms after the first note")
        process = self.oracle.process_of(gone.incarnation)
        # An outage too short to be noticed, just when connections break, may look like a missed heartbeat.
        hiccup = any(b - a < 2 * s.interval_ms and b > now_ms - 4 * s.interval_ms for a, b in self.world.freezes)
        undisturbed = s.clean_network and not self.world.slow_until_ms and not hiccup
        if (
            undisturbed
            and process is not None
            and process.alive
            and process.paused_ms is None
            and not process.end_epoch
        ):
            self.fail(f"{gone.incarnation} was declared lost by {gone.witnesses} and lives")

    def _noted(self, parted: Parted) -> None:
        """The second note on a dead agent: within a while it must be known as lost."""
        died_ms = self.world.links.died_ms.get(parted.incarnation)
        if parted.back or died_ms is None:
            return
        known = self._since_last_beat(parted)
        if len(known | {parted.by}) < 2 or parted.by in known:
            return
        s, epoch, beat_ms = self.world.scenario, self.oracle.epoch, self.oracle.beat_ms.get(parted.incarnation, 0)
        if not s.clean_network:
            return
        since_ms = self.world.now_ms
        observers = [
            p
            for p in self.world.living()
            if p.agent.ledger.registered and p.node_id != parted.node_id and p.started_ms < died_ms - 3 * s.interval_ms
        ]

        def found() -> None:
            w = self.world
            disturbed = (
                self.oracle.epoch != epoch
                or w.slow_until_ms > since_ms - 2_000
                or any(b > since_ms - SETTLED_MS for _, b in w.freezes)
                or self.oracle.beat_ms.get(parted.incarnation, 0) != beat_ms
                or beat_ms > died_ms
                or self.oracle.torn
            )
            calm = [p for p in observers if p.alive and p.paused_ms is None and p.leave is None and not p.end_epoch]
            if disturbed or len(calm) < 2 or not self.oracle.is_live(parted.node_id, parted.incarnation):
                return
            if len(self._since_last_beat(parted) & {p.node_id for p in calm}) < 2:
                return
            took = w.now_ms - died_ms
            self.fail(f"{parted.incarnation} died {took} ms ago, two have noted it, and it is not yet found lost")

        self.world.after(int(INTERVALS * s.interval_ms) + SLACK_MS - (since_ms - died_ms), found)

    def _since_last_beat(self, parted: Parted) -> set[str]:
        """Whose notes are younger than its last heartbeat: an older one says nothing."""
        beat_ms = self.oracle.beat_ms.get(parted.incarnation, 0)
        return {by for by, ms in self._notes(parted.node_id, parted.incarnation).items() if ms > beat_ms}

    def _notes(self, node_id: str, incarnation: str) -> dict[str, int]:
        """When each live witness's standing note was written."""
        prefix = f"{self.world.keys.reg}parted/{node_id}/"
        return {
            r.by: self.oracle.noted_ms[key]
            for key, r in sorted(self.oracle.records.items())
            if key.startswith(prefix)
            and key not in self.oracle.torn
            and r.incarnation == incarnation
            and not r.back
            and self.oracle.is_live(r.by, r.by_incarnation)
        }
