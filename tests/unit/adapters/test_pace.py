from __future__ import annotations

import pytest

from lmres.adapters.resume.pace import MAX_INTERVAL, Pace


def test_a_fixed_interval_is_kept_whatever_it_costs() -> None:
    pace = Pace(5, 0.01)
    pace.step_took(0.01)
    pace.capture_took(1.0)
    assert [s for s in range(12) if pace.is_due(s)] == [5, 10]


@pytest.mark.parametrize(
    ("cost_s", "interval"), [(0.0005, 1), (0.001, 1), (0.0011, 2), (0.003, 4), (0.1, 128), (99, 1024)]
)
def test_auto_is_the_shortest_power_of_two_within_the_budget(cost_s: float, interval: int) -> None:
    pace = Pace(0, 0.01)
    pace.step_took(0.1)
    pace.capture_took(cost_s)
    assert pace.interval == interval <= MAX_INTERVAL


def test_step_zero_is_never_due() -> None:
    assert not Pace(1, 0.01).is_due(0)
