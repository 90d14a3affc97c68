"""Keys of a run in the store.

``ctl/`` holds the few records that every agent follows (plans, formations, the end of the run); ``reg/`` what only
those that decide must react to; ``lease/`` the counters that show who is alive, which nobody waits for. The split
keeps the number of wake-ups linear in the number of agents.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/lmres"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Builds and recognises the keys of one run. ``run`` is key-safe text."""

    run: str
    root: str = ROOT

    @property
    def base(self) -> str:
        return f"{self.root}/{self.run}/"

    @property
    def ctl(self) -> str:
        return f"{self.base}ctl/"

    @property
    def reg(self) -> str:
        return f"{self.base}reg/"

    @property
    def leases(self) -> str:
        return f"{self.base}lease/"

    @property
    def config(self) -> str:
        return f"{self.reg}config"

    @property
    def finished(self) -> str:
        return f"{self.ctl}finished"

    @property
    def door(self) -> str:
        return f"{self.reg}door"

    @property
    def stop(self) -> str:
        return f"{self.reg}stop"

    @property
    def imports(self) -> str:
        return f"{self.base}imports"

    def plan(self, generation: int) -> str:
        return f"{self.ctl}plan/{generation:08d}"

    def formed(self, generation: int) -> str:
        return f"{self.ctl}formed/{generation:08d}"

    def member(self, node_id: str) -> str:
        return f"{self.reg}member/{node_id}"

    def gone(self, node_id: str) -> str:
        return f"{self.reg}gone/{node_id}"

    def parted(self, node_id: str, by: str) -> str:
        return f"{self.reg}parted/{node_id}/{by}"

    def hold(self, node_id: str) -> str:
        return f"{self.reg}hold/{node_id}"

    def lease(self, node_id: str) -> str:
        return f"{self.leases}{node_id}"

    def evidence(self, generation: int, node_id: str, number: int) -> str:
        return f"{self.reg}evidence/{generation:08d}/{node_id}/{number:04d}"

    def ready(self, generation: int, node_id: str) -> str:
        return f"{self.reg}ready/{generation:08d}/{node_id}"

    def done(self, generation: int, node_id: str) -> str:
        return f"{self.reg}done/{generation:08d}/{node_id}"

    def holdings(self, node_id: str) -> str:
        return f"{self.reg}holdings/{node_id}"

    def banned(self, step: int, origin: int) -> str:
        return f"{self.reg}banned/{origin:08d}-{step:012d}"

    def sighting(self, generation: int, node_id: str) -> str:
        return f"{self.reg}sighting/{generation:08d}/{node_id}"

    def paused(self, generation: int, node_id: str) -> str:
        return f"{self.reg}paused/{generation:08d}/{node_id}"

    def health(self, node_id: str) -> str:
        return f"{self.reg}health/{node_id}"

    def recovered(self, generation: int, node_id: str) -> str:
        return f"{self.reg}recovered/{generation:08d}/{node_id}"
