"""What one seed chooses before the clock starts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from lmres.policy import Recovery

THEMES = ("workers", "pauses", "store", "comings", "ends", "success", "garbage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times in milliseconds of the simulation's own clock; shares are probabilities.

    ``poison_step``: at this step one rank raises the same exception each time. ``theme``: the kind of fault that this
    seed has more of.
    """

    agents: int
    min_nodes: int
    max_nodes: int
    interval_ms: int
    timeout_ms: int
    join_timeout_ms: int
    form_timeout_ms: int
    max_restarts: int
    recovery: Recovery
    safety_ms: int
    faults: int
    total_steps: int
    lost_requests: float
    lost_answers: float
    late_requests: float
    slow_requests: float
    missed_wakes: float
    slow_stops: float
    theme: str = "mixed"
    poison_step: int | None = None
    patience_ms: int = 180_000

    @property
    def client_timeout_ms(self) -> int:
        """As the edge has it."""
        return max(500, min(2_000, self.timeout_ms * 2 // 5))

    @property
    def clean_network(self) -> bool:
        return not (self.lost_requests or self.lost_answers or self.late_requests or self.slow_requests)


def scenario_of(rng: random.Random) -> Scenario:
    min_nodes = rng.randint(2, 4)
    agents = rng.randint(max(3, min_nodes), 7)
    theme = rng.choice(("mixed", "mixed", "mixed", *THEMES))
    trouble = rng.choice((0.0, 0.01, 0.04))
    interval_ms, timeout_ms = rng.choice(((500, 3000), (1000, 5000), (1000, 3000)))
    recovery = Recovery(
        node_strikes=rng.choice((1, 2, 3)),
        no_progress_limit=rng.choice((2, 3)),
        on_no_standby=rng.choices(("wait", "fail"), weights=(5, 1))[0],
        quarantined=rng.choices(("park", "exit"), weights=(4, 1))[0],
        evidence_window_s=rng.choice((0.2, 0.5)),
    )
    return Scenario(
        agents=agents,
        min_nodes=min_nodes,
        max_nodes=rng.choice((agents, agents, agents + 2, max(min_nodes, agents - 1))),
        interval_ms=interval_ms,
        timeout_ms=timeout_ms,
        join_timeout_ms=rng.choice((20_000, 40_000)),
        form_timeout_ms=rng.choice((8_000, 12_000)),
        max_restarts=rng.choice((0, 1, 3, 10)),
        recovery=recovery,
        safety_ms=rng.randint(15_000, 35_000),
        faults=1 if theme == "success" else rng.randint(2, 9),
        total_steps=rng.randint(30, 80),
        lost_requests=trouble,
        lost_answers=trouble,
        late_requests=trouble / 2,
        slow_requests=0.5 if theme == "success" else rng.choice((0.0, 0.05)),
        missed_wakes=1.0 if theme == "success" else rng.choice((0.0, 0.3, 1.0)),
        slow_stops=rng.choice((0.0, 0.0, 0.2)),
        theme=theme,
        poison_step=rng.choice((None, None, None, None, None, 12)),
    )


def large_scenario_of(rng: random.Random) -> Scenario:
    """More members than all of whom are observers, more agents than MAX, and no faults but those of the test."""
    drawn = scenario_of(rng)
    return replace(
        drawn,
        agents=54,
        min_nodes=36,
        max_nodes=50,
        interval_ms=1000,
        timeout_ms=5000,
        join_timeout_ms=60_000,
        form_timeout_ms=12_000,
        max_restarts=10,
        recovery=replace(drawn.recovery, on_no_standby="wait", node_strikes=3, no_progress_limit=3),
        total_steps=40,
        safety_ms=20_000,
        faults=0,
        slow_stops=0.0,
        missed_wakes=0.0,
        theme="large",
        poison_step=None,
    )
