"""Every agent ends with a documented code, for the right kind of reason; those that saw the end of a run agree."""

from lmres.errors import ExitCode
from lmres.rendezvous.rounds import End
from tests.sim.oracle import Invariant, Oracle
from tests.sim.process import Process

DOCUMENTED = {int(code) for code in ExitCode}


class ExitCodes(Invariant):
    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self._over: dict[int, tuple[int, str]] = {}

    def ends(self, process: Process, end: End) -> None:
        if end.exit_code not in DOCUMENTED:
            self.fail(f"{process.name} ends with {end.exit_code}, which means nothing")
        if end.run_over:
            code, first = self._over.setdefault(process.end_epoch, (end.exit_code, process.name))
            if code != end.exit_code:
                self.fail(f"{first} ends the run with {code}, {process.name} with {end.exit_code}")
        if end.exit_code == ExitCode.BAD_CONFIGURATION and not self._refusable(process, end):
            self.fail(f"{process.name} was refused without a reason: {end.reason}")
        if end.exit_code == ExitCode.INFRASTRUCTURE_LOST and "the store has lost" in end.reason:
            self._check_lost(process, end)

    def _refusable(self, process: Process, end: End) -> bool:
        if "agents at most" in end.reason:
            return len(self.world.processes) > self.world.scenario.max_nodes
        return sum(p.node_id == process.node_id for p in self.world.processes) > 1

    def _check_lost(self, process: Process, end: End) -> None:
        """The records may be wiped under an agent only if it was silent for so long that it counted as gone."""
        silent = process.paused_ms is not None or self.world.scenario.lost_requests > 0 or self.world.freezes
        if not silent:
            self.fail(f"{process.name} never was silent, but ends with: {end.reason}")
