"""When faults have stopped every agent finds its place, and with enough of them everything ends within bounded time."""

from tests.sim.oracle import Invariant


class Liveness(Invariant):
    def at_rest(self) -> None:
        for process in self.world.living():
            stopping = process.workers is not None and process.workers.alive
            young = self.world.now_ms - process.started_ms < 2 * self.world.scenario.timeout_ms
            if not process.agent.ledger.registered and process.leave is None and not stopping and not young:
                reason = process.outcome.waiting_for if process.outcome is not None else "new"
                self.fail(f"{process.name} still has no place: {reason}")

    def at_end(self) -> None:
        left = [f"{p.name} ({p.outcome.waiting_for if p.outcome is not None else 'new'})" for p in self.world.living()]
        if left:
            self.fail(f"still there {self.world.scenario.patience_ms} ms after the last fault: {'; '.join(left)}")
        undone = [p.name for p in self.world.processes if p.exit_code is None]
        if undone:
            self.fail(f"ended without an exit code: {undone}")
