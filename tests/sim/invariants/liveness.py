"""When faults have stopped and enough agents are there, everything ends within bounded time."""

from tests.sim.oracle import Invariant


class Liveness(Invariant):
    def at_end(self) -> None:
        left = [f"{p.name} ({p.outcome.waiting_for if p.outcome is not None else 'new'})" for p in self.world.living()]
        if left:
            self.fail(f"still there {self.world.scenario.patience_ms} ms after the last fault: {'; '.join(left)}")
        undone = [p.name for p in self.world.processes if p.exit_code is None]
        if undone:
            self.fail(f"ended without an exit code: {undone}")
