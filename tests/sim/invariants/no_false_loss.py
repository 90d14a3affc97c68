"""An agent is declared lost only if its lease really stood still for the timeout while the store was in reach, or if
its process has ended.

An observer counts from the moment it asked, so a heartbeat may be younger by one request's time; and of each outage it
counts up to two intervals. Where no request gets lost, an outage of the store alone makes nobody lost, if the timeout
is at least five intervals.
"""

from lmres.rendezvous.state import Gone
from tests.sim.oracle import Invariant, Write

DRIFT = 0.93
SLOWEST_MS = 1_000


class NoFalseLoss(Invariant):
    def wrote(self, write: Write) -> None:
        gone = write.record
        if not isinstance(gone, Gone) or gone.how != "lost" or write.by is None:
            return
        known = self.oracle.records.get(write.key)
        if known is not None and known.incarnation == gone.incarnation:
            return
        process = self.oracle.process_of(gone.incarnation)
        beat_ms = self.oracle.beat_ms.get(gone.incarnation)
        if self.world.keys.lease(gone.node_id) in self.oracle.torn:
            return  # what was written over a heartbeat hides it
        if process is None or not process.alive or process.end_epoch or beat_ms is None:
            return
        if gone.witnesses:
            return  # judged by ``witnesses_and_lease``
        s, now_ms = self.world.scenario, self.world.now_ms
        if (
            s.clean_network
            and not self.world.slow_until_ms
            and process.paused_ms is None
            and s.timeout_ms >= 5 * s.interval_ms
        ):
            self.fail(f"{gone.incarnation} never was silent, but was declared lost by {gone.by}")
        frozen = [(max(a, beat_ms), min(b, now_ms)) for a, b in self.world.freezes]
        outages = [b - a for a, b in frozen if b > a]
        quiet_ms = now_ms - beat_ms - sum(outages)
        asked_ms = SLOWEST_MS if s.slow_requests or self.world.slow_until_ms else 50
        if any(beat_ms - s.client_timeout_ms <= b and a <= beat_ms for a, b in self.world.freezes):
            asked_ms = s.client_timeout_ms
        allowed_ms = s.timeout_ms * DRIFT - asked_ms - len(outages) * 2 * s.interval_ms
        if quiet_ms < allowed_ms:
            self.fail(f"{gone.incarnation} was declared lost by {gone.by} {quiet_ms} ms after a heartbeat")
