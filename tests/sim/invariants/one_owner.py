"""No two agents ever run workers for the same slot of the same generation."""

from tests.sim.oracle import Invariant, Oracle
from tests.sim.process import Process


class OneOwner(Invariant):
    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self._owners: dict[tuple[int, int, int], str] = {}

    def starts(self, process: Process, generation: int, slot: int) -> None:
        key = (process.round_epoch, generation, slot)
        owner = self._owners.setdefault(key, process.name)
        if owner != process.name:
            self.fail(f"{owner} and {process.name} both run slot {slot} of generation {generation}")
